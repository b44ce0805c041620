"""`shoal chaos`."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

import shoal
from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.spec.config import RunConfig


class ChaosOptions(Section):
    trials: PositiveInt = 50
    """How many, the faults in turn."""

    faults: str = "all"
    """Which, with commas between; a wrong name lists them."""

    seed: NonNegativeInt = 0
    """Of the moments."""

    folder: Path | None = None
    """Where the trials are made, and what failed is kept (default: a folder of its own under /tmp)."""

    minutes: PositiveFloat | None = None
    """Instead of trials: one run of so long, in which a rank is killed every --every seconds."""

    every: PositiveFloat = 60.0
    """With --minutes: seconds between two failures."""

    out: Path | None = None
    """Write a page (.html)."""


def run(options: ChaosOptions, config: RunConfig) -> int:
    """Make the trials and show what came of them; returns 0 if all passed, else 1."""
    if options.out:
        from shoal.report.timeline.write import check_name

        check_name(options.out)
        if options.out.suffix != ".html":
            raise UsageError(f"--out {options.out}: a page ends in .html")
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
