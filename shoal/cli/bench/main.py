"""`shoal bench WHAT`: the table of measurements, each of which has a file of its own."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import listed, parse
from shoal.base.section import Section
from shoal.cli.bench import (
    attention,
    checkpoint,
    collectives,
    context,
    depths,
    experts,
    numerics,
    optimizers,
    peak,
    relaxed,
    slices,
    step,
    transport,
)

WIDTH = 140  # of tables that no terminal shows

COMMANDS: dict[str, tuple[type[Section], Callable[[Any, Console], int]]] = {
    "step": (step.StepOptions, step.run),
    "attention": (attention.AttentionOptions, attention.run),
    "slices": (slices.SlicesOptions, slices.run),
    "peak": (peak.PeakOptions, peak.run),
    "checkpoint": (checkpoint.CheckpointBenchOptions, checkpoint.run),
    "collectives": (collectives.CollectivesOptions, collectives.run),
    "transport": (transport.TransportOptions, transport.run),
    "relaxed": (relaxed.RelaxedOptions, relaxed.run),
    "context": (context.ContextBenchOptions, context.run),
    "long-context": (context.LongContextOptions, context.run_long),
    "optimizers": (optimizers.OptimizersBenchOptions, optimizers.run),
    "experts": (experts.ExpertsOptions, experts.run),
    "depths": (depths.DepthsOptions, depths.run),
    "numerics": (numerics.NumericsOptions, numerics.run),
}
"""By name: the options, and what measures and prints on a console."""


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
