"""Calibrate the cost model for this machine, and check the estimates against measured steps."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import PositiveInt

from shoal.base.errors import UsageError
from shoal.base.files import write_atomically
from shoal.engine.device import host_memory, tune_process, usable_cores
from shoal.labs.calibration.check import MeasuredLayout, compare, draw_layouts, pick
from shoal.labs.calibration.measure import Say, measure
from shoal.labs.calibration.profile import NAME, build_profile
from shoal.launch.worker_pool import Pool
from shoal.spec.catalog.clusters import nodes
from shoal.spec.catalog.tables import add_catalog

MOST_CORES = 8  # cores measured together
ROUNDS, CHECK_ROUNDS = 9, 5  # default rounds of a measurement and of a check


@dataclass(frozen=True)
class MachineProfile:
    """A measured machine.

    Attributes:
        tables: the tables of a catalog file: its accelerator, link and node.
        cores: number of cores measured together.
        usable: number of cores that this process may use.
    """

    tables: dict[str, Any]
    cores: int
    usable: int

    def write(self, path: Path) -> None:
        """Write the catalog file (TOML)."""
        write_atomically(path, tomli_w.dumps(self.tables))

    def describe(self) -> str:
        """Return the speeds in one line."""
        machine, link = self.tables["accelerators"][NAME], self.tables["links"][NAME]
        peaks = ", ".join(f"{kind} {peak / 1e9:.0f} GFLOP/s" for kind, peak in machine["peak_flops"].items())
        return (
            f"{self.cores} of {self.usable} cores together, each: {peaks}, memory "
            f"{machine['memory_bandwidth'] / 1e9:.1f} GB/s; ring {link['bandwidth'] / 1e9:.1f} GB/s and "
            f"{link['latency'] * 1e6:.0f} us"
        )


def calibrate(
    *, ranks: Sequence[int] = (2, 4), rounds: PositiveInt = ROUNDS, say: Say = lambda done, label: None
) -> MachineProfile:
    """Measure products, memory, attention, layers, updates and collectives on the cores of this machine.

    Args:
        ranks: numbers of ranks to measure collectives for, each at least 2.
        rounds: repetitions of each measurement; the median is used.
        say: called with the completed fraction and a label of what comes next.

    Returns:
        The profile. As a catalog file it makes this machine a cluster: ``4xhere`` has 4 ranks on it.

    Raises:
        UsageError: no number of ranks, or one less than 2.

    >>> import shoal
    >>> found = shoal.calibrate(rounds=1)  # doctest: +SKIP
    >>> found.describe()  # doctest: +SKIP
    '2 of 2 cores together, each: fp32 55 GFLOP/s, bf16 150 GFLOP/s, memory 9.1 GB/s; ring 3.9 GB/s and 21 us'
    >>> found.write(Path("here.toml"))  # doctest: +SKIP
    """
    if not ranks:
        raise UsageError("calibrate: ranks = []: no number of ranks.\n  Give at least one, such as ranks=[2].")
    if min(ranks) < 2:
        raise UsageError(f"--ranks {min(ranks)}: a collective needs at least 2 ranks.")
    usable = usable_cores()
    cores = min(usable, MOST_CORES)
    with Pool(max(cores, *ranks), tune_process) as pool:
        found = measure(pool, cores, usable, list(ranks), rounds, say)
    source = f"shoal calibrate, {time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} of {usable} cores together"
    return MachineProfile(build_profile(found, host_memory(), source), cores, usable)


def check_profile(path: Path, *, layouts: int, pick_of: int, rounds: int, say: Say) -> list[MeasuredLayout]:
    """Measure a small model on layouts of 1 to 4 ranks, and estimate it with a profile.

    Args:
        path: the profile, a catalog file that `calibrate` made on this machine.
        layouts: number of layouts to draw.
        pick_of: if not 0, take all layouts of this many ranks instead, and compare the one with the lowest estimate
            with the fastest ones.
        rounds: repetitions of each measurement; the median is used.
        say: called with the completed fraction and a label of what comes next.

    Raises:
        UsageError: the file is no profile, or one of an older version.
    """
    add_catalog(path)
    if (machine := nodes().get(NAME)) is None or machine.reference is None or machine.at_once is None:
        raise UsageError(
            f"--check {path}: no profile of this version; it needs [nodes.{NAME}] with `reference` and `at_once`.\n"
            "  Create one with shoal calibrate --out FILE."
        )
    with Pool(4, tune_process) as pool:
        if pick_of:
            return pick(pool, pick_of, rounds, say)
        return compare(pool, draw_layouts(layouts), rounds, say)
