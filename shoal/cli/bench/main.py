"""`shoal bench`: step (shoal beside torch), attention (the kernels), peak (matrix product), transport (all-reduce),
checkpoint (what saving costs), slices (of a sequence), context (a ring against its bound), long-context (what it makes
room for), optimizers (an update of each rule), experts and depths (what they learn beside dense models)."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Literal, NoReturn

import torch
from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import listed, parse
from shoal.base.section import NonEmpty, Section
from shoal.base.units import show_bytes
from shoal.cli.bench.checkpoint import CheckpointBenchOptions, checkpoint
from shoal.cli.bench.collectives import CollectivesOptions, collectives
from shoal.cli.bench.context import ContextBenchOptions, LongContextOptions, context, long_context
from shoal.cli.bench.depths import DepthsOptions, depths
from shoal.cli.bench.experts import ExpertsOptions, experts
from shoal.cli.bench.numerics import NumericsOptions, numerics
from shoal.cli.bench.optimizers import OptimizersBenchOptions, optimizers
from shoal.cli.bench.relaxed import RelaxedOptions, relaxed
from shoal.cli.bench.step import StepOptions, machine, step
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import host_memory, pick_device
from shoal.engine.models.products import by_mkl, tune_products
from shoal.labs.bench import attention, peak, slices, transport
from shoal.pipeline.sequence_slices import best_slices, fitted, pipeline_time
from shoal.spec.catalog import model_shape

WIDTH = 140  # of tables that no terminal shows


class AttentionOptions(Section):
    """Causal attention forward and backward, torch's fused kernel against the explicit one."""

    lengths: NonEmpty[PositiveInt] = (128, 256, 512, 1024, 2048)
    """Sequence lengths."""

    tokens: PositiveInt = 2048
    """Tokens in all, in sequences of each length."""

    heads: PositiveInt = 8
    """Query and key heads."""

    head_dim: PositiveInt = 32
    """Width of one head."""

    repeats: PositiveInt = 7
    """Measurements of each; the median counts."""

    device: str = "auto"
    """auto, cpu or cuda."""


class SlicesOptions(Section):
    """Slices of a sequence, forward and backward through one layer, and the slices that TeraPipe had best take."""

    model: str = "tiny"
    """A model of the catalog, whose layer is timed."""

    length: PositiveInt = 1024
    """Tokens of a sequence."""

    stages: NonEmpty[PositiveInt] = (2, 4, 8)
    """Pipeline stages to choose for."""

    micro_batch: PositiveInt = 1
    """Sequences in one forward pass."""

    microbatches: PositiveInt = 1
    """Micro-batches in a step."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32 or bf16."""

    repeats: PositiveInt = 5
    """Measurements of each; the median counts."""

    device: str = "auto"
    """auto, cpu or cuda."""


class PeakOptions(Section):
    """FLOP/s of square matrix products on the CPU: the peak that shares are measured against."""

    sides: NonEmpty[PositiveInt] = (512, 1024, 2048)
    """Rows and columns."""


class TransportOptions(Section):
    """All-reduce between CPU ranks of this host, through and in shared memory against gloo; all in turn."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks, each of 2 or more; one thread a rank."""

    sizes: NonEmpty[PositiveInt] = (4, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
    """KiB of float32."""

    repeats: PositiveInt = 15
    """Measurements of each, of 5 all-reduces in a row; the median counts."""


def main(args: list[str]) -> int:
    """Run one of the measurements; returns the exit code.

    Raises:
        UsageError: bad options.
        SystemExit: 143, on SIGTERM.
    """
    if not args or args[0] in ("-h", "--help"):
        print("shoal bench WHAT [--help]\n")
        print(*listed({name: options.__doc__ or "" for name, (options, _) in COMMANDS.items()}, 13), sep="\n")
        return 0
    name, *rest = args
    if name not in COMMANDS:
        raise UsageError(f"bench: there is no '{name}'; {did_you_mean(name, COMMANDS)}")
    options, command = COMMANDS[name]
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    given = parse(f"shoal bench {name}", options, rest)
    former = signal.signal(signal.SIGTERM, _leave)
    try:
        return command(given, console)
    finally:
        signal.signal(signal.SIGTERM, former)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """End as by an error, so that every measurement ends its processes and removes what it has in memory."""
    signal.signal(signum, signal.SIG_IGN)  # a second one would interrupt that
    sys.exit(128 + signum)


# ---- attention and peak --------------------------------------------------------------------------------------------


def attention_kernels(options: AttentionOptions, console: Console) -> int:
    """Time the kernels for each dtype and length."""
    device = pick_device(options.device)
    if device.type == "cpu":
        tune_process()
    table = Table(title=f"causal attention, forward and backward, {options.tokens} tokens, on {device}")
    for column in ("dtype", "sequence", "sdpa ms", "explicit ms", "sdpa / explicit", "difference", "faster"):
        table.add_column(column, justify="right")
    for precision in peak.DTYPES:
        for length in options.lengths:
            timing = attention.measure(
                length, precision, device,
                tokens=options.tokens, heads=options.heads, head_dim=options.head_dim, repeats=options.repeats,
            )
            times = [f"{timing.seconds[kernel] * 1e3:.2f}" for kernel in attention.KERNELS]
            table.add_row(
                precision, str(length), *times, f"{timing.gain:.2f}", f"{timing.difference:.0e}", timing.fastest
            )
    console.print(table)
    console.print(machine(), highlight=False)
    return 0


def sequence_slices(options: SlicesOptions, console: Console) -> int:
    """Time slices, and print the best for each number of stages."""
    device = pick_device(options.device)
    if device.type == "cpu":
        tune_process()
    shape = model_shape(options.model)
    shape = shape.model_copy(update={"max_sequence": max(shape.max_sequence, options.length)})
    layer = slices.TimedLayer(shape, options.micro_batch, options.precision, device)
    measured = slices.measure(layer, options.length, options.repeats)
    table = Table(title=f"a slice through one layer of {options.model}, forward and backward, on {device}")
    for column in ("tokens", "tokens before", "ms", "us / token"):
        table.add_column(column, justify="right")
    for tokens, before, seconds in measured:
        table.add_row(str(tokens), str(before), f"{seconds * 1e3:.2f}", f"{seconds / tokens * 1e6:.1f}")
    console.print(table)
    times, shortest = fitted(measured), min(tokens for tokens, _, _ in measured)
    cuts = [*range(0, options.length - shortest + 1, shortest), options.length]  # none shorter than what was measured
    for stages in options.stages:
        best = best_slices(cuts, times, stages, options.microbatches)
        whole, cut = (pipeline_time(way, times, stages, options.microbatches) for way in ((options.length,), best))
        console.print(
            f"pp {stages}, {options.microbatches} micro-batches: sequence_slices = {list(best)}, "
            f"{cut / whole:.2f} of the time of whole sequences by this model", highlight=False,
        )
    console.print(machine(), highlight=False)
    return 0


def matrix_peak(options: PeakOptions, console: Console) -> int:
    """Time the products.

    Raises:
        UsageError: this machine has no room for a side.
    """
    has = host_memory()
    if (needs := peak.memory(max(options.sides))) > has:
        raise UsageError(
            f"bench peak --sides {max(options.sides)}: its matrices take {show_bytes(needs)}, and this machine has "
            f"{show_bytes(has)}.\n  Give sides up to {int((has / peak.memory(1)) ** 0.5)}."
        )
    ways = {"as torch has it": by_mkl} | ({"oneDNN, as in training": nullcontext} if tune_products() else {})
    table = Table(title=f"matrix products, {torch.get_num_threads()} threads")
    for column in ("dtype", "by", "side", "GFLOP / s"):
        table.add_column(column, justify="right")
    for precision in peak.DTYPES:
        for way, inside in ways.items() if precision == "fp32" else (("as torch has it", nullcontext),):
            for side in options.sides:
                with inside():
                    table.add_row(precision, way, str(side), f"{peak.measure(side, precision) / 1e9:.1f}")
    console.print(table)
    console.print(machine(), highlight=False)
    return 0


def transports(options: TransportOptions, console: Console) -> int:
    """Time all-reduces for each number of ranks and size."""
    if min(options.ranks) < 2:
        raise UsageError("bench transport --ranks 1: one rank has nobody to exchange with; give 2 or more.")
    table = Table(title="all-reduce between CPU ranks of one host")
    for column in ("ranks", "KiB", *(f"{way} us" for way in transport.WAYS), "gloo / shared", "gloo / common"):
        table.add_column(column, justify="right")
    for ranks in options.ranks:
        for timing in transport.measure(ranks, [size * 1024 for size in options.sizes], options.repeats):
            times = [f"{timing.seconds[way] * 1e6:,.0f}" for way in transport.WAYS]
            gains = [f"{timing.gain(way):.1f}" for way in transport.WAYS[:2]]
            table.add_row(str(ranks), f"{timing.size // 1024:,}", *times, *gains)
    console.print(table)
    console.print(machine(), highlight=False)
    return 0


COMMANDS = {
    "step": (StepOptions, step),
    "attention": (AttentionOptions, attention_kernels),
    "slices": (SlicesOptions, sequence_slices),
    "peak": (PeakOptions, matrix_peak),
    "checkpoint": (CheckpointBenchOptions, checkpoint),
    "collectives": (CollectivesOptions, collectives),
    "transport": (TransportOptions, transports),
    "relaxed": (RelaxedOptions, relaxed),
    "context": (ContextBenchOptions, context),
    "long-context": (LongContextOptions, long_context),
    "optimizers": (OptimizersBenchOptions, optimizers),
    "experts": (ExpertsOptions, experts),
    "depths": (DepthsOptions, depths),
    "numerics": (NumericsOptions, numerics),
}
