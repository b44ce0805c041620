"""A step of training, priced before it is run: time by what takes it, memory of every pipeline rank by what holds it.

Its stages are priced one by one (`shoal.plan.stage`); the pipeline is the schedule's own program, played.
"""

from __future__ import annotations

from functools import cached_property
from math import exp

import numpy as np

from shoal.cost.flops import hardware_flops, model_flops
from shoal.cost.own import spread
from shoal.pipeline.choose import program_of
from shoal.pipeline.program import Program
from shoal.plan.cores import on_cores
from shoal.plan.memory import Memory
from shoal.plan.parts import stage_parts
from shoal.plan.run import Run
from shoal.plan.stage import ATTENTION_BACKWARD, Stages, StageTimes
from shoal.simulate import Timeline, Times, simulate
from shoal.simulate.columns import Columns


class Estimate(Stages):
    """A run's step, priced.

    Args:
        run: whose layout and schedule have been checked, and fill the cluster.
        program: of the layout, where it is there already, or its columns, in which gathers of parameters that need
            none may stand.
        known: as `Stages` has it.
    """

    def __init__(self, run: Run, program: Program | Columns | None = None, known: dict | None = None):
        super().__init__(run, known)
        self.played = program or program_of(run.layout, run.microbatches)
        self.program = self.played.program if isinstance(self.played, Columns) else self.played
        self.parts = stage_parts(run.shape, self.program)

    # ---- time ----------------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[StageTimes]:
        """The times of every stage."""
        return [self.stage_of(part) for part in self.parts]

    @cached_property
    def finishing(self) -> np.ndarray:
        """[stages, 3] seconds: reduction, optimizer, gather."""
        return np.array([self.finish_of(part) for part in self.parts])

    @cached_property
    def times(self) -> np.ndarray:
        """[3, stages] seconds of forwards and of both halves of backwards."""
        return np.array([(s.forward, s.backward_input, s.backward_weight) for s in self.stages]).T

    @cached_property
    def durations(self) -> Times:
        """Seconds of all that the program does, but for messages (`link`)."""
        step_of_rank = [self.finishing[self.program.stages_of(r), 1].sum() for r in range(self.program.ranks)]
        forward, inputs, weights = self.times
        return Times(
            forward=forward, backward_input=inputs, backward_weight=weights, reduce=self.finishing[:, 0],
            step=max(step_of_rank), gather=self.finishing[:, 2],
        )  # fmt: skip

    @cached_property
    def timeline(self) -> Timeline:
        """The program, played."""
        return simulate(self.played, self.durations, self.link)

    @cached_property
    def step_seconds(self) -> float:
        """Of one step."""
        return self._seconds(self.timeline)

    def _seconds(self, timeline: Timeline) -> float:
        """Of a step as it is played, each rank on a core of its own or all on those that there are."""
        if self.run.cluster.at_once is None:
            return timeline.step_time
        return on_cores(timeline, self.run.layout, self.run.cluster)

    @property
    def interval(self) -> tuple[float, float]:
        """Between what the time of a step is in four of five cases: as far as estimates of other software were off."""
        factor = exp(spread(self.run.cluster))
        return self.step_seconds / factor, self.step_seconds * factor

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step on the busiest pipeline rank, by what takes them; they add up to the step.

        Of its waiting, messages are what the step would be shorter by without them; the rest is the bubble.
        """
        busiest = int(self.timeline.busy[0].argmax())
        stages = self.program.stages_of(busiest)
        of: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        for stage in stages:
            times, count = self.stages[stage], len(self.program.microbatches_of(stage))
            of["matrix products"] += count * 3 * times.matrices
            of["attention"] += count * (1 + ATTENTION_BACKWARD) * times.attention
            of["element by element"] += count * 3 * times.elements
            of["recomputation"] += count * times.recompute
            of["tensor parallelism"] += count * (times.tensor + times.tensor_backward)
            of["expert parallelism"] += count * 2 * times.experts
            of["context parallelism"] += count * (times.context + times.context_backward)
            of["launches"] += count * (times.launches + times.launches_backward)
            of["gathers and reductions"] += count * (times.gather_forward + times.gather_backward)
            of["gathers and reductions"] += self.finishing[stage, 0] + self.finishing[stage, 2]
            of["optimizer"] += self.finishing[stage, 1]
        waiting = max(0.0, self.step_seconds - sum(of.values()))
        if self.program.ranks > 1:
            longer = self.step_seconds - self._seconds(simulate(self.played, self.durations))
            of["messages between stages"] = min(max(0.0, longer), waiting)
        of["bubble"] = waiting - of["messages between stages"]
        return {name: float(seconds) for name, seconds in of.items()}

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
    def memory(self) -> list[Memory]:
        """Of every pipeline rank; of its tensor-parallel and data-parallel ranks the first."""
        kept = np.array([self.kept_of(part) for part in self.parts])
        peaks, versions = self.timeline.peak_bytes(kept.astype(float)), self.timeline.weight_versions
        return [
            self.memory_of([self.parts[s] for s in self.program.stages_of(rank)], float(alive), int(copies))
            for rank, (alive, copies) in enumerate(zip(peaks, versions, strict=True))
        ]

    @property
    def fullest(self) -> Memory:
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
        return self.fullest.reserved <= self.capacity


NAMES = (
    "matrix products", "attention", "element by element", "recomputation", "tensor parallelism",
    "context parallelism", "expert parallelism", "gathers and reductions", "optimizer", "launches",
    "messages between stages", "bubble",
)  # fmt: skip
