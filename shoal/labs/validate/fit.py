"""Fit constants to measurements: robust least squares on logarithms, with a prior for each constant.

Every constant is positive. Its logarithm has a normal prior (standard deviation `Constant.sure`). A residual is the
logarithm of estimated over measured; large ones count less (Cauchy's loss), so publication errors matter little.

Cross-validation by model gives the 80 % intervals. A fold has all points of its models; a model is identified by its
shape, whatever its name or file. Each fit starts at the priors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shoal.labs.validate.rows import Point, stack
from shoal.planning.cost.batched_runs import Runs
from shoal.planning.cost.memory.published_software import footprint
from shoal.planning.cost.time.step import step
from shoal.spec.catalog.calibration import SPREADS, Calibration, constant_names
from shoal.spec.catalog.software import software_table

WEIGHTS = {"A": 1.0, "B": 0.4, "M": 1.0, "C": 0.1}  # by quality
SCALES = {"time": 0.08, "memory": 0.05}  # size of residuals above which they count less
ITERATIONS = 60  # maximum
FURTHEST = 0.7  # maximum change of a logarithm in an iteration
FOLDS = 8
INSIDE = 0.8  # fraction of the measurements inside an interval
FEW = 5  # weight of the errors of all software, in errors of one software
SPREAD = ("spread_time", "spread_memory", "spread_scale")


class Prior(NamedTuple):
    """Normal priors of logarithms (mean, standard deviation) and their bounds."""

    expected: np.ndarray
    sure: np.ndarray
    least: np.ndarray
    most: np.ndarray


def estimate_points(
    runs: Runs, points: Sequence[Point], constants: Calibration
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the seconds, the bytes as each publication counts them, and the fraction of the memory that is needed."""
    return step(runs, constants).seconds, *_memory(runs, np.array([p.memory_kind for p in points]), constants)


def _memory(runs: Runs, kinds: np.ndarray, constants: Calibration) -> tuple[np.ndarray, np.ndarray]:
    memory = footprint(runs, constants)
    size = np.where(kinds == "allocated", memory.allocated, memory.reserved)
    size = np.where(kinds == "first", memory.first_reserved, np.where(kinds == "process", memory.process, size))
    return size, memory.needed / memory.capacity


class FitProblem:
    """The residuals of some points, as a function of the constants' logarithms."""

    def __init__(self, points: Sequence[Point], what: str, constants: Calibration):
        self.what, self.constants = what, constants
        keep = [p for p in points if p.seconds or (what == "memory" and (p.bytes or p.oom))]
        self.points, self.runs = keep, stack(keep)
        self.weight = np.array([WEIGHTS.get(p.quality, 0.1) for p in keep])
        self.seconds = np.array([p.seconds or np.nan for p in keep])
        self.bytes = np.array([p.bytes or np.nan for p in keep])
        self.oom = np.array([p.oom for p in keep])
        self.kinds = np.array([p.memory_kind for p in keep])
        self.parameters = [  # a constant, or one element of it
            (name, index)
            for name, of in constants.constants.items()
            if of.fitted == what
            for index in (sorted(set(self.runs.code(of.by))) if of.by else [None])
        ]

    def start(self) -> np.ndarray:
        """Return the logarithms of the current constants."""
        known = self.constants
        values = [known[name] if index is None else known[name][index] for name, index in self.parameters]
        return np.log(np.array(values, float))

    @property
    def prior(self) -> Prior:
        of = [self.constants.constants[name] for name, _ in self.parameters]
        names = [constant_names(c.by)[index or 0] for c, (_, index) in zip(of, self.parameters, strict=True)]
        return Prior(
            np.log([c.prior(name) for c, name in zip(of, names, strict=True)]), np.array([c.sure for c in of]),
            np.array([np.log(c.least) if c.least else -np.inf for c in of]),
            np.array([np.log(c.most) if c.most else np.inf for c in of]),
        )  # fmt: skip

    def constants_at(self, logs: np.ndarray) -> Calibration:
        """Return the constants with these logarithms."""
        values: dict[str, np.ndarray] = {}
        for (name, index), value in zip(self.parameters, np.exp(logs), strict=True):
            if index is None:
                values[name] = np.array(value)
            else:
                values.setdefault(name, self.constants[name].copy())[index] = value
        return self.constants.with_values(values)

    def residuals(self, logs: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Return log(estimated / measured), of all points or some; for memory also how much a fit is misjudged."""
        constants, rows = self.constants_at(logs), np.arange(len(self.points)) if rows is None else rows
        runs, weight = self.runs.take(rows), self.weight[rows]
        if self.what == "time":
            return weight * np.clip(np.log(step(runs, constants).seconds / self.seconds[rows]), -3, 3)
        size, part = _memory(runs, self.kinds[rows], constants)
        known = np.nan_to_num(np.clip(np.log(size / self.bytes[rows]), -3, 3))
        short = np.clip(np.where(self.oom[rows], -np.log(part), np.log(part)) + 0.01, 0, 0.6)
        return np.concatenate([weight * known, 0.7 * weight * short])

    def jacobian(self, logs: np.ndarray, small: float = 1e-4) -> np.ndarray:
        """Return [residuals, parameters] by finite differences, over the points that each parameter affects."""
        everywhere = self.residuals(logs)
        found, count = np.zeros((len(everywhere), len(logs))), len(self.points)
        for j, (name, index) in enumerate(self.parameters):
            rows = np.arange(count)
            if index is not None:
                rows = np.flatnonzero(self.runs.code(self.constants.constants[name].by) == index)
            at = rows if self.what == "time" else np.concatenate([rows, rows + count])
            moved = logs + small * (np.arange(len(logs)) == j)
            found[at, j] = (self.residuals(moved, rows) - everywhere[at]) / small
        return found


def minimise(
    residuals: Callable[[np.ndarray], np.ndarray], jacobian: Callable[[np.ndarray], np.ndarray], x: np.ndarray,
    prior: Prior, scale: float, iterations: int,
) -> np.ndarray:  # fmt: skip
    """Return the x that minimises the sum of 2 log(1 + r^2 / 2 scale^2) and ((x - expected) / sure)^2.

    Levenberg-Marquardt with iteratively reweighted residuals.
    """

    def cost(r: np.ndarray, x: np.ndarray) -> float:
        return float(2 * np.log1p((r / scale) ** 2 / 2).sum() + (((x - prior.expected) / prior.sure) ** 2).sum())

    x = np.clip(x, prior.least, prior.most)
    r, damping, still = residuals(x), 1e-2, 0
    best = cost(r, x)
    for _ in range(iterations):
        slopes = jacobian(x)
        weight = 1 / (1 + (r / scale) ** 2 / 2) / scale**2
        curvature = (slopes * weight[:, None]).T @ slopes + np.diag(1 / prior.sure**2)
        slope = slopes.T @ (weight * r) + (x - prior.expected) / prior.sure**2
        free = ~((x <= prior.least) & (slope > 0) | (x >= prior.most) & (slope < 0))  # the others stay at their bounds
        curvature, slope = curvature[np.ix_(free, free)], slope[free]
        change, before = np.zeros(len(x)), best
        for _ in range(16):
            change[free] = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), slope)
            tried = np.clip(x + np.clip(change, -FURTHEST, FURTHEST), prior.least, prior.most)
            found = residuals(tried)
            if (value := cost(found, tried)) < best:
                x, r, best, damping = tried, found, value, max(damping / 3, 1e-5)
                break
            damping *= 4
        still = still + 1 if before - best < 1e-5 * before else 0
        if still:
            damping = 1e-2  # the last steps may have been short because of it
        if still == 2:
            break
    return x


def fit_constants(points: Sequence[Point], constants: Calibration, iterations: int = ITERATIONS) -> Calibration:
    """Fit the constants of time, then of memory, to points and priors; the given values are not used."""
    constants = constants.expected()
    for what in ("time", "memory"):
        problem = FitProblem(points, what, constants)
        if problem.points:
            logs, scale = problem.start(), SCALES[what]
            found = minimise(problem.residuals, problem.jacobian, logs, problem.prior, scale, iterations)
            constants = problem.constants_at(found)
    return constants


def find_at_bounds(constants: Calibration, points: Sequence[Point]) -> list[str]:
    """Return a line for each constant that affects the points and is at a bound."""
    lines = []
    for what in SCALES:
        problem = FitProblem(points, what, constants)
        logs, prior = problem.start(), problem.prior
        for (name, index), at, least, most in zip(problem.parameters, logs, prior.least, prior.most, strict=True):
            if min(abs(at - least), abs(at - most)) < 1e-3:
                if index is not None:
                    name += f", {constant_names(constants.constants[name].by)[index]}"
                bound = "lower" if abs(at - least) < 1e-3 else "upper"
                lines.append(f"{name} is at its {bound} bound, {np.exp(at):.4g}")
    return lines


def to_tables(constants: Calibration, points: Sequence[Point]) -> dict:
    """Return the tables of `calibration.toml`; only constants that affect these points get a value."""
    runs = stack(points)
    tables = {}
    for name, of in constants.constants.items():
        table = of.model_dump(exclude_none=True, exclude={"value"})
        if of.by:
            names = constant_names(of.by)
            reached = sorted(set(runs.code(of.by))) if of.fitted else range(len(names))
            table["value"] = {names[i]: float(f"{constants[name][i]:.4g}") for i in reached}
        else:
            table["value"] = float(f"{float(constants[name]):.4g}")
        tables[name] = table
    return tables


# ---- cross-validation ------------------------------------------------------------------------------------------------


def assign_folds(points: Sequence[Point]) -> np.ndarray:
    """Return the fold of each point, by the layers, hidden size and heads of its model: [points]."""
    shapes = [(p.run.shape.layers, p.run.shape.hidden, p.run.shape.heads) for p in points]
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
        found[:, folds == fold] = estimate_points(stack(left), left, seen)
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
        left = stack([p for p, o in zip(points, others, strict=True) if not o])
        widths[:, ~others] = intervals(left, known)
    return widths[0], widths[1]


def fit_spreads(points: Sequence[Point], constants: Calibration, found: np.ndarray) -> Calibration:
    """Set the widths of the 80 % intervals: quantiles of `estimate_held_out`'s errors by software.

    They are shrunk to the quantiles of all software. Software without measurements gets the largest width.
    """
    runs = stack(points)
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
