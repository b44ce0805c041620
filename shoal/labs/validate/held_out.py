"""Errors of what a fit has not seen, and the intervals that every estimate prints.

A fit leaves out all rows of a model, of a cluster, or of a software. The width of an interval is a quantile of these
errors, of the narrowest class of runs (`broader_classes`) in which at least `GROUPS` models, clusters or software were
left out. Measurements on one cluster share much of their error, so a cluster that the fit has not seen has a wider
interval, and software that it has not seen a wider one again.

`coverage` tests the intervals: the width for a model, cluster or software is of all others. A quantile of few groups is
too narrow for the next one. So it is the smallest, in steps of 0.05 %, of which the intervals hold 80 % of what was
left out: conformal prediction, calibrated by leaving one group out. As groups differ much in their number of
measurements, this is the mean of two percentages: of all measurements, and of a group's in the mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from shoal.labs.validate.fit import FURTHEST, SCALE, FitProblem
from shoal.labs.validate.rows import Point
from shoal.labs.validate.score import Errors
from shoal.planning.estimate import accuracy_key, cluster_kind
from shoal.spec.catalog.accuracy import SIZES, Class, Kind, LeftOut, broader_classes
from shoal.spec.catalog.calibration import Calibration

INSIDE = 0.8  # fraction of the measurements inside an interval
FEW = 10  # measurements that errors of their own need
GROUPS = 3  # models, clusters or software that they need
SPLITS: dict[LeftOut, Callable[[Point], Hashable]] = {
    "model": lambda p: (p.run.shape.layers, p.run.shape.hidden, p.run.shape.heads),
    "cluster": lambda p: (p.file, p.run.software.family, cluster_kind(p.run)),
    "software": lambda p: p.run.software.family,
}
"""What is left out together: a model by its shape, whatever its name or file; a cluster; a software."""


def assign_groups(points: Sequence[Point], split: LeftOut) -> np.ndarray:
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
    for kind, what in enumerate(get_args(Kind)):
        problem = FitProblem(points, what, constants)
        at = np.array([i for i, p in enumerate(points) if problem.uses(p)])
        if not len(at):
            continue
        logs, prior, count = problem.start(), problem.prior, len(at)
        r, slopes = problem.residuals(logs), problem.jacobian(logs)
        weight = 1 / (1 + (r / SCALE) ** 2 / 2) / SCALE**2
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


class Coverage(NamedTuple):
    """Errors of what was left out of a fit."""

    errors: Errors
    groups: int  # number of models, clusters or software
    inside_groups: float  # mean over the groups of the fraction of their measurements inside the interval


class HeldOut:
    """Errors of points that a fit has not seen, for one of `SPLITS`.

    Args:
        constants: the constants that are fitted to all points.
    """

    def __init__(self, points: Sequence[Point], constants: Calibration, split: LeftOut):
        self.points, self.split = points, split
        self.groups = assign_groups(points, split)
        self.errors = leave_out(points, constants, self.groups)
        keys = [accuracy_key(p.run) for p in points]
        software, size, special = (np.array(each) for each in zip(*keys, strict=True))
        self.keys, self.software, self.size, self.special = keys, software, size, special
        self.levels = [self._calibrate(row) for row in range(len(get_args(Kind)))]

    def _calibrate(self, row: int) -> float:
        """Return the quantile of errors that is half of an interval."""
        if self.counts(row) < 2:
            return INSIDE

        def held(level: float) -> float:
            inside, means = self._hold(row, level)
            return float(inside.mean() + means.mean()) / 2

        return next((level for level in np.arange(INSIDE, 1, 0.0005).tolist() if held(level) >= INSIDE), 1.0)

    def select(self, row: int, of: Class, without: int = -1) -> np.ndarray:
        """Return the measurements of a class, but for one group; none if they are too few for errors of their own.

        Args:
            row: of `leave_out`: 0 for times, 1 for memory.
        """
        software, size, special = of
        mine = ~np.isnan(self.errors[row]) & (self.groups != without)
        for wanted, own in ((software or None, self.software), (size or None, self.size), (special, self.special)):
            if wanted is not None:
                mine &= own == wanted
        found = np.flatnonzero(mine)
        enough = len(found) >= FEW and len(set(self.groups[found].tolist())) >= GROUPS
        return found if enough or of == ("", "", None) else found[:0]

    def width(self, row: int, of: Class, without: int = -1, level: float | None = None) -> float:
        """Return half of the 80 % interval of a class's logarithm; NaN if it has too few measurements."""
        found, level = self.select(row, of, without), level or self.levels[row]
        return self._quantile(np.abs(self.errors[row][found]), found, level) if len(found) else np.nan

    def _quantile(self, values: np.ndarray, found: np.ndarray, part: float) -> float:
        """Return a quantile of values of some points; if software is left out, each counts as much as any other."""
        weights = np.ones(len(found))
        if self.split == "software":
            weights /= np.bincount(self.groups[found])[self.groups[found]]
        order = np.argsort(values)
        upto = np.cumsum(weights[order]) - weights[order] / 2
        return float(np.interp(part * weights.sum(), upto, values[order]))

    def _errors(self, row: int, found: np.ndarray) -> tuple[float, float, float]:
        """Return the median and the ninth decile of the absolute relative error, and the median of the signed one."""
        relative = np.exp(self.errors[row][found]) - 1
        several = ((np.abs(relative), 0.5), (np.abs(relative), 0.9), (relative, 0.5))
        median, ninetieth, bias = (self._quantile(values, found, part) for values, part in several)
        return median, ninetieth, bias

    def counts(self, row: int) -> int:
        """Return the number of groups with measurements."""
        return len(set(self.groups[~np.isnan(self.errors[row])].tolist()))

    def coverage(self, row: int) -> Coverage:
        """Return the errors of two groups or more, and how many of them intervals hold whose width is of all others."""
        inside, means = self._hold(row, self.levels[row])
        known = np.flatnonzero(~np.isnan(self.errors[row]))
        errors = Errors(len(known), *self._errors(row, known), float(inside.mean()))
        return Coverage(errors, len(means), float(means.mean()))

    def _hold(self, row: int, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each measurement is inside its interval of all other groups, and each group's mean of this."""
        known, widths = np.flatnonzero(~np.isnan(self.errors[row])), dict[tuple, float]()
        inside = np.zeros(len(known))
        for i, point in enumerate(known.tolist()):
            (software, size, special), group = self.keys[point], int(self.groups[point])
            software = "" if self.split == "software" else software
            key = software, size, special, group
            if key not in widths:
                classes = broader_classes(software, size, special=special)
                every = (self.width(row, of, group, level) for of in classes)
                widths[key] = next(width for width in every if not np.isnan(width))
            inside[i] = abs(self.errors[row][point]) <= widths[key]
        groups = self.groups[known]
        return inside, np.array([inside[groups == group].mean() for group in set(groups.tolist())])

    def entries(self, row: int) -> Iterator[dict[str, Any]]:
        """Yield the entries of `accuracy.toml`."""
        names = [""] if self.split == "software" else ["", *sorted(set(self.software.tolist()))]
        kinds = [("", None), *((size, special) for special in (False, True) for size in ("", *SIZES))]
        for software in names:
            for size, special in kinds:
                found = self.select(row, (software, size, special))
                if not len(found) or (size and not software):
                    continue
                entry: dict[str, Any] = {"left_out": self.split, "software": software, "size": size}
                entry |= {} if special is None else {"special": special}
                entry |= {"rows": len(found), "groups": len(set(self.groups[found].tolist()))}
                numbers = *self._errors(row, found), self.width(row, (software, size, special))
                heads = ("median", "ninetieth", "bias", "width")
                yield entry | {head: float(f"{value:.3g}") for head, value in zip(heads, numbers, strict=True)}


def hold_out(points: Sequence[Point], constants: Calibration) -> list[HeldOut]:
    """Return the errors of points that a fit has not seen, for each of `SPLITS`."""
    return [HeldOut(points, constants, split) for split in get_args(LeftOut)]


def accuracy_text(held_out: Sequence[HeldOut]) -> str:
    """Return `accuracy.toml`: errors, a line for each class of runs, and the clusters that were measured."""
    lines = []
    for row, kind in enumerate(get_args(Kind)):
        entries = (entry for each in held_out for entry in each.entries(row))
        lines += [f"{kind} = [", *(f"    {_inline(entry)}," for entry in entries), "]", ""]
    for row, kind in enumerate(get_args(Kind)):
        known = ~np.isnan(held_out[0].errors[row])
        measured = [held_out[0].points[i].run for i in np.flatnonzero(known).tolist()]
        pairs = {(run.software.family, cluster_kind(run)) for run in measured}
        clusters = {name: sorted(c for s, c in pairs if s == name) for name in sorted({s for s, _ in pairs})}
        lines += [f"[clusters.{kind}]", *(f"{name} = {json.dumps(found)}" for name, found in clusters.items()), ""]
    return "\n".join(lines)


def _inline(table: Mapping[str, Any]) -> str:
    """Return an inline table of TOML; its strings and numbers are written as in JSON."""
    return "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in table.items()) + "}"
