"""`shoal explain context --ranks 4`: the tokens of each rank, and what it computes in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.units import show_bytes
from shoal.engine.parallel.context.token_order import ORDERS, Chunks, TokenAssignment, assign_tokens, count_tokens
from shoal.labs.explain.blocks import hue, label
from shoal.labs.explain.options import FigureOptions
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.time.traffic import context_parallel, even_share
from shoal.report.charts import hide_frame, new_figure, styled, to_svg
from shoal.report.tables import text_table
from shoal.report.timeline.palette import WHITE, ink, mix
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.models import ModelShape
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.layout import ContextOrder, Layout

CELLS = 64  # maximum of the sequence's bar in a terminal
MILLION = 1_000_000
ITEMSIZE = 2  # bytes of a number that the ring carries: bf16
UNSEEN, LONGEST = "#f6f7f9", "#eef0f3"
MOST_NUMBERED = 20  # largest number of tokens whose cells are numbered


class ContextOptions(FigureOptions):
    """Context parallelism: who has which tokens, and sends what.

    What each rank computes in each step of the ring.
    """

    ranks: PositiveInt = 4
    """Context-parallel ranks."""

    ulysses: PositiveInt = 1
    """Ranks that exchange tokens for heads; the ring has ranks / ulysses positions."""

    order: ContextOrder = "zig-zag"
    """zig-zag, striped or contiguous."""

    sequence_length: PositiveInt = 32768
    """Tokens of a sequence."""

    model: str = "llama-3-8b"
    """Model whose bytes are counted: a name of the catalog."""


class RingOrder(NamedTuple):
    """One order of tokens over the ring.

    Attributes:
        held: the chunks of each position, for a few tokens.
        work: scores that each position computes in each step: [step][position].
    """

    held: Sequence[Chunks]
    work: Sequence[Sequence[int]]

    @property
    def slowdown(self) -> float:
        """Time of a ring that waits for its slowest position in each step, over the time of its mean work."""
        return sum(map(max, self.work)) / (sum(map(sum, self.work)) / len(self.work[0]))


def explain(options: ContextOptions, console: Console) -> Callable[[], str]:
    """Print which rank has and computes what. Returns a function that draws it."""
    shape, s = model_shape(options.model), options.sequence_length
    layout = Layout(cp=options.ranks, ulysses=options.ulysses, cp_order=options.order)
    check_layout(layout, shape, global_batch=1, sequence_length=s)
    orders = {name: assign_tokens(layout.model_copy(update={"cp_order": name}), s) for name in ORDERS}
    # Few tokens represent all: with 4 for each position, a chunk of zig-zag has two.
    rings = {
        name: RingOrder(ORDERS[name](4 * layout.cp_ring, layout.cp_ring, 1), count_scores(held))
        for name, held in orders.items()
    }
    console.print(Text(f"{s:,} tokens on {layout.describe()}", style="bold"))
    console.print(_draw_bar(assign_tokens(layout, min(s, max(CELLS, 2 * layout.cp)))))
    work = rings[options.order].work
    many = sum(work[0]) > MILLION
    console.print(Text(f"\nScores that a head computes in each step of the ring{', in millions' if many else ''}:"))
    console.print(_make_table(orders[options.order], work, MILLION if many else 1))
    for name, ring in rings.items():
        console.print(Text(f"  {name:<12}waits for the slowest position: {ring.slowdown:.2f} times the mean work"))
    console.print()
    console.print(Text(f"A rank sends for each layer of {options.model} and sequence, in bf16:"))
    for line in _list_bytes(shape, layout, s):
        console.print(Text(line), soft_wrap=True)
    return partial(draw, rings, s)


def count_scores(held: TokenAssignment) -> list[list[int]]:
    """Count the scores of a head that each position computes in each step of the ring: [step][position]."""
    from shoal.engine.parallel.context.causal_blocks import split_scores  # slow import

    positions = range(held.ring)
    slices = range(len(held.by_slice))
    chunks = [held.ring_chunks(position, slices) for position in positions]
    return [
        [sum(block.scores for block in split_scores(chunks[i], chunks[(i - step) % held.ring])) for i in positions]
        for step in positions
    ]


def _draw_bar(held: TokenAssignment) -> Text:
    """Draw a short sequence from left to right, with the rank of each token."""
    owner = {token: rank for rank in range(held.ring * held.ulysses) for c in held.chunks(rank) for token in c}
    bar = Text("  ")
    for _, rank in sorted(owner.items()):
        bar.append_text(label(f"{rank % 10}", hue(rank / (held.ring * held.ulysses))))
    return bar


def _make_table(held: TokenAssignment, work: Sequence[Sequence[int]], unit: int) -> Table:
    ulysses = held.ulysses > 1
    rows = []
    for position in range(held.ring):
        ranks = held.ranks(position)
        who = [f"{ranks[0]} to {ranks[-1]}"] if ulysses else []
        chunks = held.ring_chunks(position, range(len(held.by_slice)))
        mine = [step[position] for step in work]
        shown = [f"{scores:,}" if unit == 1 else f"{scores / unit:,.1f}" for scores in (*mine, sum(mine))]
        rows.append([str(position), *who, _format_chunks(chunks), *shown])
    steps = (f"step {step}" for step in range(held.ring))
    headings = ["position", "ranks", "tokens", *steps, "total"] if ulysses else ["rank", "tokens", *steps, "total"]
    return text_table(headings, rows, words=(1, 2) if ulysses else (1,))


def _format_chunks(chunks: tuple[range, ...]) -> str:
    runs = [f"{c[0]}-{c[-1]}" if c.step == 1 else f"{c[0]}, {c[0] + c.step}, ... {c[-1]}" for c in chunks[:4]]
    return "; ".join(runs) + (f"; and more, {count_tokens(chunks)} total" if len(chunks) > 4 else "")


def _list_bytes(shape: ModelShape, layout: Layout, s: int) -> list[str]:
    run, lines = MicroBatch(shape, layout, s, ITEMSIZE), []
    block, gradient = (show_bytes(each * run.ring_elements) for each in (run.itemsize, run.exact))
    if layout.cp_ring > 1:
        lines += [
            f"  round the ring, forward    {layout.cp_ring - 1} x {block} of keys and values",
            f"  round the ring, backward   {layout.cp_ring - 1} x {block} again and "
            f"{gradient} of gradients (fp32)",
        ]
    if layout.ulysses > 1:
        sent, _ = context_parallel(run, 1, even_share(run))
        lines.append(f"  heads for tokens and back  {show_bytes(sent['ulysses', 'all-to-all'])} in each direction")
    return lines


# ---- figure ---------------------------------------------------------------------------------------------------------


@styled
def draw(orders: Mapping[ContextOrder, RingOrder], tokens: int) -> str:
    """Draw all orders side by side as SVG."""
    positions = len(next(iter(orders.values())).held)
    title = (
        f"Causal attention of {tokens:,} tokens over a ring of {positions} positions\n"
        "Rows are queries, columns keys: the colour is the position that computes a score, the number the step.\n"
        "Below, the work of each position in each step, and in grey the time of the step."
    )
    figure, charts = new_figure(
        330 * len(orders), 60 + 2 * max(320, 7 * positions**2), rows=2, columns=len(orders), title=title
    )
    for (name, order), above, below in zip(orders.items(), charts, charts[len(orders) :], strict=False):
        above.set_title(f"{name}\n{order.slowdown:.2f} times the mean work")
        _draw_scores(above, order)
        _draw_steps(below, order)
    return to_svg(figure)


def _draw_scores(axes: Axes, order: RingOrder) -> None:
    positions = len(order.held)
    owner = {token: position for position, chunks in enumerate(order.held) for chunk in chunks for token in chunk}
    n = len(owner)
    cells = np.ones((n + 1, n + 1, 3))
    for query in range(n):
        ground = hue(owner[query] / positions)
        cells[query + 1, 0] = cells[0, query + 1] = to_rgb(ground)
        for key in range(query + 1):
            step = (owner[query] - owner[key]) % positions
            shade = mix(ground, WHITE, 0.62 * step / positions)
            cells[query + 1, key + 1] = to_rgb(shade)
            if n <= MOST_NUMBERED:
                axes.text(key + 1, query + 1, f"{step}", color=ink(shade), size=6.5, ha="center", va="center")
        cells[query + 1, query + 2 :] = to_rgb(UNSEEN)
    axes.imshow(cells)
    axes.set_axis_off()


def _draw_steps(axes: Axes, order: RingOrder) -> None:
    positions = len(order.held)
    steps = np.arange(len(order.work))
    axes.barh(steps, [max(work) for work in order.work], height=0.8, color=LONGEST)
    for position in range(positions):
        at = steps + 0.8 * ((position + 0.5) / positions - 0.5)
        axes.barh(at, [work[position] for work in order.work], height=0.7 / positions, color=hue(position / positions))
    axes.set_yticks(steps, [f"step {step}" for step in steps])
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    hide_frame(axes)
