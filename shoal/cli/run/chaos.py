"""`shoal chaos`: inject faults into a run and check that it recovers."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

import shoal
from shoal.base.files import check_writable
from shoal.base.section import Section
from shoal.spec.config import RunConfig


class ChaosOptions(Section):
    trials: PositiveInt = 50
    """Number of trials; they cycle through the faults."""

    faults: str = "all"
    """Comma-separated faults; an unknown name lists them."""

    seed: NonNegativeInt = 0
    """Random seed of the times of the faults."""

    folder: Path | None = None
    """Folder of the trials, in which failed ones are kept (default: a new folder under /tmp)."""

    minutes: PositiveFloat | None = None
    """Run for this many minutes instead of trials, and kill a rank every --every seconds."""

    every: PositiveFloat = 60.0
    """With --minutes: seconds between failures."""

    out: Path | None = None
    """Write a page (.html)."""


def run(options: ChaosOptions, config: RunConfig) -> int:
    """Run the trials and show the results; return 0 if all passed, else 1."""
    check_writable(options.out, "--out", ".html")
    result = shoal.chaos(config, **options.model_dump(exclude={"out"}), show=True)
    if options.out and result.trials:
        from shoal.testing.chaos.run import write_page

        write_page(options.out, config, result.trials)
        print(f"written: {options.out}")
    if result.failed:
        print(f"{result.failed} of {len(result.trials)} trials failed; their files are in {result.folder}")
    return 0 if result.passed else 1
