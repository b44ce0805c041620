"""Fit constants to measurements: robust least squares on logarithms, with a prior for each constant.

Every constant is positive. Its logarithm has a normal prior (standard deviation `Constant.sure`). A residual is the
logarithm of estimated over measured; large ones count less (Cauchy's loss), so publication errors matter little.

The errors of what a fit has not seen, by model, cluster and software, give the intervals that every estimate prints.
Each fit starts at the priors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from shoal.labs.validate.rows import Point, stack
from shoal.planning.cost.batched_runs import Runs, network_name
from shoal.planning.cost.memory.published_software import footprint
from shoal.planning.cost.time.step import step
from shoal.planning.estimate import accuracy_key, find_width
from shoal.spec.catalog.accuracy import SIZES, Kind
from shoal.spec.catalog.calibration import Calibration, Constant, constant_names

WEIGHTS = {"A": 1.0, "B": 0.4, "M": 1.0, "C": 0.1}  # by quality
SCALES = {"time": 0.08, "memory": 0.05}  # size of residuals above which they count less
ITERATIONS = 60  # maximum
FURTHEST = 0.7  # maximum change of a logarithm in an iteration
INSIDE = 0.8  # fraction of the measurements inside an interval
FEW = 5  # measurements that errors of their own need


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


def to_tables(constants: Calibration) -> dict:
    """Return the tables of `calibration.toml`, with the same keys."""
    tables = {}
    for name, of in constants.constants.items():
        table = of.model_dump(exclude_none=True, exclude={"value"})
        if of.by:
            names = constant_names(of.by)
            own = of.value if isinstance(of.value, dict) else {}
            table["value"] = {key: float(f"{constants[name][names.index(key)]:.4g}") for key in own}
        else:
            table["value"] = float(f"{float(constants[name]):.4g}")
        tables[name] = table
    return tables


# ---- what a fit has not seen -----------------------------------------------------------------------------------------

SPLITS: dict[str, Callable[[Point], Hashable]] = {
    "model": lambda p: (p.run.shape.layers, p.run.shape.hidden, p.run.shape.heads),
    "cluster": lambda p: (p.file, p.run.cluster.accelerator.name, p.run.cluster.nodes > 1, network_name(p.run.cluster)),
    "software": lambda p: p.run.software.name,
}
"""What is left out together: a model by its shape, whatever its name or file; a cluster; a software."""


def assign_groups(points: Sequence[Point], split: str) -> np.ndarray:
    """Return the group of each point in one of `SPLITS`: [points]."""
    keys = [SPLITS[split](point) for point in points]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys])


def leave_out(points: Sequence[Point], constants: Calibration, groups: np.ndarray) -> np.ndarray:
    """Return log(estimated / measured) of each point with constants fitted to the other groups: [2, points].

    The rows are times and memory; NaN where not measured. Each fit is one Newton step from the constants that are
    fitted to all points (the infinitesimal jackknife: Giordano et al. 2019, "A Swiss Army infinitesimal jackknife").
    """
    found = np.full((2, len(points)), np.nan)
    for kind, what in enumerate(SCALES):
        problem = FitProblem(points, what, constants)
        at = np.array([i for i, p in enumerate(points) if problem.uses(p)])
        if not len(at):
            continue
        logs, prior, scale, count = problem.start(), problem.prior, SCALES[what], len(at)
        r, slopes = problem.residuals(logs), problem.jacobian(logs)
        weight = 1 / (1 + (r / scale) ** 2 / 2) / scale**2
        pull = (logs - prior.expected) / prior.sure**2
        of_row = np.tile(groups[at], len(r) // count)
        curvature = (slopes * weight[:, None]).T @ slopes + np.diag(1 / prior.sure**2)
        slope = slopes.T @ (weight * r) + pull
        free = (logs > prior.least + 1e-3) & (logs < prior.most - 1e-3)
        errors = r[:count] / problem.weight
        for group in set(groups[at].tolist()):
            mine, change = of_row == group, np.zeros(len(logs))
            own = slopes[mine] * weight[mine, None]
            rest = (curvature - own.T @ slopes[mine])[np.ix_(free, free)]
            change[free] = np.linalg.solve(rest, -(slope - own.T @ r[mine])[free])
            moved = np.clip(logs + np.clip(change, -FURTHEST, FURTHEST), prior.least, prior.most)
            some = np.flatnonzero(mine[:count])
            errors[some] = problem.residuals(moved, some)[: len(some)] / problem.weight[some]
        measured = problem.seconds if what == "time" else problem.bytes
        found[kind, at] = np.where(np.isnan(measured), np.nan, errors)
    return found


def measure_accuracy(points: Sequence[Point], errors: Mapping[str, np.ndarray]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of `accuracy.toml`, from the errors that `leave_out` found for each of `SPLITS`.

    A software's own errors are of models and of clusters left out. Errors of unknown software are of each software left
    out; each counts as much as any other.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    keys = [accuracy_key(p.run) for p in points]
    for row, kind in enumerate(SCALES):
        known = np.concatenate([errors["model"][row], errors["cluster"][row]])
        tables[kind], names = [], sorted({key[0] for key in keys})
        for software in names:
            kinds = [("", None), *((size, special) for size in ("", *SIZES) for special in (False, True))]
            for size, special in kinds:
                mine = [k[0] == software and size in ("", k[1]) and special in (None, k[2]) for k in keys]
                some = known[np.tile(np.array(mine), 2)]
                some = some[~np.isnan(some)]
                if len(some) // 2 >= (FEW if special is None else 2 * FEW):
                    tables[kind].append(_summarise(some, software, size, special, len(some) // 2))
        unseen = [errors["software"][row][np.array([key[0] == name for key in keys])] for name in names]
        unseen = [some[~np.isnan(some)] for some in unseen]
        levels = [np.quantile(some, np.linspace(0.005, 0.995, 100)) for some in unseen if len(some) >= FEW]
        if levels:
            tables[kind].append(_summarise(np.concatenate(levels), "", "", None, sum(map(len, unseen))))
    return tables


def _summarise(errors: np.ndarray, software: str, size: str, special: bool | None, rows: int) -> dict[str, Any]:
    relative = np.exp(errors) - 1
    sizes = np.abs(relative)
    found = {"median": np.median(sizes), "ninetieth": np.quantile(sizes, 0.9), "bias": np.median(relative),
             "width": np.quantile(np.abs(errors), INSIDE)}  # fmt: skip
    of: dict[str, Any] = {"software": software} | ({"size": size} if size else {})
    return of | ({} if special is None else {"special": special}) | {"rows": rows} | {
        name: float(f"{value:.3g}") for name, value in found.items()
    }


def intervals(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Return half of the 80 % intervals of each point's time and memory, of the logarithm."""
    time, memory = ([find_width(kind, p.run) for p in points] for kind in get_args(Kind))
    return np.array(time), np.array(memory)
