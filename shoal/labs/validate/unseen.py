"""What fits say of models that they have not seen, and the 80 % intervals that these errors make.

A fold holds whole models, told by their shape: the same one in another file, or under another name, is in the same
fold. Each fold's fit begins, as every fit does, at what is expected of the constants, never at what others found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.labs.validate.fit import ITERATIONS, estimated, fitted
from shoal.labs.validate.rows import Point
from shoal.planning.cost.batched_runs import Runs
from shoal.spec.catalog.calibration import SPREADS, Calibration
from shoal.spec.catalog.software import software_table

FOLDS = 8
INSIDE = 0.8  # of the measurements, that an interval is to hold
FEW = 5  # errors of one software: as many of all count beside them
SPREAD = ("spread_time", "spread_memory", "spread_scale")


def folds_of(points: Sequence[Point]) -> np.ndarray:
    """[points] the fold of each: that of its model, which is its layers, its width and its heads."""
    shapes = [tuple(p.run[name] for name in ("layers", "hidden", "heads")) for p in points]
    fold = {shape: i * 7919 % FOLDS for i, shape in enumerate(sorted(set(shapes)))}
    return np.array([fold[shape] for shape in shapes])


def held_out(
    points: Sequence[Point], constants: Calibration, folds: np.ndarray, iterations: int = ITERATIONS
) -> np.ndarray:
    """[3, points] what `estimated` says of each, by constants from a fit that has seen no point of its fold."""
    found = np.zeros((3, len(points)))
    for fold in sorted(set(folds)):
        seen = fitted([p for p, f in zip(points, folds, strict=True) if f != fold], constants, iterations)
        left = [p for p, f in zip(points, folds, strict=True) if f == fold]
        found[:, folds == fold] = estimated(Runs.of([p.run for p in left]), left, seen)
    return found


def scale_of(runs: Runs) -> np.ndarray:
    """Index into `SPREADS`."""
    return np.where(runs.ranks <= runs.per_node, 0, np.where(runs.ranks <= 128, 1, 2))


def intervals(runs: Runs, constants: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """Half of the 80 % interval of each run's time and of its memory, of the logarithm."""
    software = runs.code("software")
    time = constants["spread_time"][software] * constants["spread_scale"][scale_of(runs)]
    return time, constants["spread_memory"][software]


def held_out_intervals(
    points: Sequence[Point], constants: Calibration, found: np.ndarray, folds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same of each point, from the errors of all folds but its own."""
    widths = np.zeros((2, len(points)))
    for fold in sorted(set(folds)):
        others = folds != fold
        known = spreads([p for p, o in zip(points, others, strict=True) if o], constants, found[:, others])
        left = Runs.of([p.run for p, o in zip(points, others, strict=True) if not o])
        widths[:, ~others] = intervals(left, known)
    return widths[0], widths[1]


def spreads(points: Sequence[Point], constants: Calibration, found: np.ndarray) -> Calibration:
    """With widths of the 80 % intervals: quantiles of the errors by software, drawn to those of all where there are
    few.

    Of software that was not measured the widest is taken.

    Args:
        found: as `held_out` estimates the points.
    """
    runs = Runs.of([p.run for p in points])
    graded = np.array([p.quality in "AM" for p in points])
    measured = np.array([[p.seconds or np.nan, p.bytes or np.nan] for p in points]).T
    errors = np.where(graded, np.abs(np.log(found[:2] / measured)), np.nan)
    software, values = runs.code("software"), {}
    for name, error in zip(SPREAD, errors, strict=False):
        values[name] = _by_software(error, software, constants[name])
    relative, scale = errors[0] / values["spread_time"][software], scale_of(runs)
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


def _width(errors: np.ndarray, least: int, otherwise: float) -> float:
    """What holds four fifths of the errors that are known, where there are enough."""
    known = errors[~np.isnan(errors)]
    return float(np.quantile(known, INSIDE)) if len(known) >= max(1, least) else float(otherwise)
