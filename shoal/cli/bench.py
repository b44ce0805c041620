"""`shoal bench WHAT`: run a benchmark; the exit code shows whether a target was missed."""

from __future__ import annotations

import signal
import sys
from pkgutil import resolve_name
from types import FrameType
from typing import NoReturn

from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import listed, parse
from shoal.labs.bench.benchmark import Benchmark, describe_machine, show_progress

BENCHMARKS = {
    "gpu": "gpu.benchmark:GpuBenchmark",
    "step": "step.benchmark:StepBenchmark",
    "attention": "kernels:AttentionBenchmark",
    "slices": "sequences:SlicesBenchmark",
    "peak": "kernels:PeakBenchmark",
    "checkpoint": "checkpoint:CheckpointBenchmark",
    "failover": "failover:FailoverBenchmark",
    "collectives": "collectives:CollectivesBenchmark",
    "transport": "collectives:TransportBenchmark",
    "relaxed": "learning.relaxed:RelaxedBenchmark",
    "context": "sequences:ContextBenchmark",
    "long-context": "sequences:LongContextBenchmark",
    "optimizers": "optimizers:OptimizersBenchmark",
    "experts": "experts:ExpertsBenchmark",
    "depths": "learning.mixture_of_depths:DepthsBenchmark",
    "numerics": "learning.numerics:NumericsBenchmark",
}


def main(args: list[str]) -> int:
    """Run one of the benchmarks; return the exit code, 1 if a target is missed."""
    if not args or args[0] in ("-h", "--help"):
        print("shoal bench WHAT [--help]\n")
        print(*listed({name: load_benchmark(name).__doc__ or "" for name in BENCHMARKS}, 13), sep="\n")
        return 0
    name, *rest = args
    if name not in BENCHMARKS:
        raise UsageError(f"bench: '{name}' is unknown; {did_you_mean(name, BENCHMARKS)}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    benchmark = parse(f"shoal bench {name}", load_benchmark(name), rest)
    former = signal.signal(signal.SIGTERM, _exit)
    try:
        with show_progress(console) as notify:
            met = benchmark.run(console, notify)
    finally:
        signal.signal(signal.SIGTERM, former)
    console.print(describe_machine(), highlight=False)
    return 0 if met else 1


def load_benchmark(name: str) -> type[Benchmark]:
    """Import a benchmark; some take seconds to import."""
    return resolve_name(f"shoal.labs.bench.{BENCHMARKS[name]}")


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise SystemExit, so that a benchmark ends its processes and frees its shared memory."""
    signal.signal(signum, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    sys.exit(128 + signum)
