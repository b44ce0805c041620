"""How far estimates are from measurements, by source, quality and number of accelerators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.labs.validate.fit import estimated
from shoal.labs.validate.rows import Point
from shoal.labs.validate.unseen import intervals
from shoal.planning.cost.batched_runs import Runs
from shoal.spec.catalog.calibration import Calibration

GRADED = "AM"  # qualities that the totals count; M has memory alone
SMALL = 128  # accelerators, up to which published times are taken apart from those above
SAME = (  # of runs that differ in layout alone
    "layers", "hidden", "heads", "vocab", "s", "software", "attention", "fused_norm", "fp8", "peak", "hbm", "memory",
    "inside", "nic", "per_node", "network",
)  # fmt: skip
NEAR = 1.05  # of the best measured time: a prediction of the best that is as good


@dataclass(frozen=True)
class Errors:
    """Of estimates over measurements, less one.

    Attributes:
        rows: how many.
        median, ninetieth: of the absolute error.
        bias: median of the signed one.
        inside: part of the measurements inside the 80 % interval.
    """

    rows: int
    median: float = float("nan")
    ninetieth: float = float("nan")
    bias: float = float("nan")
    inside: float = float("nan")

    @classmethod
    def of(cls, estimate: np.ndarray, measured: np.ndarray, spread: np.ndarray) -> Errors:
        """Of those that were measured: where ``measured`` is a number."""
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
        """What a table says of them, in the order of the attributes; nothing where there are none."""
        if not self.rows:
            return [""] * 5
        parts = f"{100 * self.median:.1f} %", f"{100 * self.ninetieth:.1f} %", f"{100 * self.bias:+.1f} %"
        return [f"{self.rows:,}", *parts, f"{100 * self.inside:.0f} %"]


@dataclass(frozen=True)
class Scored:
    """Points, and what is estimated of them.

    Attributes:
        seconds, bytes: estimated.
        part: of the accelerator's memory that is needed; above 1 it runs out.
        time_spread, memory_spread: half of the 80 % intervals, of the logarithm.
    """

    points: Sequence[Point]
    seconds: np.ndarray
    bytes: np.ndarray
    part: np.ndarray
    time_spread: np.ndarray
    memory_spread: np.ndarray

    @cached_property
    def measured_seconds(self) -> np.ndarray:
        """Not a number where none was published."""
        return np.array([p.seconds or np.nan for p in self.points])

    @cached_property
    def measured_bytes(self) -> np.ndarray:
        """Not a number where none was published."""
        return np.array([p.bytes or np.nan for p in self.points])

    def where(self, keep: Callable[[Point], bool]) -> Scored:
        """Some of them."""
        chosen = np.array([keep(p) for p in self.points], bool)
        arrays = (self.seconds, self.bytes, self.part, self.time_spread, self.memory_spread)
        return Scored([p for p, k in zip(self.points, chosen, strict=True) if k], *(a[chosen] for a in arrays))

    @property
    def time(self) -> Errors:
        """Of step times."""
        return Errors.of(self.seconds, self.measured_seconds, self.time_spread)

    @property
    def memory(self) -> Errors:
        """Of memory."""
        return Errors.of(self.bytes, self.measured_bytes, self.memory_spread)

    @property
    def out_of_memory(self) -> tuple[int, float, float]:
        """Runs that did not fit; the part of predicted ones that did not, and of those that did not, the predicted."""
        oom, said = np.array([p.oom for p in self.points], bool), self.part > 1
        right = int((oom & said).sum())
        return int(oom.sum()), right / max(1, int(said.sum())), right / max(1, int(oom.sum()))

    @property
    def best(self) -> tuple[int, int]:
        """Families of layouts whose predicted best is within 5 % of the measured best; and all families."""
        families: dict[tuple, list[int]] = defaultdict(list)
        for i, p in enumerate(self.points):
            if p.seconds:
                batch = p.run["b"] * p.run["microbatches"] * p.run["dp"]
                families[p.file, p.model, p.gpus, batch, *(p.run[name] for name in SAME)].append(i)
        several = [np.array(found) for found in families.values() if len(found) >= 3]
        times = self.measured_seconds
        good = sum(times[f[np.argmin(self.seconds[f])]] <= NEAR * times[f].min() for f in several)
        return int(good), len(several)


def score(points: Sequence[Point], constants: Calibration) -> Scored:
    """Estimate every point."""
    runs = Runs.of([p.run for p in points])
    seconds, size, part = estimated(runs, points, constants)
    return Scored(points, seconds, size, part, *intervals(runs, constants))


def by(scored: Scored, key: Callable[[Point], str]) -> dict[str, Scored]:
    """Apart by what a function says of each point."""
    def only(name: str) -> Scored:
        return scored.where(lambda p: key(p) == name)

    return {name: only(name) for name in sorted({key(p) for p in scored.points})}


def totals(scored: Scored) -> dict[str, Scored]:
    """The rows by which a cost model is judged."""
    graded = scored.where(lambda p: p.quality in GRADED)
    return {
        f"quality A, at most {SMALL} accelerators": graded.where(lambda p: p.gpus <= SMALL),
        f"quality A, more than {SMALL}": graded.where(lambda p: p.gpus > SMALL),
        "quality A and M, all": graded,
    }
