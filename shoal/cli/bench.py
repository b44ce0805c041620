"""`shoal bench WHAT`: run a benchmark; the exit code shows whether a target was missed."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import listed, parse
from shoal.labs.bench.benchmark import Benchmark, describe_machine, show_progress
from shoal.labs.bench.checkpoint import CheckpointBenchmark
from shoal.labs.bench.collectives import CollectivesBenchmark, TransportBenchmark
from shoal.labs.bench.experts import ExpertsBenchmark
from shoal.labs.bench.kernels import AttentionBenchmark, PeakBenchmark
from shoal.labs.bench.learning.mixture_of_depths import DepthsBenchmark
from shoal.labs.bench.learning.numerics import NumericsBenchmark
from shoal.labs.bench.learning.relaxed import RelaxedBenchmark
from shoal.labs.bench.optimizers import OptimizersBenchmark
from shoal.labs.bench.sequences import ContextBenchmark, LongContextBenchmark, SlicesBenchmark
from shoal.labs.bench.step.benchmark import StepBenchmark

WIDTH = 140  # width of tables if the output is not a terminal

BENCHMARKS: dict[str, type[Benchmark]] = {
    "step": StepBenchmark,
    "attention": AttentionBenchmark,
    "slices": SlicesBenchmark,
    "peak": PeakBenchmark,
    "checkpoint": CheckpointBenchmark,
    "collectives": CollectivesBenchmark,
    "transport": TransportBenchmark,
    "relaxed": RelaxedBenchmark,
    "context": ContextBenchmark,
    "long-context": LongContextBenchmark,
    "optimizers": OptimizersBenchmark,
    "experts": ExpertsBenchmark,
    "depths": DepthsBenchmark,
    "numerics": NumericsBenchmark,
}


def main(args: list[str]) -> int:
    """Run one of the benchmarks; return the exit code, 1 if a target is missed.

    Raises:
        UsageError: bad options.
        SystemExit: 143, on SIGTERM.
    """
    if not args or args[0] in ("-h", "--help"):
        print("shoal bench WHAT [--help]\n")
        print(*listed({name: kind.__doc__ or "" for name, kind in BENCHMARKS.items()}, 13), sep="\n")
        return 0
    name, *rest = args
    if name not in BENCHMARKS:
        raise UsageError(f"bench: '{name}' is unknown; {did_you_mean(name, BENCHMARKS)}")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    benchmark = parse(f"shoal bench {name}", BENCHMARKS[name], rest)
    former = signal.signal(signal.SIGTERM, _exit)
    try:
        with show_progress(console) as notify:
            met = benchmark.run(console, notify)
    finally:
        signal.signal(signal.SIGTERM, former)
    console.print(describe_machine(), highlight=False)
    return 0 if met else 1


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise SystemExit, so that a benchmark ends its processes and frees its shared memory."""
    signal.signal(signum, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    sys.exit(128 + signum)
