"""Cost estimate of a training step: time by cause, and memory of every pipeline rank by use.

The stages are priced one by one (`shoal.planning.cost.time.stage`); the pipeline is simulated with the schedule's own
program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from math import exp, log2

import numpy as np

from shoal.base.units import show_bytes, show_seconds
from shoal.pipeline.from_layout import build_layout_program
from shoal.pipeline.simulator import ActionTimes, Timeline, simulate
from shoal.pipeline.simulator.columns import Columns, build_columns, live_before_backwards
from shoal.planning.cost.batched_runs import network_name
from shoal.planning.cost.flops import hardware_flops
from shoal.planning.cost.memory.stage import PeakMemory, alive_at
from shoal.planning.cost.parameters import stage_parts
from shoal.planning.cost.time.stage import ATTENTION_BACKWARD, StagePrices, StageTimes, paired_passes
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog.accuracy import Accuracy, Kind, find_accuracy, size_name


def cluster_kind(run: EstimatedRun) -> str:
    """Return what distinguishes clusters in `accuracy.toml`: the accelerator, and the network between nodes."""
    name = run.cluster.accelerator.name
    return f"{name}, {network_name(run.cluster)}" if run.cluster.nodes > 1 else name


def accuracy_key(run: EstimatedRun) -> tuple[str, str, bool]:
    """Return what distinguishes the accuracy of estimates: software, size, and whether the run has rarer parts."""
    special = run.shape.experts is not None or run.quantised or run.layout.cp > 1
    return run.software.family, size_name(run.cluster.nodes, run.cluster.size), special


def run_accuracy(kind: Kind, run: EstimatedRun) -> Accuracy:
    """Return the errors of estimates of such runs on held-out measurements."""
    software, size, special = accuracy_key(run)
    return find_accuracy(kind, software, size, cluster_kind(run), special=special)


class StepEstimate(ABC):
    """Estimated time and memory of a run's step, by any software.

    Attributes:
        run: the run.
        capacity: bytes of a device that a process can use.
    """

    run: EstimatedRun
    capacity: float

    def __repr__(self) -> str:
        run, held = self.run, f"{show_bytes(self.fullest.reserved)} of {show_bytes(self.capacity)}"
        return (f"<{type(self).__name__}: {run.layout.describe()} on {run.cluster.name}: "
                f"{show_seconds(self.step_seconds)} a step, {100 * self.mfu:.1f} % MFU, {held}>")

    @property
    @abstractmethod
    def step_seconds(self) -> float:
        """Seconds of one step."""

    @property
    @abstractmethod
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step on the busiest pipeline rank by cause (`NAMES`); they add up to the step time."""

    @property
    @abstractmethod
    def memory(self) -> list[PeakMemory]:
        """Peak memory of every pipeline rank."""

    @property
    def interval(self) -> tuple[float, float]:
        """80 % interval of the step time, from the errors of this software's estimates, or of other software's."""
        factor = exp(self.accuracy("time").width)
        return self.step_seconds / factor, self.step_seconds * factor

    def accuracy(self, kind: Kind = "time") -> Accuracy:
        """Return the errors of such estimates on held-out measurements."""
        return run_accuracy(kind, self.run)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: model FLOPs over the dense peak of all accelerators and the step time.

        Accelerators that share cores have their part of one peak, as in a training's records.
        """
        return self._utilisation(self.run.tokens * self.run.shape.flops_per_token(self.run.sequence_length))

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: like `mfu`, with hardware FLOPs."""
        run = self.run
        return self._utilisation(hardware_flops(run.shape, run.sequence_length, run.layout.recompute, run.tokens))

    def _utilisation(self, done: float) -> float:
        run, cluster = self.run, self.run.cluster
        peak = cluster.accelerator.dense_flops(run.products) / cluster.turns
        return done / (self.step_seconds * peak * run.layout.world_size)

    @property
    def fullest(self) -> PeakMemory:
        """Memory of the pipeline rank that needs most."""
        return max(self.memory, key=lambda memory: memory.reserved)

    @property
    def memory_interval(self) -> tuple[float, float]:
        """80 % interval of the fullest rank's reserved bytes."""
        factor = exp(self.accuracy("memory").width)
        return self.fullest.reserved / factor, self.fullest.reserved * factor

    @property
    def fits(self) -> bool:
        """True if every rank fits in its device's memory."""
        return bool(self.fullest.reserved <= self.capacity)

    @property
    def may_fit(self) -> bool:
        """True if every rank fits at the lower end of the 80 % interval of its memory."""
        return bool(self.memory_interval[0] <= self.capacity)


class Estimate(StagePrices, StepEstimate):
    """Estimated time and memory of a run's step by shoal's own engine.

    Args:
        run: a run with a checked layout and schedule that fills the cluster.
        columns: columns of the layout's program, if already built; they may contain superfluous parameter gathers.
        known: see `StagePrices`.
    """

    def __init__(self, run: EstimatedRun, columns: Columns | None = None, known: dict | None = None):
        super().__init__(run, known)
        self.columns = columns or build_columns(build_layout_program(run.layout, run.microbatches, transfers=False))
        self.program = self.columns.program
        self.parts = stage_parts(run.shape, self.program)

    # ---- time ----------------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[StageTimes]:
        return [self.stage_times(part) for part in self.parts]

    @cached_property
    def times(self) -> np.ndarray:
        """[3, stages] Seconds of a forward and of both halves of a backward."""
        return np.array([stage.passes for stage in self.stages]).T

    @cached_property
    def finishing(self) -> np.ndarray:
        """[stages, 3] Seconds of reduction, optimizer and gather."""
        return np.array([self.finish_times(part) for part in self.parts])

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of one step: the simulated time, or the host's launch time if that is longer."""
        return max(self._played_seconds, self._launched)

    @cached_property
    def _launched(self) -> float:
        """Return the minimum seconds in which the slowest host launches a step."""
        each = [
            len(self.program.stage_microbatches(stage)) * times.launched + float(finish.sum())
            for stage, (times, finish) in enumerate(zip(self.stages, self.finishing, strict=True))
        ]
        return max(sum(each[stage] for stage in self.program.rank_stages(rank)) for rank in range(self.program.ranks))

    @cached_property
    def _played_seconds(self) -> float:
        return self._seconds(self.timeline)

    def _seconds(self, timeline: Timeline) -> float:
        """Return the seconds of a simulated step, with one core per rank or all ranks on the available cores.

        On shared cores, each interval is stretched by the ratio of computing ranks to cores; waiting ranks free their
        cores. Ranks that synchronise in every layer or at the end wait for the last one, which is randomly late
        (`stragglers`, measured by `shoal calibrate`).
        """
        cluster, layout = self.run.cluster, self.run.layout
        if cluster.at_once is None:
            return timeline.step_time
        own = timeline.end[0] > timeline.start[0]
        own[timeline.pairs] = False
        times = np.concatenate([timeline.start[0][own], timeline.end[0][own]])
        order = np.argsort(times, kind="stable")
        computing = np.cumsum(np.repeat([1, -1], len(times) // 2)[order])[:-1]
        crowded = np.maximum(1.0, computing * cluster.turns / timeline.ranks)
        late = 1 + self.constants["stragglers"] * log2(layout.world_size // layout.pp)
        return late * (float(times.min()) + float(np.diff(times[order]) @ crowded))

    @cached_property
    def durations(self) -> ActionTimes:
        """Seconds of every action except messages (`link`); all ranks have the slowest rank's optimizer time."""
        reduce, update, gather = self.finishing.T
        step = max(update[self.program.rank_stages(rank)].sum() for rank in range(self.program.ranks))
        forward, inputs, weights = self.times
        return ActionTimes(forward, inputs, weights, pair=self.paired, reduce=reduce, step=step, gather=gather)

    @cached_property
    def paired(self) -> np.ndarray | None:
        """[stages] Seconds of a forward and its rank's other backward, if they hide each other's exchanges of rows."""
        if not (self.hides_rows and self.run.layout.overlaps_rows(True)):
            return None
        hidden = np.array([(stage.hidden, stage.hidden_backward) for stage in self.stages]).T
        return paired_passes(self.times, hidden, self.program.stage_rank)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.columns, self.durations, self.link)

    # ---- breakdown -----------------------------------------------------------------------------------------------

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step on the busiest pipeline rank by cause; they add up to the step time.

        Within the waiting time, "messages" is how much shorter the step would be without them; the rest is the bubble.
        Launches are the time that an infinitely fast host would save.
        """
        busiest = int(self.timeline.busy[0].argmax())
        stages = self.program.rank_stages(busiest)
        of: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        for stage in stages:
            times, count = self.stages[stage], len(self.program.stage_microbatches(stage))
            of["matrix products"] += count * 3 * times.matrices
            of["attention"] += count * (1 + ATTENTION_BACKWARD) * times.attention
            of["element by element"] += count * (3 * times.elements + times.adding)
            of["recomputation"] += count * times.recompute
            of["tensor parallelism"] += count * (times.tensor + times.tensor_backward + times.tensor_weight)
            of["expert parallelism"] += count * 2 * times.experts
            of["context parallelism"] += count * (times.context + times.context_backward)
            of["launches"] += count * (times.launches + times.launches_backward)
            of["gathers and reductions"] += count * (times.gather_forward + times.gather_backward)
            reduce, update, gather = self.finishing[stage].tolist()
            of["gathers and reductions"] += reduce + gather
            of["optimizer"] += update
        of["expert parallelism"] -= self._hidden_rows(busiest)
        waiting = max(0.0, self._played_seconds - sum(of.values()))
        if self.program.ranks > 1:
            longer = self._played_seconds - self._seconds(simulate(self.columns, self.durations))
            of["messages between stages"] = min(max(0.0, longer), waiting)
        bubble = waiting - of["messages between stages"]
        of["bubble"] = bubble if bubble > ROUNDING * self._played_seconds else 0.0
        of["launches"] += self.step_seconds - self._played_seconds
        return of

    def _hidden_rows(self, rank: int) -> float:
        """Return the seconds of a rank's exchanges of rows that paired micro-batches hide."""
        pairs = self.timeline.pairs
        pairs, stage = pairs[self.columns.rank[pairs] == rank], self.columns.stage
        if self.paired is None or not len(pairs):
            return 0.0
        alone = self.times[0][stage[pairs]] + self.times[1:].sum(axis=0)[stage[pairs + 1]]
        return float((alone - self.paired[stage[pairs]]).sum())

    # ---- memory --------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> list[PeakMemory]:
        """Peak memory of every pipeline rank, for the first of its tensor-parallel and data-parallel ranks."""
        kept = [float(self.activation_bytes(part)) for part in self.parts]
        half = [float(self.split_backward_bytes(part)) for part in self.parts]
        before = live_before_backwards(self.columns, kept, half, self.message).T.tolist()
        versions = self.timeline.weight_versions.tolist()
        held = [self.program.rank_stages(rank) for rank in range(self.program.ranks)]
        return [
            self.peak_memory([self.parts[s] for s in stages], [alive_at(before[s]) for s in stages], copies)
            for stages, copies in zip(held, versions, strict=True)
        ]


ROUNDING = 1e-9  # relative to a step: shorter parts are errors of rounding
NAMES = (
    "matrix products", "attention", "element by element", "recomputation", "tensor parallelism",
    "context parallelism", "expert parallelism", "gathers and reductions", "optimizer", "allocator", "launches",
    "messages between stages", "bubble",
)  # fmt: skip
