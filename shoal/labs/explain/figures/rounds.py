"""A collective round by round as a figure: time runs down, ranks stand side by side, arrows are messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shoal.base.units import show_bytes, show_seconds
from shoal.labs.collectives.checker import play
from shoal.labs.collectives.description import Description
from shoal.labs.collectives.price import price_round
from shoal.labs.collectives.topology import Topology
from shoal.labs.explain.rounds import cells
from shoal.report.svg import FAINT, GRID, INK, Canvas, mix

STORED, ADDED = "#2563eb", "#e07b1a"
EMPTY = "#eef0f3"
ROW, BOX, GAP = 70, 20, 14  # from round to round; the height of what a rank holds; between ranks
LEFT, RIGHT = 74, 64  # for the round's number, and for its time
NARROWEST = 2  # strip that is drawn; of narrower ones only the mean
HEAD = 30  # for the ranks' numbers
LEGEND = 34


def height(description: Description) -> float:
    """Of the figure, in pixels."""
    return HEAD + len(description.rounds) * ROW + BOX + LEGEND


def rounds(description: Description, topology: Topology, size: float, *, width: float) -> Canvas:
    """Every round of a description.

    Args:
        size: S in bytes, for the times at the right.
        width: of the figure, in pixels.
    """
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
            done = _done(description, rank, parts)
            strips = parts if wide / len(parts) >= NARROWEST else [sum(parts) / len(parts)]
            _box(canvas, x - wide / 2, y, wide, strips, done=done)
    _legend(canvas, HEAD + len(description.rounds) * ROW + BOX + 24, description, size)
    return canvas


def _done(description: Description, rank: int, parts: Sequence[float]) -> bool:
    """Whether a rank has all that it must end with."""
    blocks = description.final(rank)
    if len(blocks) != len(parts):
        return bool(blocks) and all(parts[block] >= 1 for block in blocks)
    return all(part >= 1 for part in parts)


def _box(canvas: Canvas, x: float, y: float, width: float, parts: Sequence[float], *, done: bool) -> None:
    """What one rank holds: a strip for each block, the darker the more contributions are in it."""
    each = width / len(parts)
    canvas.add("rect", x=x, y=y, width=width, height=BOX, fill=EMPTY, rx=2)
    start = 0
    for part, alike in groupby(parts):
        count = len(list(alike))
        if part > 0:
            colour = STORED if part >= 1 else mix("#fbe3c6", ADDED, part)
            canvas.add("rect", x=x + start * each, y=y, width=count * each, height=BOX, fill=colour)
        start += count
    if each > 3 and len(parts) > 1:
        between = " ".join(f"M{x + i * each:.1f} {y} v{BOX}" for i in range(1, len(parts)))
        canvas.add("path", d=between, stroke="#ffffff", stroke_width=1)
    canvas.add("rect", x=x, y=y, width=width, height=BOX, fill="none", rx=2, stroke=INK if done else "#c3c8d0",
               stroke_width=1.8 if done else 1)


def _arrow(canvas: Canvas, x0: float, y0: float, x1: float, y1: float, added: bool) -> None:
    colour = ADDED if added else STORED
    bend = (y1 - y0) * 0.45
    tip = y1 - 5
    canvas.add("path", d=f"M{x0:.1f} {y0} C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {tip - bend:.1f} {x1:.1f} {tip}",
               fill="none", stroke=colour, stroke_width=1.6, opacity=0.85)
    canvas.add("path", d=f"M{x1 - 4:.1f} {tip - 1} L{x1:.1f} {y1} L{x1 + 4:.1f} {tip - 1} Z", fill=colour)


def _legend(canvas: Canvas, y: float, description: Description, size: float) -> None:
    block = show_bytes(size * float(description.share))
    x = float(LEFT)
    items = [(STORED, "complete"), (EMPTY, "nothing")]
    if any(message.reduce for message in description.messages):
        items.insert(0, (mix("#fbe3c6", ADDED, 0.5), "sum of some ranks"))
    for colour, words in items:
        canvas.add("rect", x=x, y=y - 10, width=12, height=12, fill=colour, stroke=GRID)
        canvas.text(x + 17, y, words, size=11.5, fill=FAINT)
        x += 30 + 6.4 * len(words)
    canvas.add("rect", x=x, y=y - 10, width=12, height=12, fill="none", rx=2, stroke=INK, stroke_width=1.8)
    canvas.text(x + 17, y, "rank done", size=11.5, fill=FAINT)
    x += 30 + 6.4 * 9
    arrows = {message.reduce for message in description.messages}
    for added, words in ((True, "sent and added"), (False, "sent and stored")):
        if added in arrows:
            canvas.add("path", d=f"M{x} {y - 4} h16", stroke=ADDED if added else STORED, stroke_width=2)
            canvas.text(x + 21, y, words, size=11.5, fill=FAINT)
            x += 34 + 6.4 * len(words)
    canvas.text(x, y, f"strip: a block, {description.share} S = {block}", size=11.5, fill=FAINT)


def matrix(description: Description, size: float, *, side: float) -> Canvas:
    """Who sends how much to whom over all rounds: the darker, the more."""
    canvas = Canvas()
    n = description.ranks
    sent: dict[tuple[int, int], int] = {}
    for message in description.messages:
        sent[message.source, message.target] = sent.get((message.source, message.target), 0) + len(message.blocks)
    most = max(sent.values(), default=1)
    left, top = 24.0, 44.0
    each = (side - left) / n
    canvas.text(0, 16, "Sent over all rounds: from row to column", size=14, font_weight=600)
    every = max(1, -(-n // 16))
    for i in range(n):
        if i % every == 0:
            canvas.text(left + (i + 0.5) * each, top - 5, f"{i}", size=10.5, fill=FAINT, anchor="middle")
            canvas.text(left - 6, top + (i + 0.5) * each + 4, f"{i}", size=10.5, fill=FAINT, anchor="end")
        for j in range(n):
            part = sent.get((i, j), 0) / most
            canvas.add(
                "rect", x=left + j * each + 0.5, y=top + i * each + 0.5, width=each - 1, height=each - 1,
                fill=mix("#dbe7fd", "#1d3f9c", part) if part else "#f6f7f9",
            )
            if part and each >= 34:
                words = show_bytes(sent[i, j] * float(description.share) * size)
                canvas.text(
                    left + (j + 0.5) * each, top + (i + 0.5) * each + 3.5, words.replace(" ", "\u202f"),
                    size=9, anchor="middle", fill="#ffffff" if part > 0.45 else INK,
                )
    return canvas
