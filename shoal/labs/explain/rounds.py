"""Draw a collective round by round, in a terminal and as SVG: the blocks of every rank, and the messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator
from rich.console import Group, RenderableType
from rich.text import Text

from shoal.base.units import show_bytes, show_seconds
from shoal.labs.collectives.checker import State, contributors, play
from shoal.labs.collectives.description import REDUCING, Collective, Description, Round
from shoal.labs.collectives.price import price_round
from shoal.labs.collectives.topology import Topology
from shoal.report.charts import hide_frame, styled
from shoal.report.tables import text_table
from shoal.report.timeline.palette import INK, ink, mix

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


def draw_rounds(
    description: Description, topology: Topology, size: float, values: Sequence[float] = ()
) -> RenderableType:
    """Draw a line for each round: its messages, its time for S = ``size`` bytes and every rank's blocks after it.

    Args:
        values: the number that each rank begins with, to print the ranks' numbers instead of blocks (one block alone).
    """
    n, states = description.ranks, play(description)
    start = next(states)
    wide = bool(values) or n * (len(cells(description, start, 0)) + 1) <= MOST_WIDTH
    drawn = range(n if n * 2 <= MOST_WIDTH else 0)

    def draw(held: State) -> list[Text]:
        if values:
            return [Text(f"{sum_values(held, rank, values):g}" if held[rank] else SHADES[0]) for rank in drawn]
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
    if values:
        legend = "each rank's number; what arrives is added or stored"
    if not drawn:
        legend = f"(blocks are drawn for up to {MOST_WIDTH // 2} ranks; these are {n})"
    block = f"1 block = {description.share} S = {show_bytes(size * float(description.share))}"
    return Group(table, Text(legend, "dim"), Text(block, "dim"))


def sum_values(held: State, rank: int, values: Sequence[float]) -> float:
    """Return the number in the only block of a rank: the sum of its contributors' values, without rounding's noise."""
    return round(sum(values[each] for each in held[rank][0]), 9)


def _draw_cells(parts: list[float], wide: bool) -> Text:
    text = Text()
    for part in parts if wide else [sum(parts) / len(parts)]:
        text.append(shade(part), "dim" if part == 0 else "cyan" if part == 1 else "yellow")
    return text


def shade(part: float) -> str:
    """Return a character for 0 to 1; the first is exactly 0, the last exactly 1."""
    return SHADES[0] if part == 0 else SHADES[-1] if part >= 1 else SHADES[1 + min(2, int(part * 3))]


# ---- figure: time runs down, ranks are side by side, arrows are messages ---------------------------------------------

STORED, ADDED, PARTLY, EMPTY = "#2563eb", "#e07b1a", "#f0ac60", "#eef0f3"
BOX, WIDE = 0.28, 0.84  # height of a rank's blocks, of a round; and their width, of the distance of two ranks
MOST_CELLS = 9  # largest number of ranks whose traffic is numbered


@styled
def draw_figure(axes: Axes, description: Description, topology: Topology, size: float) -> None:
    """Draw every round of a description for S = ``size`` bytes: x is the rank, y the round."""
    corners, fills, edges = [], [], []
    for number, held in enumerate(play(description)):
        for rank in range(description.ranks):
            output, start = description.final(rank), rank - WIDE / 2
            done = bool(output) and all(held[rank].get(b) == contributors(description, b) for b in output)
            parts = cells(description, held, rank)
            for part, equal in groupby(parts):  # a block is darker with more contributions
                end = start + WIDE * len(list(equal)) / len(parts)
                corners.append([(start, number), (end, number), (end, number + BOX), (start, number + BOX)])
                fills.append(EMPTY if part == 0 else STORED if part >= 1 else mix("#fbe3c6", ADDED, part))
                edges.append(INK if done else "white")
                start = end
    axes.add_collection(PolyCollection(corners, facecolors=fills, edgecolors=edges, linewidths=0.8))
    every = [(i, message) for i, messages in enumerate(description.rounds) for message in messages]
    colours = [ADDED if message.reduce else STORED for _, message in every]
    steps = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    arrows = [
        Path([(m.source, i + BOX), (m.source, i + 0.65), (m.target, i + 0.6), (m.target, i + 0.92)], steps)
        for i, m in every
    ]
    axes.add_collection(PathCollection(arrows, facecolors="none", edgecolors=colours, linewidths=1.3, alpha=0.85))
    axes.scatter([m.target for _, m in every], [i + 0.94 for i, _ in every], marker="v", s=14, c=colours)
    times = [show_seconds(price_round(r, description.share, topology).seconds(size)) for r in description.rounds]
    axes.set_yticks([i + 0.6 for i in range(len(times))], [f"round {i + 1}\n{time}" for i, time in enumerate(times)])
    axes.set(xlim=(-0.5, description.ranks - 0.5), ylim=(len(times) + BOX + 0.05, -0.05))
    axes.xaxis.tick_top()
    axes.xaxis.set_major_locator(MaxNLocator(24, integer=True))
    axes.xaxis.set_major_formatter(lambda rank, _: f"rank {rank:.0f}")
    hide_frame(axes)
    sums = {message.reduce for message in description.messages}
    handles: list[Patch | Line2D] = [Patch(color=PARTLY, label="sum of some ranks")] if True in sums else []
    handles += [Patch(color=STORED, label="complete"), Patch(color=EMPTY, label="nothing"),
                Patch(facecolor="none", edgecolor=INK, label="rank done")]  # fmt: skip
    ways = {True: (ADDED, "sent and added"), False: (STORED, "sent and stored")}
    handles += [Line2D([], [], color=ways[added][0], label=ways[added][1]) for added in sorted(sums)]
    handles.append(Patch(color="none", label=f"strip: blocks, each {description.share} S = "
                                             f"{show_bytes(size * float(description.share))}"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.0, 0.0), ncols=4)


@styled
def draw_traffic(axes: Axes, description: Description, size: float) -> None:
    """Draw the matrix of bytes sent between ranks over all rounds: the darker, the more."""
    sent = np.zeros((description.ranks, description.ranks))
    for message in description.messages:
        sent[message.source, message.target] += len(message.blocks)
    drawn = axes.imshow(
        np.ma.masked_equal(sent, 0), cmap=LinearSegmentedColormap.from_list("traffic", ("#dbe7fd", "#1d3f9c"))
    )
    axes.set_title("Sent over all rounds: from row to column")
    axes.xaxis.tick_top()
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    hide_frame(axes)
    if description.ranks <= MOST_CELLS:
        shades = drawn.to_rgba(sent)
        for (source, target), blocks in np.ndenumerate(sent):
            words = show_bytes(blocks * float(description.share) * size)
            axes.text(target, source, words if blocks else "", ha="center", va="center", size=6,
                      color=ink(to_hex(shades[source, target].tolist())))
