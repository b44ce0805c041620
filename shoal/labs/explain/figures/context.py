"""The orders of context parallelism as a figure: who computes which scores in which step, and how long each step is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.engine.parallel.context.token_order import Chunks
from shoal.labs.explain.blocks import hue
from shoal.report.svg import FAINT, GRID, INK, Canvas, mix
from shoal.report.timeline.palette import WHITE, ink

SIDE = 256.0  # of the square of scores
BAR = 14.0  # of a sequence's bar, and of a place's in a step
MARGIN, GAP = 30.0, 44.0


@dataclass(frozen=True)
class Walk:
    """One order.

    Attributes:
        name: of the order.
        held: a few tokens, as the order gives them to the places.
        work: for each step of the ring and each place, the scores that it computes.
        slowness: time of the ring over its mean work.
    """

    name: str
    held: Sequence[Chunks]
    work: Sequence[Sequence[int]]
    slowness: float


def figure(walks: Sequence[Walk], tokens: int) -> str:
    """All orders side by side, as one SVG file."""
    canvas = Canvas()
    places = len(walks[0].held)
    canvas.text(MARGIN, 40, f"Causal attention of {tokens:,} tokens round a ring of {places} places", size=19,
                font_weight=650)
    words = ("Rows are queries, columns keys: the colour is the place that computes a score, "
             "the number the step in which it does.")
    canvas.text(MARGIN, 60, words, size=12, fill=FAINT)
    for i, walk in enumerate(walks):
        canvas.place(MARGIN + i * (SIDE + BAR + GAP), 92, panel(walk))
    height = 92 + 40 + SIDE + 40 + places * (places * (BAR - 4) + 10) + 20
    return canvas.document(2 * MARGIN + len(walks) * (SIDE + BAR + GAP) - GAP, height, words)


def panel(walk: Walk) -> Canvas:
    """One order: its square of scores with the sequence's bars, and the length of each step below."""
    canvas, places = Canvas(), len(walk.held)
    owner = {token: place for place, chunks in enumerate(walk.held) for chunk in chunks for token in chunk}
    n = len(owner)
    cell = SIDE / n
    canvas.text(0, 0, walk.name, size=15, font_weight=600)
    canvas.text(SIDE + BAR, 0, f"{walk.slowness:.2f} times the mean work", size=12, fill=FAINT, anchor="end")
    top = 12.0
    for token in range(n):
        ground = _ground(owner[token], places)
        canvas.add("rect", x=BAR + token * cell, y=top, width=cell, height=BAR - 3, fill=ground)
        canvas.add("rect", x=0, y=top + BAR + token * cell, width=BAR - 3, height=cell, fill=ground)
    for query in range(n):
        for key in range(n):
            x, y = BAR + key * cell, top + BAR + query * cell
            if key > query:
                canvas.add("rect", x=x, y=y, width=cell, height=cell, fill="#f6f7f9")
                continue
            step = (owner[query] - owner[key]) % places
            ground = mix(_ground(owner[query], places), WHITE, 0.62 * step / places)
            canvas.add("rect", x=x, y=y, width=cell, height=cell, fill=ground, stroke=WHITE, stroke_width=0.6)
            if cell >= 11:
                canvas.text(x + cell / 2, y + cell / 2 + 3.5, f"{step}", size=9.5, fill=ink(ground), anchor="middle")
    canvas.add("rect", x=BAR, y=top + BAR, width=SIDE, height=SIDE, fill="none", stroke=GRID)
    _steps(canvas, walk, top + BAR + SIDE + 30)
    return canvas


def _steps(canvas: Canvas, walk: Walk, y: float) -> None:
    """A bar for each place in each step; behind them, how long the step takes."""
    places, longest = len(walk.held), max(map(max, walk.work))
    left, room = 46.0, SIDE + BAR - 46
    thick = BAR - 4
    for step, work in enumerate(walk.work):
        high = places * thick
        canvas.text(0, y + high / 2 + 4, f"step {step}", size=11, fill=INK)
        canvas.add("rect", x=left, y=y, width=room * max(work) / longest, height=high, fill="#eef0f3")
        for place, scores in enumerate(work):
            canvas.add("rect", x=left, y=y + place * thick + 1, width=room * scores / longest, height=thick - 2,
                       fill=_ground(place, places))
        y += high + 10


def _ground(place: int, places: int) -> str:
    return hue(place / places)
