"""`shoal validate DIR`: score the calibrated cost model against published measurements, or fit it to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import shoal
from shoal.base.files import check_writable
from shoal.base.options import POSITIONAL
from shoal.base.section import Section
from shoal.base.terminal import wrap_lines
from shoal.labs.validate.fit import find_at_bounds
from shoal.labs.validate.published_layouts import layout_lines
from shoal.labs.validate.tables import score_lines, write_page


class ValidateOptions(Section):
    folder: Annotated[Path, POSITIONAL]
    """A folder of CSV files with one published measurement per row (see docs/validate.md for the columns)."""

    constants: Path | None = None
    """Estimate with the constants of this TOML file instead of shoal's own."""

    fit: Path | None = None
    """Fit the constants to these measurements, score models that the fit has not seen, and write them to this TOML
    file."""

    out: Path | None = None
    """Write a page with estimates plotted against measurements (.html)."""

    layouts: bool = False
    """Print published layouts of the largest dense models, and the layout that is planned for each run, instead."""

    worst: int = 0
    """Number of rows with the largest errors to print for each file."""


def run(options: ValidateOptions) -> int:
    """Score the cost model, print, and write the requested files; return the exit code."""
    check_writable(options.out, "--out", ".html")
    check_writable(options.fit, "--fit", ".toml", new=options.fit != options.constants)
    found = shoal.validate_estimates(options.folder, constants=options.constants, fit=options.fit is not None)
    if options.layouts:
        print("\n".join(layout_lines(found.points)))
        return 0
    if options.fit:
        found.write_constants(options.fit)
        print(f"written: {options.fit}", *find_at_bounds(found.constants, found.points), sep="\n  ")
    print("\n".join(wrap_lines(score_lines(found, options.worst))))
    if options.out:
        write_page(options.out, found.scored, sum(found.left.values()))
        print(f"written: {options.out}")
    return 0
