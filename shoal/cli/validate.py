"""`shoal validate DIR`: the calibrated cost model beside published measurements, scored; and fitted to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import tomli_w
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.files import check_place, write_whole
from shoal.base.section import POSITIONAL, Section
from shoal.labs.validate.by_estimate import EstimatedSteps, played
from shoal.labs.validate.fit import as_toml, at_bounds, fitted
from shoal.labs.validate.page import write_page
from shoal.labs.validate.rows import Left, Point, read_folder
from shoal.labs.validate.score import Errors, Scored, by, score, totals
from shoal.labs.validate.unseen import folds_of, held_out, held_out_intervals, spreads
from shoal.spec.catalog.calibration import Calibration, read_calibration

HEAD = (
    "# The constants of the calibrated cost model (shoal/planning/cost): what each means,\n"
    "# and what the fit found. Made by `shoal validate DIR --fit FILE`. `value` has what the measurements reached;\n"
    "# elsewhere `expected` counts.\n\n"
)


class ValidateOptions(Section):
    folder: Annotated[Path, POSITIONAL]
    """A folder of CSV files, one published point in each row (docs/validate.md has the columns)."""

    constants: Path | None = None
    """Estimate with the constants of this TOML file instead of shoal's own."""

    fit: Path | None = None
    """Fit the constants to these points, score models that the fit has not seen, and write them to this TOML file."""

    out: Path | None = None
    """Write a page with estimates over measurements (.html)."""

    worst: int = 0
    """Print this many rows of the largest errors of each file."""


def validate(options: ValidateOptions) -> int:
    """Score, print, and write what was asked for; the exit code.

    Raises:
        UsageError: no folder, no points in it, or a file that cannot be written as asked.
    """
    if not options.folder.is_dir():
        raise UsageError(f"{options.folder}: no such folder; give one with CSV files of measurements")
    for option, path, ending in (("out", options.out, ".html"), ("fit", options.fit, ".toml")):
        if path and path.suffix != ending:
            raise UsageError(f"--{option} {path}: the file's name must end in {ending}")
    check_place(options.out, "--out")
    check_place(options.fit, "--fit", new=options.fit != options.constants)
    constants = read_calibration(options.constants)
    points, left = read_folder(options.folder)
    if not points:
        raise UsageError(
            f"{options.folder}: no row of any CSV file there is a measured step; docs/validate.md has the columns"
        )
    console = Console(highlight=False)
    if options.fit:
        constants = _fit(options.fit, points, constants, console)
    scored = score(points, constants)
    print_score(scored, left, console)
    print_played(played(points, constants), console)
    if options.worst:
        _print_worst(scored, options.worst, console)
    if options.out:
        write_page(options.out, scored, sum(left.values()))
        console.print(f"\n{options.out}", soft_wrap=True)
    return 0


def _fit(path: Path, points: list[Point], constants: Calibration, console: Console) -> Calibration:
    folds = folds_of(points)
    found = held_out(points, constants, folds)
    unseen = Scored(points, *found, *held_out_intervals(points, constants, found, folds))
    constants = spreads(points, fitted(points, constants), found)
    write_whole(path, HEAD + tomli_w.dumps(as_toml(constants, points)))  # `path` may be those that it began from
    console.print(f"{path}: {len(constants.constants)} constants", soft_wrap=True)
    for line in at_bounds(constants, points):
        console.print(f"  {line}", soft_wrap=True, markup=False)
    console.print("\nModels that a fit had not seen:\n")
    _print(console, table(totals(unseen) | by(unseen, lambda p: p.file)))
    console.print("\nAll of them, by constants from all:\n")
    return constants


def print_score(scored: Scored, left: Left, console: Console) -> None:
    """The tables."""
    sources = by(scored, lambda p: f"{p.file}, {p.quality}")
    _print(
        console, table(totals(scored) | sources | by(scored, lambda p: f"{_size(p.gpus)} accelerators, {p.quality}"))
    )
    good, families = scored.where(lambda p: p.quality == "A").best
    console.print(
        f"\nPredicted best layout within 5 % of the measured best: {good} of {families} families of quality A.",
        soft_wrap=True,
    )
    assumed = Counter(name for p in scored.points for name in p.assumed)
    console.print(f"{len(scored.points):,} rows scored, {sum(left.values()):,} not.")
    if assumed:
        console.print(
            "Assumed where not published: " + ", ".join(f"{n} ({c:,} rows)" for n, c in assumed.most_common()),
            soft_wrap=True,
        )
    for (file, reason), count in sorted(left.items()):
        console.print(f"  {file}: {count:,} not scored, {reason}", soft_wrap=True)


def print_played(steps: EstimatedSteps, console: Console) -> None:
    """How far `shoal estimate` is from the same measurements, and from the closed forms."""
    if steps.points:
        errors = Errors.of(steps.seconds, np.array([p.seconds for p in steps.points]), np.zeros(len(steps.points)))
        console.print(
            f"By `shoal estimate`, {errors.rows:,} rows of quality A that it can express: median "
            f"{100 * errors.median:.1f} %, 90 % within {100 * errors.ninetieth:.1f} %, bias "
            f"{100 * errors.bias:+.1f} %; from these closed forms, told what shoal's engine does, it differs by "
            f"{100 * steps.apart:.1f} %.",
            soft_wrap=True,
        )


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _size(gpus: int) -> str:
    """A range of numbers of accelerators, as a label that sorts."""
    low = next((n for n in (1025, 257, 129, 33, 9) if gpus >= n), 1)
    return {1: "   1 to    8", 9: "   9 to   32", 33: "  33 to  128", 129: " 129 to  256", 257: " 257 to 1024"}.get(
        low, "1025 and more"
    )


HEADS = (
    "times",
    "median",
    "90 %",
    "bias",
    "in 80 %",
    "memory",
    "median",
    "90 %",
    "bias",
    "in 80 %",
    "did not fit",
    "precision",
    "recall",
)


def table(rows: Mapping[str, Scored]) -> list[str]:
    """Lines of one width, a head first."""
    cells = [["", *HEADS]]
    for name, scored in rows.items():
        count, precision, recall = scored.out_of_memory
        oom = [f"{count:,}", f"{precision:.3f}", f"{recall:.3f}"] if count else [""] * 3
        cells.append([name, *_errors(scored.time), *_errors(scored.memory), *oom])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(f"{cell:>{w}}" if i else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]


def _errors(errors: Errors) -> list[str]:
    if not errors.rows:
        return [""] * 5
    return [
        f"{errors.rows:,}",
        *(f"{100 * e:.1f} %" for e in (errors.median, errors.ninetieth)),
        f"{100 * errors.bias:+.1f} %",
        f"{100 * errors.inside:.0f} %",
    ]


def _print_worst(scored: Scored, count: int, console: Console) -> None:
    for file, part in by(scored.where(lambda p: p.seconds is not None), lambda p: p.file).items():
        console.print(f"\n{file}: the largest errors of its times")
        errors = part.seconds / part.measured_seconds
        for i in sorted(range(len(errors)), key=lambda i: -abs(errors[i] - 1) if errors[i] > 1 else 1 - 1 / errors[i])[
            :count
        ]:
            p, run = part.points[i], part.points[i].run
            layout = ", ".join(
                f"{name} {run[name]:g}" for name in ("dp", "tp", "pp", "cp", "zero", "b", "microbatches", "s")
            )
            console.print(
                f"  {p.row} {p.model}: {layout}: {part.seconds[i]:.3g} s, measured {p.seconds:.3g}", soft_wrap=True
            )
