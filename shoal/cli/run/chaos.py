"""`shoal chaos`."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

import shoal
from shoal.base.files import check_writable
from shoal.base.section import Section
from shoal.spec.config import RunConfig


class ChaosOptions(Section):
    trials: PositiveInt = 50
    """Number of trials; the faults are taken in turn."""

    faults: str = "all"
    """Comma-separated faults; a wrong name lists them."""

    seed: NonNegativeInt = 0
    """Random seed of the moments of the faults."""

    folder: Path | None = None
    """Where the trials run and failed ones are kept (default: a new folder under /tmp)."""

    minutes: PositiveFloat | None = None
    """Instead of trials: one run of this many minutes, in which a rank is killed every --every seconds."""

    every: PositiveFloat = 60.0
    """With --minutes: seconds between two failures."""

    out: Path | None = None
    """Write a page (.html)."""


def run(options: ChaosOptions, config: RunConfig) -> int:
    """Make the trials and show what came of them; returns 0 if all passed, else 1."""
    check_writable(options.out, "--out", ".html")
    result = shoal.chaos(
        config, trials=options.trials, faults=options.faults, seed=options.seed, folder=options.folder,
        minutes=options.minutes, every=options.every, show=True,
    )
    if options.out and result.trials:
        from shoal.testing.chaos.report import write_page

        write_page(options.out, config, result.trials)
        print(f"written: {options.out}")
    if result.failed:
        print(f"{result.failed} of {len(result.trials)} trials failed; what they left is in {result.folder}")
    return 0 if result.passed else 1
