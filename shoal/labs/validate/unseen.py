"""Cross-validation by model, and the 80 % intervals from its errors.

A fold has all points of its models; a model is identified by its shape, whatever its name or file. Each fit starts at
the priors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.labs.validate.fit import ITERATIONS, estimate_points, fit_constants
from shoal.labs.validate.rows import Point
from shoal.planning.cost.batched_runs import Runs
from shoal.spec.catalog.calibration import SPREADS, Calibration
from shoal.spec.catalog.software import software_table

FOLDS = 8
INSIDE = 0.8  # fraction of the measurements inside an interval
FEW = 5  # weight of the errors of all software, in errors of one software
SPREAD = ("spread_time", "spread_memory", "spread_scale")


def assign_folds(points: Sequence[Point]) -> np.ndarray:
    """Return the fold of each point, by the layers, hidden size and heads of its model: [points]."""
    shapes = [tuple(p.run[name] for name in ("layers", "hidden", "heads")) for p in points]
    fold = {shape: i * 7919 % FOLDS for i, shape in enumerate(sorted(set(shapes)))}
    return np.array([fold[shape] for shape in shapes])


def estimate_held_out(
    points: Sequence[Point], constants: Calibration, folds: np.ndarray, iterations: int = ITERATIONS
) -> np.ndarray:
    """Run `estimate_points` on each fold with constants fitted to the other folds: [3, points]."""
    found = np.zeros((3, len(points)))
    for fold in sorted(set(folds)):
        seen = fit_constants([p for p, f in zip(points, folds, strict=True) if f != fold], constants, iterations)
        left = [p for p, f in zip(points, folds, strict=True) if f == fold]
        found[:, folds == fold] = estimate_points(Runs.of([p.run for p in left]), left, seen)
    return found


def _index_scale(runs: Runs) -> np.ndarray:
    """Return each run's index into `SPREADS`."""
    return np.where(runs.ranks <= runs.per_node, 0, np.where(runs.ranks <= 128, 1, 2))


def intervals(runs: Runs, constants: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """Return half of the 80 % intervals of each run's time and memory, of the logarithm."""
    software = runs.code("software")
    time = constants["spread_time"][software] * constants["spread_scale"][_index_scale(runs)]
    return time, constants["spread_memory"][software]


def fit_held_out_intervals(
    points: Sequence[Point], constants: Calibration, found: np.ndarray, folds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `intervals` of each point from the errors of all other folds."""
    widths = np.zeros((2, len(points)))
    for fold in sorted(set(folds)):
        others = folds != fold
        known = fit_spreads([p for p, o in zip(points, others, strict=True) if o], constants, found[:, others])
        left = Runs.of([p.run for p, o in zip(points, others, strict=True) if not o])
        widths[:, ~others] = intervals(left, known)
    return widths[0], widths[1]


def fit_spreads(points: Sequence[Point], constants: Calibration, found: np.ndarray) -> Calibration:
    """Set the widths of the 80 % intervals: quantiles of the errors by software, shrunk to those of all software.

    Software without measurements gets the largest width.

    Args:
        found: estimates of the points by `estimate_held_out`.
    """
    runs = Runs.of([p.run for p in points])
    graded = np.array([p.quality in "AM" for p in points])
    measured = np.array([[p.seconds or np.nan, p.bytes or np.nan] for p in points]).T
    errors = np.where(graded, np.abs(np.log(found[:2] / measured)), np.nan)
    software, values = runs.code("software"), {}
    for name, error in zip(SPREAD, errors, strict=False):
        values[name] = _by_software(error, software, constants[name])
    relative, scale = errors[0] / values["spread_time"][software], _index_scale(runs)
    values["spread_scale"] = np.array([max(0.5, _width(relative[scale == i], 20, 1.0)) for i in range(len(SPREADS))])
    return constants.with_values(values)


def _by_software(errors: np.ndarray, software: np.ndarray, before: np.ndarray) -> np.ndarray:
    everywhere = _width(errors, 1, before.max())
    widths, reached = np.full(len(software_table()), everywhere), []
    for code in set(software):
        mine = errors[(software == code) & ~np.isnan(errors)]
        if len(mine) >= FEW:
            trust = len(mine) / (len(mine) + FEW)
            widths[code] = np.exp(trust * np.log(_width(mine, FEW, everywhere)) + (1 - trust) * np.log(everywhere))
            reached.append(code)
    widest = widths[reached].max() if reached else everywhere
    widths[[code for code in range(len(widths)) if code not in reached]] = widest
    return widths


def _width(errors: np.ndarray, least: int, default: float) -> float:
    """Return the 80 % quantile of the known errors, or a default if there are fewer than ``least``."""
    known = errors[~np.isnan(errors)]
    return float(np.quantile(known, INSIDE)) if len(known) >= max(1, least) else float(default)
