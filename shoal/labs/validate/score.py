"""Errors of estimates, by source, quality and number of accelerators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from shoal.labs.validate.fit import estimate_points
from shoal.labs.validate.rows import Point, stack
from shoal.planning.estimate import run_accuracy
from shoal.planning.software_estimate import SoftwareEstimate
from shoal.spec.catalog.accuracy import Kind
from shoal.spec.catalog.calibration import Calibration

GRADED = "AM"  # qualities in the totals; M has memory only
SMALL = 128  # accelerators that separate the totals of small and large runs
NEAR = 1.05  # times the best measured time: a good prediction of the best


@dataclass(frozen=True)
class Errors:
    """Relative errors of estimates."""

    rows: int  # number of measurements
    # median, ninetieth: quantiles of the absolute error
    median: float = float("nan")
    ninetieth: float = float("nan")
    bias: float = float("nan")  # median of the signed error
    inside: float = float("nan")  # fraction of the measurements inside the 80 % interval

    @classmethod
    def measure(cls, estimate: np.ndarray, measured: np.ndarray, spread: np.ndarray) -> Errors:
        """Compute the errors where ``measured`` is not NaN."""
        known = ~np.isnan(measured)
        if not known.any():
            return cls(0)
        error = estimate[known] / measured[known] - 1
        inside = np.abs(np.log(estimate[known] / measured[known])) <= spread[known]
        size = np.abs(error)
        return cls(
            int(known.sum()),
            *(float(v) for v in (np.median(size), np.quantile(size, 0.9), np.median(error), inside.mean())),
        )

    def cells(self) -> list[str]:
        """Return the attributes as cells of a table, empty without measurements."""
        if not self.rows:
            return [""] * 5
        parts = f"{100 * self.median:.1f} %", f"{100 * self.ninetieth:.1f} %", f"{100 * self.bias:+.1f} %"
        return [f"{self.rows:,}", *parts, f"{100 * self.inside:.0f} %"]


@dataclass(frozen=True)
class Scored:
    """Points with their estimates."""

    points: Sequence[Point]
    # seconds, bytes: estimates
    seconds: np.ndarray
    bytes: np.ndarray
    part: np.ndarray  # needed fraction of the accelerator's memory; above 1 the run does not fit
    # time_spread, memory_spread: half of the 80 % intervals, of the logarithm
    time_spread: np.ndarray
    memory_spread: np.ndarray

    @cached_property
    def measured_seconds(self) -> np.ndarray:
        """NaN where not published."""
        return np.array([p.seconds or np.nan for p in self.points])

    @cached_property
    def measured_bytes(self) -> np.ndarray:
        """NaN where not published."""
        return np.array([p.bytes or np.nan for p in self.points])

    def where(self, keep: Callable[[Point], bool]) -> Scored:
        """Select points."""
        chosen = np.array([keep(p) for p in self.points], bool)
        arrays = (self.seconds, self.bytes, self.part, self.time_spread, self.memory_spread)
        return Scored([p for p, k in zip(self.points, chosen, strict=True) if k], *(a[chosen] for a in arrays))

    @property
    def time(self) -> Errors:
        """Errors of step times."""
        return Errors.measure(self.seconds, self.measured_seconds, self.time_spread)

    @property
    def memory(self) -> Errors:
        """Errors of memory."""
        return Errors.measure(self.bytes, self.measured_bytes, self.memory_spread)

    @property
    def out_of_memory(self) -> tuple[int, float, float]:
        """Number of runs that did not fit, and precision and recall of predicting it."""
        oom, predicted = np.array([p.oom for p in self.points], bool), self.part > 1
        right = int((oom & predicted).sum())
        return int(oom.sum()), right / max(1, int(predicted.sum())), right / max(1, int(oom.sum()))

    @cached_property
    def families(self) -> list[np.ndarray]:
        """Points that differ only in layout, where at least three have a time: their indices."""
        families: dict[tuple, list[int]] = defaultdict(list)
        for i, p in enumerate(self.points):
            if p.seconds:
                run, made = p.run, p.run.cluster
                kernels = run.software.name, run.software.attention, run.software.fused_norm
                shape = run.shape.model_dump_json(exclude={"ffn"})
                nic = made.nic and (made.nic.name, made.nic.bandwidth)
                families[
                    p.file, p.model, p.gpus, run.global_batch, shape, run.sequence_length, run.precision, kernels,
                    made.accelerator.name, made.memory_bytes, made.per_node, nic,
                ].append(i)
        return [np.array(found) for found in families.values() if len(found) >= 3]

    @property
    def best(self) -> tuple[int, int]:
        """Number of families whose predicted best is within 5 % of the best, and of all families."""
        times = self.measured_seconds
        good = sum(times[f[np.argmin(self.seconds[f])]] <= NEAR * times[f].min() for f in self.families)
        return int(good), len(self.families)

    @property
    def correlation(self) -> float:
        """Spearman's correlation of measured and estimated times in the median family; NaN without families."""
        from scipy.stats import spearmanr  # which takes a second to import

        found = [spearmanr(self.measured_seconds[f], self.seconds[f]).statistic for f in self.families]
        return float(np.median(found)) if found else np.nan

    def ratio_errors(self, *, across: bool = False) -> tuple[float, float]:
        """Errors of the ratio of two times of a family: median and 80 % quantile of its pairs, in the median family.

        Args:
            across: only pairs of which one has tensor parallelism across nodes.
        """
        logs, found = np.log(self.seconds / self.measured_seconds), []
        far = np.array([p.run.cluster.per_node % p.run.layout.tp > 0 for p in self.points])
        for family in self.families:
            first, second = (family[side] for side in np.triu_indices(len(family), 1))
            wanted = (far[first] != far[second]) | (not across)
            if wanted.any():
                found.append(np.quantile(np.abs(logs[first] - logs[second])[wanted], (0.5, 0.8)))
        median, most = np.expm1(np.median(found, axis=0)) if found else (np.nan, np.nan)
        return float(median), float(most)


def score(points: Sequence[Point], constants: Calibration | None = None) -> Scored:
    """Estimate every point as `shoal.estimate` does, or all together by the same closed forms with other constants."""
    runs = stack(points)
    if constants is not None:
        seconds, size, part = estimate_points(runs, points, constants)
    else:
        found = []
        for p in points:
            said = SoftwareEstimate(p.run)  # publications are of other software
            counted = float(said.footprint.counted(np.array([p.memory_kind]))[0])
            found.append((said.step_seconds, counted, said.fullest.reserved / said.capacity))
        seconds, size, part = np.array(found).T
    widths = (np.array([run_accuracy(kind, p.run).width for p in points]) for kind in get_args(Kind))
    return Scored(points, seconds, size, part, *widths)


def group_by(scored: Scored, key: Callable[[Point], str]) -> dict[str, Scored]:
    """Group points by a key."""
    names = sorted({key(p) for p in scored.points})
    return {name: scored.where(lambda p, name=name: key(p) == name) for name in names}  # type: ignore[misc]


def totals(scored: Scored) -> dict[str, Scored]:
    """Return the groups by which a cost model is judged."""
    graded = scored.where(lambda p: p.quality in GRADED)
    return {
        f"quality A, at most {SMALL} accelerators": graded.where(lambda p: p.gpus <= SMALL),
        f"quality A, more than {SMALL}": graded.where(lambda p: p.gpus > SMALL),
        "quality A and M, all": graded,
        "all qualities": scored,
    }
