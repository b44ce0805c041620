"""Calibrate this machine: measure what its cores take, and compare estimates with steps that really run."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from shoal.base.errors import UsageError
from shoal.base.files import write_whole
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import host_memory, usable_cores
from shoal.labs.calibration.check import Compared, compare, drawn_layouts, pick
from shoal.labs.calibration.measure import Say, measure
from shoal.labs.calibration.profile import profile
from shoal.launch.worker_pool import Pool
from shoal.spec.catalog.clusters import nodes
from shoal.spec.catalog.tables import add_catalog

NAME = "here"  # of the machine in its profile
MOST_CORES = 8  # that are measured, all at once
ROUNDS, CHECK_ROUNDS = 9, 5  # where none are given: of a measurement, and of a check


def _silent(done: float, what: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class MachineProfile:
    """A machine that was measured.

    Attributes:
        tables: the tables of a catalog file: its accelerator, its link and its node.
        cores: how many cores were measured, all at once.
        usable: how many cores this process may use.
    """

    tables: dict[str, Any]
    cores: int
    usable: int

    def write(self, path: Path) -> None:
        """Write the catalog file (TOML)."""
        write_whole(path, tomli_w.dumps(self.tables))

    def describe(self) -> str:
        """The speeds in one line."""
        machine, link = self.tables["accelerators"][NAME], self.tables["links"][NAME]
        peaks = ", ".join(f"{kind} {peak / 1e9:.0f} GFLOP/s" for kind, peak in machine["peak_flops"].items())
        return (
            f"{self.cores} of {self.usable} cores at once, each: {peaks}, memory "
            f"{machine['memory_bandwidth'] / 1e9:.1f} GB/s; ring {link['bandwidth'] / 1e9:.1f} GB/s and "
            f"{link['latency'] * 1e6:.0f} us"
        )


def calibrate(*, ranks: Sequence[int] = (2, 4), rounds: int = ROUNDS, say: Say = _silent) -> MachineProfile:
    """Measure what a core of this machine takes for products, memory, attention, layers, updates and collectives.

    Args:
        ranks: numbers of ranks whose collectives are measured, each of 2 or more.
        rounds: measurements of everything; the medians count.
        say: called with the share that is done and what comes next.

    Returns:
        The profile. In a catalog file it makes this machine a cluster: ``4xhere`` has 4 ranks on it.

    Raises:
        UsageError: a number of ranks is less than 2.

    >>> import shoal
    >>> found = shoal.calibrate(rounds=1)  # doctest: +SKIP
    >>> found.describe()  # doctest: +SKIP
    '2 of 2 cores at once, each: fp32 55 GFLOP/s, bf16 150 GFLOP/s, memory 9.1 GB/s; ring 3.9 GB/s and 21 us'
    >>> found.write(Path("here.toml"))  # doctest: +SKIP
    """
    if min(ranks) < 2:
        raise UsageError(f"--ranks {min(ranks)}: a collective has at least 2.")
    usable = usable_cores()
    cores = min(usable, MOST_CORES)
    with Pool(max(cores, *ranks), tune_process) as pool:
        found = measure(pool, cores, usable, list(ranks), rounds, say)
    source = f"shoal calibrate, {time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} of {usable} cores at once"
    return MachineProfile(profile(found, NAME, host_memory(), source), cores, usable)


def check_profile(
    path: Path, *, layouts: int = 20, pick_of: int = 0, rounds: int = CHECK_ROUNDS, say: Say = _silent
) -> list[Compared]:
    """Run small models on layouts of 1 to 4 ranks, and compare their steps with estimates by a profile.

    Args:
        path: the profile, a catalog file that `calibrate` made on this machine.
        layouts: how many layouts are drawn.
        pick_of: a number of ranks, to take all of its layouts instead and compare the one that is estimated fastest
            with those that are; 0 to draw them.
        rounds: measurements of each layout; the medians count.
        say: called with the share that is done and what comes next.

    Raises:
        UsageError: the file is no profile, or one of an older version.
    """
    add_catalog(path)
    if (machine := nodes().get(NAME)) is None or machine.reference is None or machine.at_once is None:
        raise UsageError(
            f"--check {path}: it is no profile of this version: [nodes.{NAME}] with `reference` and `at_once` "
            "is wanted.\n  Make one with shoal calibrate --out FILE."
        )
    with Pool(4, tune_process) as pool:
        if pick_of:
            return pick(pool, pick_of, rounds, NAME, say)
        return compare(pool, drawn_layouts(layouts), rounds, NAME, say)
