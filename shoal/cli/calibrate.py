"""`shoal calibrate`: a catalog file of this machine, and how well estimates with it foretell real steps."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import Field, PositiveInt

import shoal
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.base.section import NonEmpty, Section
from shoal.base.terminal import progress_bar
from shoal.labs.calibration.calibrate import CHECK_ROUNDS, NAME, ROUNDS, check_profile
from shoal.labs.calibration.check import is_right, lines, lost, write_scatter

MOST_LOST = 0.05  # of the fastest layout's time, that the picked one may take longer


class CalibrateOptions(Section):
    """Measure what a core of this machine takes for products, memory, attention, layers, updates and collectives, and
    write a catalog file, for `shoal estimate --catalog FILE --cluster 4xhere` and `shoal plan` alike."""

    out: Path = Path("here.toml")
    """The file to write; none is overwritten."""

    rounds: PositiveInt | None = None
    """Measurements of everything; medians count. By itself 9 of the machine, and 5 with check."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks whose collectives are measured."""

    check: Path | None = None
    """Measure nothing of the machine: take this profile, run small models on layouts of 1 to 4 ranks, and compare their
    steps with the estimates."""

    layouts: PositiveInt = 20
    """With check: how many."""

    pick: int = Field(default=0, ge=0, le=4)
    """With check: take all layouts of so many ranks instead, and compare the one that is estimated fastest with those
    that are. Of 4 ranks there are 744: half an hour."""

    scatter: Path | None = None
    """With check: draw estimates over measurements (.svg); no file is overwritten."""


def run(options: CalibrateOptions) -> int:
    """Measure, or check a profile; returns the exit code.

    It is 1 where a check finds estimates that are far off or in another order (`is_right`), or a pick that takes 5 %
    longer than the fastest layout.

    Raises:
        UsageError: a file that is there already, or is none; or options that nothing would read.
    """
    for unread, names, why in (
        (options.check, ("out", "ranks"), "of a measurement, which --check does not make"),
        (not options.check, ("scatter", "pick", "layouts"), "of --check, which is not given"),
        (options.pick, ("layouts",), "--pick takes all layouts of so many ranks"),
    ):
        if unread:
            reject_unused(options, names, why)
    return _measure(options) if options.check is None else _check(options, options.check)


def _measure(options: CalibrateOptions) -> int:
    check_writable(options.out, "--out", ".toml", new=True)
    begin = time.monotonic()
    with progress_bar("measuring") as say:
        found = shoal.calibrate(ranks=options.ranks, rounds=options.rounds or ROUNDS, say=say)
    found.write(options.out)
    print(found.describe())
    print(f"written: {options.out} ({time.monotonic() - begin:.0f} s)")
    print(f"Now: shoal plan --catalog {options.out} --cluster 4x{NAME} --model tiny --precision fp32")
    return 0


def _check(options: CalibrateOptions, profile: Path) -> int:
    check_writable(options.scatter, "--scatter", ".svg", new=True)
    with progress_bar("measuring") as say:
        found = check_profile(
            profile, layouts=options.layouts, pick_of=options.pick, rounds=options.rounds or CHECK_ROUNDS, say=say
        )
    print("\n".join(lines(found)))
    if options.scatter:
        write_scatter(options.scatter, found)
        print(f"written: {options.scatter}")
    return int(lost(found) > MOST_LOST if options.pick else not is_right(found))
