"""Cost estimate of a step by other software than shoal: closed forms with what that software does."""

from __future__ import annotations

from functools import cached_property

from shoal.planning.cost.batched_runs import Runs, describe_row
from shoal.planning.cost.memory.published_software import Footprint, footprint
from shoal.planning.cost.memory.stage import PeakMemory
from shoal.planning.cost.time.kernels import Kernels
from shoal.planning.cost.time.step import StepTimes, explain_step, step
from shoal.planning.estimate import NAMES, Estimate, StepEstimate
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog.calibration import cluster_calibration


class SoftwareEstimate(StepEstimate):
    """Estimated time and memory of a run's step by another software.

    `shoal validate` scores these estimates against published measurements.

    Args:
        run: a run that `check_software` accepts.
    """

    def __init__(self, run: EstimatedRun):
        self.run, self.calibration = run, cluster_calibration(run.cluster, run.software.name)
        self.runs = Runs.from_rows([describe_row(run)])

    @cached_property
    def times(self) -> StepTimes:
        return step(self.runs, self.calibration)

    @cached_property
    def footprint(self) -> Footprint:
        """Memory as publications count it: allocated, reserved, of the process."""
        return footprint(self.runs, self.calibration)

    @property
    def step_seconds(self) -> float:
        return float(self.times.seconds[0])

    @cached_property
    def breakdown(self) -> dict[str, float]:
        found = explain_step(Kernels(self.runs, self.calibration), self.times)
        return {name: float(found[name][0]) if name in found else 0.0 for name in NAMES}

    @cached_property
    def capacity(self) -> float:  # type: ignore[override]
        return float(self.footprint.capacity[0])

    @cached_property
    def memory(self) -> list[PeakMemory]:
        outside, (first, second, last) = float(self.footprint.beside[0]), (
            {name: float(size[0]) for name, size in vars(rank).items()} for rank in self.footprint.ranks
        )
        between = [second] * (self.run.layout.pp - 2)
        return [
            PeakMemory(
                rank["parameters"], rank["gradients"], rank["optimizer"], rank["activations"], rank["gathered"],
                rank["working"] + rank["updating"], 0.0, rank["holes"] + rank["split_holes"] + rank["base"] + outside,
            )
            for rank in ([first, *between, last] if self.run.layout.pp > 1 else [first])
        ]  # fmt: skip


def estimate_run(run: EstimatedRun, known: dict | None = None) -> StepEstimate:
    """Estimate a checked run, by shoal's engine or another software.

    Args:
        known: cache of shoal's stages, see `StagePrices`.
    """
    return Estimate(run, known=known) if run.software.name == "shoal" else SoftwareEstimate(run)
