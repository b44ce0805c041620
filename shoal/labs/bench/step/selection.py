"""Which races of `shoal bench step` are run, and what is refused before one starts."""

from __future__ import annotations

import os

from shoal.base.errors import UsageError, did_you_mean
from shoal.engine.cpu_tuning import allocator_environment
from shoal.labs.bench.race import Race
from shoal.labs.bench.step import shoal_engine
from shoal.labs.bench.step.comparisons import NAMES, races
from shoal.labs.bench.step.torch_pipelining import MICROBATCHES
from shoal.labs.bench.step.workload import Workload

SHARED = ("dp", "zero", "fsdp", "threads", "overlap-network", "compression-network", "pp")
"""Races whose ranks, or micro-batches, share the sequences of a step evenly."""


def choose_races(only: str, *, sequences: int, ranks: int, products: bool) -> list[Race]:
    """The races of some names, ready to run.

    Args:
        only: names with commas, of kinds or of single races; empty for all.
        sequences: in a step, over all ranks.
        products: whether torch's contenders multiply by the library that shoal chooses.

    Raises:
        UsageError: there is no race of a name, the work cannot be shared out, or the environment sets the allocator.
    """
    every = races(Workload(sequences=sequences), ranks, products=products)
    names = _names(only, every)
    _check_allocator()
    if ranks < 2:
        raise UsageError(f"bench step --ranks {ranks}: parallelism needs 2 or more.")
    wanted = [race for race in every if race.name in names or race.name.split()[0] in names]
    for race in wanted:
        _check_work(race, sequences, ranks)
    return wanted


def _names(only: str, every: list[Race]) -> list[str]:
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(NAMES)
    allowed = list(dict.fromkeys([*NAMES, *(race.name for race in every)]))
    for name in wanted:
        if name not in allowed:
            raise UsageError(f"bench step --only {only}: there is no race '{name}'; {did_you_mean(name, allowed)}")
    return wanted


def _check_work(race: Race, sequences: int, ranks: int) -> None:
    parts = MICROBATCHES if race.name.startswith("pp ") else ranks
    if sequences % parts and race.name.split()[0] in SHARED:
        raise UsageError(
            f"bench step --sequences {sequences}: {race.name} needs a multiple of {parts}."
            f"\n  Give {-(-sequences // parts) * parts}, or choose other races with --only."
        )
    for contender in (*race.ours, *race.references, *race.also, *race.bounds):
        try:
            shoal_engine.check(contender)
        except UsageError as error:
            raise UsageError(f"bench step, {race.name}: {error}") from None


def _check_allocator() -> None:
    """The system's setting is one side of a comparison, so it must be the system's."""
    foreign = [name for name in (*allocator_environment(), "GLIBC_TUNABLES", "LD_PRELOAD") if os.environ.get(name)]
    if foreign:
        raise UsageError(f"the environment sets the allocator of every contender: unset {', '.join(foreign)}.")
