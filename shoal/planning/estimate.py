"""A step of training, priced before it is run: time by what takes it, memory of every pipeline rank by what holds it.

Its stages are priced one by one (`shoal.planning.cost.time.stage`); the pipeline is the schedule's own program,
simulated.
"""

from __future__ import annotations

from functools import cached_property
from math import exp, log2

import numpy as np

from shoal.pipeline.from_layout import build_layout_program
from shoal.pipeline.simulator import ActionTimes, Timeline, simulate
from shoal.pipeline.simulator.columns import Columns, before_backwards, of_program
from shoal.planning.cost.flops import hardware_flops, model_flops
from shoal.planning.cost.memory.stage import PeakMemory, alive_at
from shoal.planning.cost.parameters import stage_parts
from shoal.planning.cost.time.engine_layer import spread
from shoal.planning.cost.time.stage import ATTENTION_BACKWARD, StagePrices, StageTimes
from shoal.planning.run import EstimatedRun


class Estimate(StagePrices):
    """A run's step, priced.

    Args:
        run: whose layout and schedule have been checked, and fill the cluster.
        columns: of the layout's program, where they are there already; gathers of parameters that need none may stand
            in them.
        known: as `StagePrices` has it.
    """

    def __init__(self, run: EstimatedRun, columns: Columns | None = None, known: dict | None = None):
        super().__init__(run, known)
        self.columns = columns or of_program(build_layout_program(run.layout, run.microbatches, transfers=False))
        self.program = self.columns.program
        self.parts = stage_parts(run.shape, self.program)

    # ---- time ----------------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[StageTimes]:
        """The times of every stage."""
        return [self.stage_of(part) for part in self.parts]

    @cached_property
    def times(self) -> np.ndarray:
        """[3, stages] seconds of a forward and of both halves of a backward."""
        return np.array([stage.passes for stage in self.stages]).T

    @cached_property
    def finishing(self) -> np.ndarray:
        """[stages, 3] seconds: reduction, optimizer, gather."""
        return np.array([self.finish_of(part) for part in self.parts])

    @cached_property
    def step_seconds(self) -> float:
        """Of one step: as it is played, or as long as a host launches it ahead of its accelerator."""
        return max(self._played_seconds, self._launched)

    @cached_property
    def _launched(self) -> float:
        """Seconds that the slowest host needs for a step at least."""
        each = [
            len(self.program.microbatches_of(stage)) * times.launched + float(finish.sum())
            for stage, (times, finish) in enumerate(zip(self.stages, self.finishing, strict=True))
        ]
        return max(sum(each[stage] for stage in self.program.stages_of(rank)) for rank in range(self.program.ranks))

    @cached_property
    def _played_seconds(self) -> float:
        return self._seconds(self.timeline)

    def _seconds(self, timeline: Timeline) -> float:
        """Of a step as it is played, each rank on a core of its own or all on those that there are.

        On shared cores every moment lasts as much longer as more ranks compute in it than there are cores: who waits
        leaves them to others. And whoever meets others in every layer or at the end waits for the last of them, which
        is late by chance (`stragglers`, which `shoal calibrate` measures).
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
        """Seconds of all that the program does, but for messages (`link`). The slowest optimizer is everyone's."""
        reduce, update, gather = self.finishing.T
        step = max(update[self.program.stages_of(rank)].sum() for rank in range(self.program.ranks))
        forward, inputs, weights = self.times
        return ActionTimes(forward, inputs, weights, reduce=reduce, step=step, gather=gather)

    @cached_property
    def timeline(self) -> Timeline:
        """The program, played."""
        return simulate(self.columns, self.durations, self.link)

    # ---- what it is made of --------------------------------------------------------------------------------------

    @property
    def interval(self) -> tuple[float, float]:
        """Between what the time of a step is in four of five cases: as far as estimates of other software were off."""
        factor = exp(spread(self.run.cluster))
        return self.step_seconds / factor, self.step_seconds * factor

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step on the busiest pipeline rank, by what takes them; they add up to the step.

        Of its waiting, messages are what the step would be shorter by without them; the rest is the bubble. Launches
        are what an infinitely fast host would save.
        """
        busiest = int(self.timeline.busy[0].argmax())
        stages = self.program.stages_of(busiest)
        of: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        for stage in stages:
            times, count = self.stages[stage], len(self.program.microbatches_of(stage))
            of["matrix products"] += count * 3 * times.matrices
            of["attention"] += count * (1 + ATTENTION_BACKWARD) * times.attention
            of["element by element"] += count * (3 * times.elements + times.adding)
            of["recomputation"] += count * times.recompute
            of["tensor parallelism"] += count * (times.tensor + times.tensor_backward)
            of["expert parallelism"] += count * 2 * times.experts
            of["context parallelism"] += count * (times.context + times.context_backward)
            of["launches"] += count * (times.launches + times.launches_backward)
            of["gathers and reductions"] += count * (times.gather_forward + times.gather_backward)
            reduce, update, gather = self.finishing[stage].tolist()
            of["gathers and reductions"] += reduce + gather
            of["optimizer"] += update
        waiting = max(0.0, self._played_seconds - sum(of.values()))
        if self.program.ranks > 1:
            longer = self._played_seconds - self._seconds(simulate(self.columns, self.durations))
            of["messages between stages"] = min(max(0.0, longer), waiting)
        of["bubble"] = waiting - of["messages between stages"]
        of["launches"] += self.step_seconds - self._played_seconds
        return of

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs over the dense peak of all accelerators and the step's time."""
        done = model_flops(self.run.shape, self.run.sequence_length, self.run.tokens)
        return done / (self.step_seconds * self.peak * self.run.layout.world_size)

    @cached_property
    def hfu(self) -> float:
        """The same of hardware FLOPs."""
        layout = self.run.layout
        done = hardware_flops(self.run.shape, self.run.sequence_length, layout.recompute, self.run.tokens)
        return done / (self.step_seconds * self.peak * layout.world_size)

    # ---- memory --------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> list[PeakMemory]:
        """Of every pipeline rank; of its tensor-parallel and data-parallel ranks the first."""
        whole, half = ([float(of(part)) for part in self.parts] for of in (self.kept_of, self.between_of))
        before = before_backwards(self.columns, whole, half, self.message).T.tolist()
        versions = self.timeline.weight_versions.tolist()
        held = [self.program.stages_of(rank) for rank in range(self.program.ranks)]
        return [
            self.memory_of([self.parts[s] for s in stages], [alive_at(before[s]) for s in stages], copies)
            for stages, copies in zip(held, versions, strict=True)
        ]

    @property
    def fullest(self) -> PeakMemory:
        """Of the pipeline rank that needs most."""
        return max(self.memory, key=lambda memory: memory.reserved)

    @property
    def memory_interval(self) -> tuple[float, float]:
        """Between what the fullest rank's reserved bytes are in four of five cases."""
        factor = exp(spread(self.run.cluster, "memory"))
        return self.fullest.reserved / factor, self.fullest.reserved * factor

    @property
    def fits(self) -> bool:
        """Whether every rank's memory is enough."""
        return bool(self.fullest.reserved <= self.capacity)


NAMES = (
    "matrix products", "attention", "element by element", "recomputation", "tensor parallelism",
    "context parallelism", "expert parallelism", "gathers and reductions", "optimizer", "launches",
    "messages between stages", "bubble",
)  # fmt: skip
