"""Validate estimates: score the calibrated cost model against published measurements, and fit it to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w

from shoal.base.errors import UsageError
from shoal.base.files import write_whole
from shoal.labs.validate.by_estimate import EstimatedSteps, played
from shoal.labs.validate.fit import as_toml, fitted
from shoal.labs.validate.rows import Left, Point, read_folder
from shoal.labs.validate.score import Scored, score
from shoal.labs.validate.unseen import folds_of, held_out, held_out_intervals, spreads
from shoal.spec.catalog.calibration import Calibration, read_calibration

HEAD = (
    "# The constants of the calibrated cost model (shoal/planning/cost): what each means,\n"
    "# and what the fit found. Made by `shoal validate DIR --fit FILE`. `value` has what the measurements reached;\n"
    "# elsewhere `expected` counts.\n\n"
)


@dataclass(frozen=True)
class Validation:
    """Estimates beside published measurements.

    Attributes:
        points: the published points.
        left: how many rows of each file are no points, by the reason.
        constants: of the cost model that was scored.
        scored: the points, with what is estimated of them.
        steps: the same measurements as `shoal estimate` prices them, one layout at a time.
        unseen: after a fit, the points of each model by constants from a fit to all other models; else None.
    """

    points: list[Point]
    left: Left
    constants: Calibration
    scored: Scored
    steps: EstimatedSteps
    unseen: Scored | None = None

    def write_constants(self, path: Path) -> None:
        """Write the constants as a TOML file, which ``constants`` of `validate_estimates` takes."""
        write_whole(path, HEAD + tomli_w.dumps(as_toml(self.constants, self.points)))


def validate_estimates(folder: Path, *, constants: Path | None = None, fit: bool = False) -> Validation:
    """Score estimates against published measurements.

    Args:
        folder: CSV files, with one published point in each row (docs/validate.md has the columns).
        constants: a TOML file with other constants of the cost model than shoal's own.
        fit: also fit the constants to these points, which takes minutes, and score the fitted ones.

    Raises:
        UsageError: there is no such folder, or no measured step in it; or the file of constants is missing or wrong.

    >>> import shoal
    >>> found = shoal.validate_estimates(Path("measurements"))  # doctest: +SKIP
    >>> f"{found.scored.time.median:.3f}"  # doctest: +SKIP
    '0.058'
    >>> shoal.validate_estimates(Path("nowhere"))
    Traceback (most recent call last):
    shoal.base.errors.UsageError: nowhere: no such folder; give one with CSV files of measurements
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give one with CSV files of measurements")
    known = read_calibration(constants)
    points, left = read_folder(folder)
    if not points:
        raise UsageError(f"{folder}: no row of any CSV file there is a measured step; docs/validate.md has the columns")
    unseen = None
    if fit:
        known, unseen = _fit(points, known)
    return Validation(points, left, known, score(points, known), played(points, known), unseen)


def _fit(points: list[Point], constants: Calibration) -> tuple[Calibration, Scored]:
    """Constants fitted to all points; and the points by fits that have not seen them."""
    folds = folds_of(points)
    found = held_out(points, constants, folds)
    seconds, size, part = found
    unseen = Scored(points, seconds, size, part, *held_out_intervals(points, constants, found, folds))
    return spreads(points, fitted(points, constants), found), unseen
