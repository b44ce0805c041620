"""`shoal explain SUBJECT`: how something works and what it costs, computed from the description that also runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import listed, parse
from shoal.base.section import Section
from shoal.labs.collectives.description import Collective
from shoal.labs.explain import context, experts, optimizers, precision, scaling, sharding
from shoal.labs.explain.collective import CollectiveOptions, explain
from shoal.labs.explain.context import ContextOptions
from shoal.labs.explain.experts import PlacementOptions
from shoal.labs.explain.optimizers import OptimizersOptions
from shoal.labs.explain.precision import PrecisionOptions
from shoal.labs.explain.scaling import ScalingOptions
from shoal.labs.explain.sharding import ShardingOptions

SUBJECTS: dict[str, tuple[type[Section], Callable[..., int]]] = {
    **{collective.value: (CollectiveOptions, partial(explain, collective)) for collective in Collective},
    "context": (ContextOptions, context.explain),
    "experts": (PlacementOptions, experts.explain),
    "optimizers": (OptimizersOptions, optimizers.explain),
    "precision": (PrecisionOptions, precision.explain),
    "scaling": (ScalingOptions, scaling.explain),
}
"""By name: the options, and what explains them on a console."""

PRODUCT = '"A[Ix, J] * B[J, Ky] -> C[Ix, Ky]"'
"""What else is explained: whatever has a bracket in it is an expression of sharded arrays."""


def main(args: list[str]) -> int:
    """Explain one subject; returns the exit code.

    Raises:
        UsageError: there is no such subject, or bad options.
        SystemExit: help was asked for.
    """
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        raise SystemExit(0)
    name, *rest = args
    if "[" in name:
        if any("]" in word for word in rest):
            whole = " ".join(args[: 1 + max(i for i, word in enumerate(args) if "]" in word)])
            raise UsageError(f'explain {name}: put the whole expression in quotes, as one word: "{whole}"')
        options = parse(f"shoal explain {PRODUCT}", ShardingOptions, rest)
        return sharding.explain(name, options, Console())
    if name not in SUBJECTS:
        raise UsageError(f"explain: there is no '{name}'; {did_you_mean(name, [*SUBJECTS, PRODUCT])}")
    options, subject = SUBJECTS[name]
    return subject(parse(f"shoal explain {name}", options, rest), Console())


def _help() -> str:
    subjects = {**{name: options for name, (options, _) in SUBJECTS.items()}, PRODUCT: ShardingOptions}
    lines = listed({name: options.__doc__ or "" for name, options in subjects.items()}, 17)
    what = "Show how one thing works and what it costs: a collective, a sharded product, where experts are, ..."
    return "\n".join([f"{what}\n\nshoal explain SUBJECT [--help]\n", *lines])
