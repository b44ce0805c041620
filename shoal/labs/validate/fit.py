"""Fit constants to measurements: robust least squares on logarithms, with a prior for each constant.

Every constant is positive. Its logarithm has a normal prior (standard deviation `Constant.sure`). A residual is the
logarithm of estimated over measured; large ones count less (Cauchy's loss), so publication errors matter little.

Each fit starts at the priors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import numpy as np

from shoal.labs.validate.rows import Point, stack
from shoal.planning.cost.batched_runs import Runs
from shoal.planning.cost.memory.published_software import footprint
from shoal.planning.cost.time.step import step
from shoal.spec.catalog.accuracy import Kind
from shoal.spec.catalog.calibration import Calibration, Constant, constant_names

WEIGHTS = {"A": 1.0, "B": 0.4, "M": 1.0, "C": 0.1}  # by quality
SCALE = 0.05  # size of residuals above which they count less
ITERATIONS = 60  # maximum
FURTHEST = 0.7  # maximum change of a logarithm in an iteration


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
    return memory.counted(kinds), memory.needed / memory.capacity


class FitProblem:
    """The residuals of some points, as a function of the constants' logarithms."""

    def __init__(self, points: Sequence[Point], what: str, constants: Calibration):
        self.what, self.constants = what, constants
        keep = [p for p in points if self.uses(p)]
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
            for index in (self._fitted(of) if of.by else [None])
        ]

    def uses(self, point: Point) -> bool:
        """Return whether a point has a measurement of this kind, or fits where others do not."""
        return bool(point.seconds or (self.what == "memory" and (point.bytes or point.oom)))

    def _fitted(self, of: Constant) -> list[int]:
        """Return the keys of a constant that have a value of their own and that some run has."""
        names = constant_names(of.by)
        return [i for i in sorted(set(self.runs.code(of.by))) if isinstance(of.value, dict) and names[i] in of.value]

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

    def jacobian(self, logs: np.ndarray) -> np.ndarray:
        """Return [residuals, parameters] by finite differences, over the points that each parameter affects."""
        everywhere, small = self.residuals(logs), 1e-4
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
    for what in get_args(Kind):
        problem = FitProblem(points, what, constants)
        if problem.points:
            found = minimise(problem.residuals, problem.jacobian, problem.start(), problem.prior, SCALE, iterations)
            constants = problem.constants_at(found)
    return constants


def find_at_bounds(constants: Calibration, points: Sequence[Point]) -> list[str]:
    """Return a line for each constant that affects the points and is at a bound."""
    lines = []
    for what in get_args(Kind):
        problem = FitProblem(points, what, constants)
        logs, prior = problem.start(), problem.prior
        for (name, index), at, least, most in zip(problem.parameters, logs, prior.least, prior.most, strict=True):
            if min(abs(at - least), abs(at - most)) < 1e-3:
                if index is not None:
                    name += f", {constant_names(constants.constants[name].by)[index]}"
                bound = "lower" if abs(at - least) < 1e-3 else "upper"
                lines.append(f"{name} is at its {bound} bound, {np.exp(at):.4g}")
    return lines


def to_tables(constants: Calibration) -> dict:
    """Return the tables of `calibration.toml`, with the same keys; defaults are left out."""
    tables = {}
    for name, of in constants.constants.items():
        table = of.model_dump(exclude_defaults=True, exclude={"value"})
        if of.by:
            names = constant_names(of.by)
            own = of.value if isinstance(of.value, dict) else {}
            table["value"] = {key: float(f"{constants[name][names.index(key)]:.4g}") for key in own}
        else:
            table["value"] = float(f"{float(constants[name]):.4g}")
        tables[name] = table
    return tables
