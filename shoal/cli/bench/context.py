"""`shoal bench context` and `shoal bench long-context`."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.base.units import show_bytes
from shoal.labs.bench.context import AttentionCase, seconds_of_a_step, table, train_long, verdict
from shoal.spec.layout import ContextOrder

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


def run(options: ContextBenchOptions, console: Console) -> int:
    """Time the ring and its bound; returns the exit code."""
    if options.ranks < 2 or options.tokens < 2 * options.ranks or options.heads % options.kv_heads:
        raise UsageError("bench context: give 2 ranks or more, 2 tokens for each, and heads that kv_heads divides.")
    what = AttentionCase(
        options.ranks, options.tokens, options.heads, options.kv_heads, options.head_dim, order=options.order
    )
    seconds = seconds_of_a_step(what, options.repeats)
    console.print(table(what, seconds))
    words, met = verdict(seconds, options.target)
    console.print(words)
    return 0 if met else 1


def run_long(options: LongContextOptions, console: Console) -> int:
    """Train, count what every rank kept, and compare with the budget; returns the exit code."""
    budget = options.budget_mib * MIB
    found = train_long(
        ranks=options.ranks, ulysses=options.ulysses, tokens=options.tokens, layers=options.layers, steps=options.steps
    )
    console.print(found.describe(), highlight=False, soft_wrap=True)
    console.print(found.table(budget))
    console.print(f"largest process: {show_bytes(max(rank.peak for rank in found.ranks))} in all", highlight=False)
    return 0 if found.makes_room(budget) else 1
