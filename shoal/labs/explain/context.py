"""`shoal explain context --ranks 4`: which rank has which tokens of a sequence, and what it computes in each step."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.files import check_writable
from shoal.base.section import Section
from shoal.base.units import show_bytes
from shoal.engine.parallel.context.causal_blocks import pieces
from shoal.engine.parallel.context.token_order import ORDERS, TokenAssignment, count, spread
from shoal.labs.explain.blocks import hue
from shoal.labs.explain.figures.context import Walk, figure
from shoal.planning.cost.context import layer_bytes
from shoal.report.timeline.palette import ink
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.models import ModelShape
from shoal.spec.layout import ContextOrder, Layout
from shoal.spec.layout.sizes import check_layout

CELLS = 64  # of the sequence's bar in a terminal
MILLION = 1_000_000
ITEMSIZE = 2  # of what the ring carries: bf16


class ContextOptions(Section):
    """Context parallelism: which rank has which tokens, what it computes in each step of the ring, what it sends."""

    ranks: PositiveInt = 4
    """Context-parallel ranks."""

    ulysses: PositiveInt = 1
    """So many of them exchange tokens for heads; the ring has ranks / ulysses places."""

    order: ContextOrder = "zig-zag"
    """zig-zag, striped or contiguous."""

    sequence_length: PositiveInt = 32768
    """Tokens of a sequence."""

    model: str = "llama-3-8b"
    """Whose bytes are counted: a model of the catalog."""

    out: Path | None = None
    """Also draw all orders to this file, .svg."""


def explain(options: ContextOptions, console: Console) -> int:
    """Print, and draw where that is asked for; the exit code.

    Raises:
        UsageError: ranks, heads and tokens do not fit each other, or the file cannot be written.
    """
    check_writable(options.out, "--out", ".svg")
    shape = model_shape(options.model)
    layout = Layout(cp=options.ranks, ulysses=options.ulysses, cp_order=options.order)
    check_layout(layout, shape, global_batch=1, sequence_length=options.sequence_length)
    held = spread(layout, options.sequence_length)
    console.print(Text(f"{options.sequence_length:,} tokens on {layout.describe()}", style="bold"))
    console.print(_bar(spread(layout, min(options.sequence_length, max(CELLS, 2 * layout.cp)))))
    work = work_of(held)
    many = sum(work[0]) > MILLION
    console.print(Text(f"\nScores that a head computes in each step of the ring{', in millions' if many else ''}:"))
    console.print(_table(held, work, MILLION if many else 1))
    for name in ORDERS:
        other = layout.model_copy(update={"cp_order": name})
        share = slowness(work_of(spread(other, options.sequence_length)))
        console.print(Text(f"  {name:<12}waits for the fullest place: {share:.2f} times the mean work"))
    console.print()
    console.print(Text(f"A rank sends for each layer of {options.model} and sequence, in bf16:"))
    for line in _bytes(shape, layout, options.sequence_length):
        console.print(Text(line), soft_wrap=True)
    if options.out:
        walks = []
        for name in ORDERS:
            drawn = spread(layout.model_copy(update={"cp_order": name}), options.sequence_length)
            # Few tokens stand for all: with 4 for each place a chunk of zig-zag has two.
            coarse = ORDERS[name](4 * layout.ring, layout.ring, 1)
            walks.append(Walk(name, coarse, work_of(drawn), slowness(work_of(drawn))))
        options.out.write_text(figure(walks, options.sequence_length), encoding="utf-8")
        console.print(Text(f"written: {options.out}"))
    return 0


def work_of(held: TokenAssignment) -> list[list[int]]:
    """For each step of the ring and each place, the scores of a head that it computes."""
    places = range(held.ring)
    slices = range(len(held.held))
    chunks = [held.place_chunks(place, slices) for place in places]
    return [
        [sum(piece.scores for piece in pieces(chunks[place], chunks[(place - step) % held.ring])) for place in places]
        for step in places
    ]


def slowness(work: list[list[int]]) -> float:
    """How long a ring takes that waits for its slowest place in each step, over its mean work."""
    return sum(map(max, work)) / (sum(map(sum, work)) / len(work[0]))


def _bar(held: TokenAssignment) -> Text:
    """A sequence of few tokens from left to right, each with the rank that has it."""
    owner = {token: rank for rank in range(held.ring * held.ulysses) for c in held.chunks(rank) for token in c}
    bar = Text("  ")
    for _, rank in sorted(owner.items()):
        ground = hue(rank / (held.ring * held.ulysses))
        bar.append(f"{rank % 10}", style=f"{ink(ground)} on {ground}")
    return bar


def _table(held: TokenAssignment, work: list[list[int]], unit: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("place" if held.ulysses > 1 else "rank", justify="right")
    if held.ulysses > 1:
        table.add_column("ranks")
    table.add_column("tokens", no_wrap=True)
    for step in range(held.ring):
        table.add_column(f"step {step}", justify="right", no_wrap=True)
    table.add_column("in all", justify="right", no_wrap=True)
    for place in range(held.ring):
        ranks = held.ranks(place)
        who = [f"{ranks[0]} to {ranks[-1]}"] if held.ulysses > 1 else []
        chunks = held.place_chunks(place, range(len(held.held)))
        mine = [step[place] for step in work]
        shown = [f"{scores:,}" if unit == 1 else f"{scores / unit:,.1f}" for scores in (*mine, sum(mine))]
        table.add_row(str(place), *who, _words(chunks), *shown)
    return table


def _words(chunks: tuple[range, ...]) -> str:
    """Chunks as people write them: 0-4095, 28672-32767; every fourth from 0."""
    runs = [f"{c[0]}-{c[-1]}" if c.step == 1 else f"{c[0]}, {c[0] + c.step}, ... {c[-1]}" for c in chunks[:4]]
    return "; ".join(runs) + (f"; and more, {count(chunks)} in all" if len(chunks) > 4 else "")


def _bytes(shape: ModelShape, layout: Layout, s: int) -> list[str]:
    sent = layer_bytes(shape, layout, s, ITEMSIZE)
    lines = []
    if layout.ring > 1:
        lines += [
            f"  round the ring, forward    {layout.ring - 1} x {show_bytes(sent.block)} of keys and values",
            f"  round the ring, backward   {layout.ring - 1} x {show_bytes(sent.block)} of them again and "
            f"{show_bytes(sent.gradient)} of gradients (fp32)",
        ]
    if layout.ulysses > 1:
        lines.append(f"  heads for tokens and back  {show_bytes(sent.exchange)} in each direction")
    return lines
