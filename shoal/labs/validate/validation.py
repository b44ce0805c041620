"""Validate estimates: score the calibrated cost model against published measurements, and fit it to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w

from shoal.base.errors import UsageError
from shoal.base.files import write_atomically
from shoal.labs.validate.fit import fit_constants, to_tables
from shoal.labs.validate.held_out import HeldOut, accuracy_text, hold_out
from shoal.labs.validate.rows import Left, Point, read_folder
from shoal.labs.validate.score import Scored, score
from shoal.spec.catalog.calibration import Calibration, read_calibration

HEAD = (
    "# The constants of the calibrated cost model (shoal/planning/cost): what each means,\n"
    "# and what the fit found. Made by `shoal validate DIR --fit FILE`. `value` has what the measurements reached;\n"
    "# elsewhere `expected` counts. What one does not say has the default of shoal/spec/catalog/calibration.py.\n\n"
)


ACCURACY = (
    "# Errors of estimates on published measurements of which a fit had not seen the model, the cluster or the\n"
    "# software, and the clusters of each software that were measured. Made by `shoal validate DIR --fit FILE`.\n\n"
)


@dataclass(frozen=True)
class Validation:
    """Estimates of published measurements.

    Attributes:
        points: the published points.
        left: number of rows that are no points, by file and reason.
        constants: constants of the scored cost model.
        scored: the points with their estimates.
        held_out: errors of points that a fit has not seen.
    """

    points: list[Point]
    left: Left
    constants: Calibration
    scored: Scored
    held_out: list[HeldOut]

    def write_constants(self, path: str | Path) -> None:
        """Write the constants as TOML for ``constants`` of `validate_estimates`, and their accuracy beside it."""
        path = Path(path)
        write_atomically(path, HEAD + tomli_w.dumps(to_tables(self.constants)))
        write_atomically(path.with_stem(f"{path.stem}-accuracy"), ACCURACY + accuracy_text(self.held_out))


def validate_estimates(
    folder: str | Path, *, constants: str | Path | None = None, fit: bool = False
) -> Validation:
    """Score estimates against published measurements.

    Args:
        folder: CSV files with one published point per row (columns: docs/validate.md).
        constants: a TOML file with constants of the cost model (default: shoal's own).
        fit: fit the constants to these points first.

    Raises:
        UsageError: the folder is missing or has no measured step, or the file of constants is missing or invalid.

    >>> import shoal
    >>> found = shoal.validate_estimates("measurements")  # doctest: +SKIP
    >>> f"{found.scored.time.median:.3f}"  # doctest: +SKIP
    '0.058'
    >>> shoal.validate_estimates("nowhere")
    Traceback (most recent call last):
    shoal.base.errors.UsageError: nowhere: no such folder; give one with CSV files of measurements
    """
    folder, constants = Path(folder), None if constants is None else Path(constants)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give one with CSV files of measurements")
    known = read_calibration(constants)
    points, left = read_folder(folder)
    if not points:
        raise UsageError(f"{folder}: no row of any CSV file there is a measured step; docs/validate.md has the columns")
    own = None if constants is None and not fit else known
    if fit:
        own = known = fit_constants(points, known)
    return Validation(points, left, known, score(points, own), hold_out(points, known))
