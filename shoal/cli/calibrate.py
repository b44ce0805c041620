"""`shoal calibrate`: write a catalog file of this machine, and check estimates with it against measured steps."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import Field, PositiveInt

import shoal
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.base.section import NonEmpty, Section
from shoal.base.terminal import progress_bar, quote
from shoal.labs.calibration.calibrate import CHECK_ROUNDS, ROUNDS, check_profile
from shoal.labs.calibration.check import format_check, is_right, lost_time, write_scatter
from shoal.labs.calibration.from_gpu import write_gpu_catalog
from shoal.labs.calibration.profile import NAME

MOST_LOST = 0.05  # maximum slowdown of the picked layout, relative to the fastest


class CalibrateOptions(Section):
    """Measure matrix products, memory, attention, layers, updates and collectives on the cores of this machine, and
    write a catalog file for `shoal estimate --catalog FILE --cluster 4xhere` and `shoal plan`."""

    out: Path = Path("here.toml")
    """The file to write; an existing file is not overwritten."""

    from_gpu: Path | None = None
    """Fit the constants of a GPU to the results in this folder of `shoal bench gpu` instead; parts 1 and 4 are used."""

    rounds: PositiveInt | None = None
    """Repetitions of each measurement; the median is used. Default: 9 for the machine, and 5 with check."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks to measure collectives for."""

    check: Path | None = None
    """Check this profile instead of measuring the machine: train small models on layouts of 1 to 4 ranks, and compare
    the step times with the estimates."""

    layouts: PositiveInt = 20
    """With check: number of layouts."""

    pick: int = Field(default=0, ge=0, le=4)
    """With check: use all layouts of this many ranks, and compare the one with the lowest estimate with the fastest
    ones. 4 ranks have 744 layouts, which take half an hour."""

    scatter: Path | None = None
    """With check: plot estimates against measurements (.svg); an existing file is not overwritten."""


def run(options: CalibrateOptions) -> int:
    """Measure the machine, or check a profile; return the exit code.

    The exit code is 1 if estimates are far off or in another order (`is_right`), or if the picked layout is 5 % slower
    than the fastest.
    """
    for unread, names, why in (
        (options.check, ("out", "ranks", "from_gpu"), "only for a new file; --check makes none"),
        (options.from_gpu, ("ranks", "rounds"), "only for a measurement of this machine's cores"),
        (not options.check, ("scatter", "pick", "layouts"), "only with --check"),
        (options.pick, ("layouts",), "--pick uses all layouts of that many ranks"),
    ):
        if unread:
            reject_unused(options, names, why)
    return _measure(options) if options.check is None else _check(options, options.check)


def _measure(options: CalibrateOptions) -> int:
    check_writable(options.out, "--out", ".toml", new=True)
    if options.from_gpu:
        print(write_gpu_catalog(options.from_gpu, options.out))
        print(f"written: {options.out}")
        print(f"Next: shoal plan --catalog {quote(options.out)} --cluster 1x{NAME} --model llama-3.2-1b")
        return 0
    begin = time.monotonic()
    with progress_bar("measuring") as say:
        found = shoal.calibrate(ranks=options.ranks, rounds=options.rounds or ROUNDS, say=say)
    found.write(options.out)
    print(found.describe())
    print(f"written: {options.out} ({time.monotonic() - begin:.0f} s)")
    print(f"Next: shoal plan --catalog {quote(options.out)} --cluster 4x{NAME} --model tiny --precision fp32")
    return 0


def _check(options: CalibrateOptions, profile: Path) -> int:
    check_writable(options.scatter, "--scatter", ".svg", new=True)
    with progress_bar("measuring") as say:
        found = check_profile(
            profile, layouts=options.layouts, pick_of=options.pick, rounds=options.rounds or CHECK_ROUNDS, say=say
        )
    print("\n".join(format_check(found)))
    if options.scatter:
        write_scatter(options.scatter, found)
        print(f"written: {options.scatter}")
    return int(lost_time(found) > MOST_LOST if options.pick else not is_right(found))
