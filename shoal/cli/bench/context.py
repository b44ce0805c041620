"""`shoal bench context` and `shoal bench long-context`."""

from __future__ import annotations

from statistics import median

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.base.units import show_bytes, show_seconds
from shoal.labs.bench.context import WAYS, AttentionCase, makes_room, ratios, seconds_of_a_step, train
from shoal.labs.bench.race import quartiles
from shoal.planning.cost.memory import activations
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.spec.config import build_config
from shoal.spec.layout import ContextOrder, Layout
from shoal.spec.number_formats import FORMATS

MIB = 2**20


class ContextBenchOptions(Section):
    """Ring attention, forward and backward, against the same blocks without a ring; exit code 1 if it is slower than
    the target allows."""

    ranks: PositiveInt = 2
    """Places of the ring, each a rank of one thread."""

    tokens: PositiveInt = 8192
    """Of the sequence, over all ranks."""

    heads: PositiveInt = 8
    """Query heads."""

    kv_heads: PositiveInt = 4
    """Key and value heads."""

    head_dim: PositiveInt = 64
    """Width of a head."""

    order: ContextOrder = "zig-zag"
    """Which tokens a rank has."""

    repeats: PositiveInt = 7
    """Of each way, in turn; what is compared are medians."""

    target: PositiveFloat = 1.15
    """How many times the bound's time the ring may take."""


class LongContextOptions(Section):
    """Train on sequences whose activations one device has no room for; exit code 1 if a rank has none either, or one
    device would have had it."""

    ranks: PositiveInt = 4
    """Context-parallel ranks, each of one thread."""

    ulysses: PositiveInt = 1
    """So many of them exchange tokens for heads."""

    tokens: PositiveInt = 32768
    """Of a sequence."""

    layers: PositiveInt = 2
    """Of the model, whose other sizes are those of tiny."""

    steps: PositiveInt = 2
    """Of the training, one sequence each."""

    budget_mib: PositiveFloat = 512.0
    """Room for what a forward leaves for its backward, on each device."""


def context(options: ContextBenchOptions, console: Console) -> int:
    """Time both, and say whether the target is met."""
    what = AttentionCase(
        options.ranks, options.tokens, options.heads, options.kv_heads, options.head_dim, order=options.order
    )
    layout = Layout(cp=options.ranks, cp_order=options.order)
    if options.ranks < 2 or options.tokens < 2 * options.ranks or options.heads % options.kv_heads:
        raise UsageError("bench context: give 2 ranks or more, 2 tokens for each, and heads that kv_heads divides.")
    seconds = seconds_of_a_step(what, options.repeats)
    table = Table(title=f"attention of {options.tokens:,} tokens on {layout.describe()}, forward and backward")
    for column in ("", "median ms", "fastest ms"):
        table.add_column(column, justify="right" if column else "left")
    for way, words in zip(WAYS, ("round the ring", "all keys there"), strict=True):
        table.add_row(words, f"{median(seconds[way]) * 1e3:.1f}", f"{min(seconds[way]) * 1e3:.1f}")
    console.print(table)
    each = ratios(seconds)
    low, high = quartiles(each)
    met = median(each) <= options.target
    said = f"{median(each):.3f} of the bound (median of {len(each)} turns, quartiles {low:.3f} to {high:.3f})"
    console.print(f"{said}; target {options.target:g}: {'met' if met else 'missed'}")
    return 0 if met else 1


def long_context(options: LongContextOptions, console: Console) -> int:
    """Train, count what every rank kept, and compare with the budget."""
    config = build_config({
        "model": {"name": "tiny", "layers": options.layers},
        "parallel": {"cp": options.ranks, "ulysses": options.ulysses},
        "data": {"source": "synthetic", "sequence_length": options.tokens},
        "train": {"global_batch": 1, "steps": options.steps, "precision": "fp32"},
    })
    shape = config.model.shape(vocab=257, sequence_length=options.tokens)
    config.parallel.check(shape, global_batch=1, sequence_length=options.tokens)
    one = MicroBatch(shape, Layout(), options.tokens, FORMATS["fp32"].compute.itemsize)
    alone = activations.total(activations.stage(one, range(options.layers), first=True, last=True))
    every = train(config, shape, options.steps)
    most, budget = max(rank.kept for rank in every), options.budget_mib * MIB
    losses = ", ".join(f"{loss:.4f}" for loss in every[0].loss)
    console.print(
        f"{options.tokens:,} tokens, {options.layers} layers, {shape.parameters():,} parameters, "
        f"{config.parallel.describe()}: losses {losses}; {show_seconds(max(r.seconds for r in every))} a step",
        highlight=False, soft_wrap=True,
    )
    table = Table(title=f"activations kept for backward; budget {show_bytes(budget)}")
    for column in ("", "bytes", "of the budget"):
        table.add_column(column, justify="right" if column else "left")
    for words, size in (("one device, by formula", alone), ("fullest rank, counted", most)):
        table.add_row(words, show_bytes(size), f"{size / budget:.2f}")
    console.print(table)
    console.print(f"largest process: {show_bytes(max(rank.peak for rank in every))} in all", highlight=False)
    return 0 if makes_room(alone, most, budget) else 1
