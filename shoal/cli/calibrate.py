"""`shoal calibrate`: a catalog file of this machine, and how well estimates with it foretell real steps."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import tomli_w
from pydantic import Field, PositiveInt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_place, write_whole
from shoal.base.options import reject_unused
from shoal.base.section import NonEmpty, Section
from shoal.base.units import show_seconds
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import host_memory, usable_cores
from shoal.labs.calibration.check import Compared, compare, drawn_layouts, spearman, workload, write_scatter
from shoal.labs.calibration.measure import measure
from shoal.labs.calibration.pick import pick
from shoal.labs.calibration.profile import profile
from shoal.launch.worker_pool import Pool
from shoal.spec.catalog import tables
from shoal.spec.catalog.clusters import nodes

NAME = "here"  # of the machine in its profile
MEASURED = 8  # cores at most, all at once
ROUNDS, CHECKED = 9, 5  # by themselves, of the machine and of a check
ORDERED = 0.9  # Spearman's correlation, from which on an order is right


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
    """Measure or check; the exit code, 1 where a check finds estimates that are more than 10 % off in the median or in
    another order (`ORDERED`), or a pick that takes 5 % longer than the fastest layout.

    Raises:
        UsageError: a file that is there already, or is none; or options that nothing would read.
    """
    console = Console(highlight=False)
    for unread, names, why in (
        (options.check, ("out", "ranks"), "of a measurement, which --check does not make"),
        (not options.check, ("scatter", "pick", "layouts"), "of --check, which is not given"),
        (options.pick, ("layouts",), "--pick takes all layouts of so many ranks"),
    ):
        if unread:
            reject_unused(options, names, why)
    if options.check:
        return _check(options, console)
    check_place(options.out, "--out", new=True)
    if options.out.suffix != ".toml":
        raise UsageError(f"--out {options.out}: a catalog file ends in .toml")
    if min(options.ranks) < 2:
        raise UsageError(f"--ranks {min(options.ranks)}: a collective has at least 2.")
    begin = time.monotonic()
    usable = usable_cores()
    cores = min(usable, MEASURED)
    with _progress() as bar, Pool(max(cores, *options.ranks), tune_process) as pool:
        task = bar.add_task("starting", total=1.0)
        found = measure(
            pool, cores, usable, list(options.ranks), options.rounds or ROUNDS,
            lambda done, what: bar.update(task, completed=done, description=what),
        )  # fmt: skip
    source = f"shoal calibrate, {time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} of {usable} cores at once"
    made = profile(found, NAME, host_memory(), source)
    write_whole(options.out, tomli_w.dumps(made))
    of = made["accelerators"][NAME]
    peaks = ", ".join(f"{kind} {peak / 1e9:.0f} GFLOP/s" for kind, peak in of["peak_flops"].items())
    say = [
        f"{cores} of {usable} cores at once, each: {peaks}, memory {of['memory_bandwidth'] / 1e9:.1f} GB/s; "
        f"ring {made['links'][NAME]['bandwidth'] / 1e9:.1f} GB/s and {made['links'][NAME]['latency'] * 1e6:.0f} us",
        f"written: {options.out} ({time.monotonic() - begin:.0f} s)",
        f"Now: shoal plan --catalog {options.out} --cluster 4x{NAME} --model tiny --precision fp32",
    ]
    for line in say:
        console.print(Text(line), soft_wrap=True)
    return 0


def _progress() -> Progress:
    return Progress(
        BarColumn(), TextColumn("{task.description}"), console=Console(file=sys.stderr), transient=True,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


def _check(options: CalibrateOptions, console: Console) -> int:
    if options.scatter and options.scatter.suffix != ".svg":
        raise UsageError(f"--scatter {options.scatter}: a figure ends in .svg")
    check_place(options.scatter, "--scatter", new=True)
    tables.add(options.check)
    if (machine := nodes().get(NAME)) is None or machine.reference is None or machine.at_once is None:
        raise UsageError(
            f"--check {options.check}: it is no profile of this version: [nodes.{NAME}] with `reference` and `at_once` "
            "is wanted.\n  Make one with shoal calibrate --out FILE."
        )
    with _progress() as bar, Pool(4, tune_process) as pool:
        task = bar.add_task("starting", total=1.0)

        def say(done: float, what: str) -> None:
            bar.update(task, completed=done, description=what)

        if options.pick:
            found = pick(pool, options.pick, options.rounds or CHECKED, NAME, say)
        else:
            found = compare(pool, drawn_layouts(options.layouts), options.rounds or CHECKED, NAME, say)
    for line in lines(found):
        console.print(Text(line), soft_wrap=True)
    if options.scatter:
        write_scatter(options.scatter, found)
        console.print(Text(f"written: {options.scatter}"), soft_wrap=True)
    return int(_lost(found) > 0.05 if options.pick else not _right(found))


def lines(found: list[Compared]) -> list[str]:
    """The table of a check."""
    work = workload()
    rows = [
        f"{one.slower:>7.2f}{show_seconds(one.measured):>10}{show_seconds(one.estimated):>11}"
        f"{100 * one.error:>+8.1f} %  {one.words}"
        for one in sorted(found, key=lambda one: one.measured)
    ]
    return [
        f"{work.model}, {work.sequences} sequences of {work.sequence_length} tokens a step, {work.precision}; "
        "medians of turns, over how much slower the machine was just then than when it was calibrated",
        f"{'slower':>7}{'measured':>10}{'estimated':>11}{'off':>10}  layout", *rows,
        f"median error {100 * _median(found):.1f} %; order (Spearman) {spearman(found):.3f}; the layout that is "
        f"estimated fastest takes {1 + _lost(found):.3f} of the fastest's time",
    ]  # fmt: skip


def _lost(found: list[Compared]) -> float:
    """By what part the layout that is estimated fastest takes longer than the fastest."""
    picked = min(found, key=lambda one: one.estimated)
    return picked.measured / min(one.measured for one in found) - 1


def _right(found: list[Compared]) -> bool:
    """Whether estimates are near what was measured, and in its order."""
    return _median(found) <= 0.10 and spearman(found) >= ORDERED


def _median(found: list[Compared]) -> float:
    errors = sorted(abs(one.error) for one in found)
    middle = len(errors) // 2
    return errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
