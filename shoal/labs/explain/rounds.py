"""Draw a collective round by round, in a terminal and as SVG: the blocks of every rank, and the messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from rich.console import Group, RenderableType
from rich.text import Text

from shoal.base.units import show_bytes, show_seconds
from shoal.labs.collectives.checker import State, contributors, play
from shoal.labs.collectives.description import REDUCING, Collective, Description, Round
from shoal.labs.collectives.price import price_round
from shoal.labs.collectives.topology import Topology
from shoal.report.charts import styled
from shoal.report.svg import FAINT, GRID, INK, Canvas, mix
from shoal.report.tables import text_table
from shoal.report.timeline.palette import WHITE

SHADES = "·░▒▓█"
MOST_ROUNDS = 32  # largest number shown; of more, the first and the last
MOST_WIDTH = 88  # maximum width of all ranks' blocks; above it, each rank's blocks become one character


def cells(description: Description, held: State, rank: int) -> list[float]:
    """Return how complete each block on a rank is, 0 to 1; in an all-to-all, each of the N blocks of its output."""
    everyone = description.collective is Collective.ALL_TO_ALL
    blocks = description.final(rank) if everyone else range(description.blocks)
    wanted = description.ranks if description.collective in REDUCING else 1
    return [len(held[rank].get(block, ())) / wanted for block in blocks]


def describe_round(description: Description, messages: Round) -> str:
    """Describe the messages of a round; a shift by all ranks and a pair that exchanges are one entry each."""
    n, sizes = description.ranks, sorted({len(message.blocks) for message in messages})
    added = sum(message.reduce for message in messages)
    how = "" if not added else ", added" if added == len(messages) else ", some added"
    number = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    what = f"{number} block{'s' if sizes != [1] else ''}{how}"
    shifts = {(message.target - message.source) % n for message in messages}
    if len(messages) == n > 2 and len(shifts) == 1:
        shift = min(shifts)
        return f"every rank r → r {f'+ {shift}' if 2 * shift <= n else f'− {n - shift}'}: {what}"
    return f"{' '.join(_ways(messages))}: {what}"


def _ways(messages: Round) -> list[str]:
    ways, parts = {(m.source, m.target): len(m.blocks) for m in messages}, []
    for (source, target), count in ways.items():
        if ways.get((target, source)) == count:
            if source < target:
                parts.append(f"{source}↔{target}")
        else:
            parts.append(f"{source}→{target}")
    return parts


def draw_rounds(description: Description, topology: Topology, size: float) -> RenderableType:
    """Draw a line for each round: its messages, its time for S = ``size`` bytes and every rank's blocks after it."""
    n, states = description.ranks, play(description)
    start = next(states)
    wide = n * (len(cells(description, start, 0)) + 1) <= MOST_WIDTH
    drawn = range(n if n * 2 <= MOST_WIDTH else 0)

    def draw(held: State) -> list[Text]:
        return [_draw_cells(cells(description, held, rank), wide) for rank in drawn]

    rows: list[tuple[str | Text, ...]] = [("start", *draw(start), "", "")]
    for number, (messages, held) in enumerate(zip(description.rounds, states, strict=True), 1):
        seconds = show_seconds(price_round(messages, description.share, topology).seconds(size))
        words = describe_round(description, messages)
        rows.append((f"{number}", *draw(held), seconds, words if len(words) < 120 else f"{words[:110]} …"))
    if (left_out := len(description.rounds) - MOST_ROUNDS) > 0:
        first = 1 + MOST_ROUNDS // 2
        rows[first : first + left_out] = [("…", *[""] * len(drawn), "", f"{left_out} more rounds")]
    headings = ("", *(f"{'rank ' if rank == 0 and wide else ''}{rank}" for rank in drawn), "time", "messages")
    table = text_table(headings, rows, words={*range(len(headings))} - {len(headings) - 2}, gap=1)
    legend = "a rank's blocks: · none  ░▒▓ sums of some ranks  █ complete"
    if not drawn:
        legend = f"(blocks are drawn for up to {MOST_WIDTH // 2} ranks; these are {n})"
    block = f"1 block = {description.share} S = {show_bytes(size * float(description.share))}"
    return Group(table, Text(legend, "dim"), Text(block, "dim"))


def _draw_cells(parts: list[float], wide: bool) -> Text:
    text = Text()
    for part in parts if wide else [sum(parts) / len(parts)]:
        text.append(shade(part), "dim" if part == 0 else "cyan" if part == 1 else "yellow")
    return text


def shade(part: float) -> str:
    """Return a character for 0 to 1; the first is exactly 0, the last exactly 1."""
    return SHADES[0] if part == 0 else SHADES[-1] if part >= 1 else SHADES[1 + min(2, int(part * 3))]


# ---- figure: time runs down, ranks are side by side, arrows are messages ---------------------------------------------

STORED, ADDED = "#2563eb", "#e07b1a"
EMPTY = "#eef0f3"
ROW, BOX, GAP = 70, 20, 14  # height of a round, height of a rank's box, gap between ranks [pixels]
LEFT, RIGHT = 74, 64  # margins for the round's number and its time
NARROWEST = 2  # minimum width of a strip; below it, the mean is drawn
HEAD = 30  # margin for the ranks' numbers
LEGEND = 34
MOST_CELLS = 9  # largest number of ranks whose traffic is numbered


def draw_figure(description: Description, topology: Topology, size: float, width: float) -> tuple[Canvas, float]:
    """Draw every round of a description for S = ``size`` bytes, ``width`` pixels wide. Returns the height, too."""
    canvas = Canvas()
    n = description.ranks
    step = (width - LEFT - RIGHT) / n
    wide = step - min(GAP, step / 4)
    centre = [LEFT + (rank + 0.5) * step for rank in range(n)]
    for rank, x in enumerate(centre):
        words = f"rank {rank}" if step > 46 else f"{rank}"
        canvas.text(x, 16, words, size=12, anchor="middle", font_weight=600)
    states = list(play(description))
    for number, messages in enumerate(description.rounds):
        top, bottom = HEAD + number * ROW + BOX, HEAD + (number + 1) * ROW
        canvas.text(0, (top + bottom) / 2 + 4, f"round {number + 1}", size=12, fill=FAINT)
        seconds = price_round(messages, description.share, topology).seconds(size)
        canvas.text(width, (top + bottom) / 2 + 4, show_seconds(seconds), size=12, fill=FAINT, anchor="end")
        for message in sorted(messages, key=lambda m: -abs(m.source - m.target)):
            _arrow(canvas, centre[message.source], top + 2, centre[message.target], bottom - 3, message.reduce)
    for number, held in enumerate(states):
        y = HEAD + number * ROW
        for rank, x in enumerate(centre):
            parts = cells(description, held, rank)
            output = description.final(rank)
            done = bool(output) and all(held[rank].get(b) == contributors(description, b) for b in output)
            strips = parts if wide / len(parts) >= NARROWEST else [sum(parts) / len(parts)]
            _box(canvas, x - wide / 2, y, wide, strips, done=done)
    bottom = HEAD + len(description.rounds) * ROW + BOX
    _legend(canvas, bottom + 24, description, size)
    return canvas, bottom + LEGEND


def _box(canvas: Canvas, x: float, y: float, width: float, parts: Sequence[float], *, done: bool) -> None:
    """Draw a strip for each block of a rank, the darker the more contributions it has."""
    each = width / len(parts)
    canvas.rect(x, y, width, BOX, EMPTY, rx=2)
    start = 0
    for part, equal in groupby(parts):
        count = len(list(equal))
        if part > 0:
            colour = STORED if part >= 1 else mix("#fbe3c6", ADDED, part)
            canvas.rect(x + start * each, y, count * each, BOX, colour)
        start += count
    if each > 3 and len(parts) > 1:
        between = " ".join(f"M{x + i * each:.1f} {y} v{BOX}" for i in range(1, len(parts)))
        canvas.add("path", d=between, stroke="#ffffff", stroke_width=1)
    edge = {"stroke": INK, "stroke_width": 1.8} if done else {"stroke": "#c3c8d0"}
    canvas.rect(x, y, width, BOX, "none", rx=2, **edge)


def _arrow(canvas: Canvas, x0: float, y0: float, x1: float, y1: float, added: bool) -> None:
    colour = ADDED if added else STORED
    bend = (y1 - y0) * 0.45
    tip = y1 - 5
    canvas.add("path", d=f"M{x0:.1f} {y0} C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {tip - bend:.1f} {x1:.1f} {tip}",
               fill="none", stroke=colour, stroke_width=1.6, opacity=0.85)
    canvas.add("path", d=f"M{x1 - 4:.1f} {tip - 1} L{x1:.1f} {y1} L{x1 + 4:.1f} {tip - 1} Z", fill=colour)


def _legend(canvas: Canvas, y: float, description: Description, size: float) -> None:
    sums = {message.reduce for message in description.messages}
    boxes = [(mix("#fbe3c6", ADDED, 0.5), GRID, "sum of some ranks")] if True in sums else []
    boxes += [(STORED, GRID, "complete"), (EMPTY, GRID, "nothing"), ("none", INK, "rank done")]
    x = float(LEFT)
    for fill, stroke, words in boxes:
        canvas.rect(x, y - 10, 12, 12, fill, stroke=stroke)
        x = _legend_text(canvas, x + 17, y, words)
    for added, words in ((True, "sent and added"), (False, "sent and stored")):
        if added in sums:
            canvas.add("path", d=f"M{x} {y - 4} h16", stroke=ADDED if added else STORED, stroke_width=2)
            x = _legend_text(canvas, x + 21, y, words)
    _legend_text(canvas, x, y, f"strip: a block, {description.share} S = {show_bytes(size * float(description.share))}")


def _legend_text(canvas: Canvas, x: float, y: float, words: str) -> float:
    """Return the x of the next entry."""
    canvas.text(x, y, words, size=11.5, fill=FAINT)
    return x + 13 + 6.4 * len(words)


@styled
def draw_traffic(axes: Axes, description: Description, size: float) -> None:
    """Draw the matrix of bytes sent between ranks over all rounds: the darker, the more."""
    sent = np.zeros((description.ranks, description.ranks))
    for message in description.messages:
        sent[message.source, message.target] += len(message.blocks)
    axes.imshow(np.ma.masked_equal(sent, 0), cmap=LinearSegmentedColormap.from_list("traffic", ("#dbe7fd", "#1d3f9c")))
    axes.set_title("Sent over all rounds: from row to column")
    axes.xaxis.tick_top()
    axes.grid(False)
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    axes.tick_params(length=0)
    if description.ranks <= MOST_CELLS:
        for (source, target), blocks in np.ndenumerate(sent):
            words = show_bytes(blocks * float(description.share) * size)
            axes.text(target, source, words if blocks else "", ha="center", va="center", size=6,
                      color=WHITE if blocks > 0.45 * sent.max() else INK)
