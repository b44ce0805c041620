"""A step of training, priced before it is run: time by what takes it, memory of every pipeline rank by what holds it.

Its stages are priced one by one (`shoal.planning.cost.time.stage`); the pipeline is the schedule's own program,
played: a short one in plain numbers (`shoal.pipeline.short`), without numpy, which takes longer to import than an
answer.
"""

from __future__ import annotations

from functools import cached_property
from math import exp
from typing import TYPE_CHECKING

from shoal.pipeline.from_layout import program_of
from shoal.pipeline.program import Program
from shoal.pipeline.short import Played, before_backwards, is_short, play
from shoal.planning.cost.flops import hardware_flops, model_flops
from shoal.planning.cost.memory.stage import PeakMemory, alive_at
from shoal.planning.cost.parameters import stage_parts
from shoal.planning.cost.time.engine_layer import spread
from shoal.planning.cost.time.stage import ATTENTION_BACKWARD, StagePrices, StageTimes
from shoal.planning.run import EstimatedRun

if TYPE_CHECKING:
    import numpy as np

    from shoal.pipeline.simulator import ActionTimes, Timeline
    from shoal.pipeline.simulator.columns import Columns
    from shoal.pipeline.simulator.many import Replay


class Estimate(StagePrices):
    """A run's step, priced.

    Args:
        run: whose layout and schedule have been checked, and fill the cluster.
        program: of the layout, where it is there already, or its columns, in which gathers of parameters that need
            none may stand.
        known: as `StagePrices` has it.
        replay: of the program, where there is one.
    """

    def __init__(
        self, run: EstimatedRun, program: Program | Columns | None = None, known: dict | None = None,
        replay: Replay | None = None,
    ):
        super().__init__(run, known)
        self.replay = replay
        self.played = program or program_of(run.layout, run.microbatches, transfers=False)
        self.program = self.played if isinstance(self.played, Program) else self.played.program
        self.parts = stage_parts(run.shape, self.program)

    # ---- time ----------------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[StageTimes]:
        """The times of every stage."""
        return [self.stage_of(part) for part in self.parts]

    @cached_property
    def passes(self) -> list[tuple[float, float, float]]:
        """[stages] seconds of a forward and of both halves of a backward."""
        return [stage.passes for stage in self.stages]

    @cached_property
    def finishes(self) -> list[tuple[float, float, float]]:
        """[stages] seconds: reduction, optimizer, gather."""
        return [self.finish_of(part) for part in self.parts]

    @cached_property
    def step_seconds(self) -> float:
        """Of one step: as it is played, or as long as a host launches it ahead of its accelerator."""
        return max(self._step.seconds, self._launched)

    @cached_property
    def _launched(self) -> float:
        """Seconds that the slowest host needs for a step at least."""
        each = [
            len(self.program.microbatches_of(stage)) * times.launched + sum(finish)
            for stage, (times, finish) in enumerate(zip(self.stages, self.finishes, strict=True))
        ]
        return max(sum(each[stage] for stage in self.program.stages_of(rank)) for rank in range(self.program.ranks))

    @cached_property
    def _step(self) -> Played:
        if self._short:
            return play(self.program, self.passes, self.finishes, *self.hops)
        return self._on(self.timeline) if self._replayed is None else self._replayed[0]

    @cached_property
    def _without_messages(self) -> Played:
        if self._short:
            return play(self.program, self.passes, self.finishes)
        if self._replayed is not None:
            return self._replayed[1]
        from shoal.pipeline.simulator import simulate

        return self._on(simulate(self.played, self.durations))

    @property
    def _short(self) -> bool:
        return self.played is self.program and self.run.cluster.at_once is None and is_short(self.program)

    @cached_property
    def _replayed(self) -> tuple[Played, Played] | None:
        """With messages, and without; None where there is no replay, or where ranks share cores."""
        if self.replay is None or self.run.cluster.at_once is not None:
            return None
        import numpy as np

        from shoal.pipeline.simulator import MessageTimes

        reduce, _, gather = self.finishing.T
        table = np.stack([*self.times, reduce, np.full(len(self.parts), self._update), gather])
        with_them, without = self.replay.step_times(np.stack([table, table], axis=2), [self.link, MessageTimes()])
        busy = self.replay.busy(table[:, :, None])[:, 0].tolist()
        return Played(float(with_them), busy), Played(float(without), busy)

    def _on(self, timeline: Timeline) -> Played:
        """A step as it is played, each rank on a core of its own or all on those that there are."""
        if self.run.cluster.at_once is None:
            return Played(timeline.step_time, timeline.busy[0].tolist())
        from shoal.planning.cost.time.shared_cores import on_cores

        return Played(on_cores(timeline, self.run.layout, self.run.cluster), timeline.busy[0].tolist())

    # ---- the same in arrays, of any program ----------------------------------------------------------------------

    @cached_property
    def times(self) -> np.ndarray:
        """[3, stages] `passes`."""
        import numpy as np

        return np.array(self.passes).T

    @cached_property
    def finishing(self) -> np.ndarray:
        """[stages, 3] `finishes`."""
        import numpy as np

        return np.array(self.finishes)

    @cached_property
    def _update(self) -> float:
        """Seconds of the optimizer on the rank where it takes longest."""
        every = range(self.program.ranks)
        return max(sum(self.finishes[s][1] for s in self.program.stages_of(rank)) for rank in every)

    @cached_property
    def durations(self) -> ActionTimes:
        """Seconds of all that the program does, but for messages (`link`)."""
        from shoal.pipeline.simulator import ActionTimes

        forward, inputs, weights = self.times
        reduce, _, gather = self.finishing.T
        return ActionTimes(
            forward=forward, backward_input=inputs, backward_weight=weights, reduce=reduce, step=self._update,
            gather=gather,
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The program, played."""
        from shoal.pipeline.simulator import simulate

        return simulate(self.played, self.durations, self.link)

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
        busiest = max(range(self.program.ranks), key=self._step.busy.__getitem__)
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
            of["gathers and reductions"] += self.finishes[stage][0] + self.finishes[stage][2]
            of["optimizer"] += self.finishes[stage][1]
        waiting = max(0.0, self._step.seconds - sum(of.values()))
        if self.program.ranks > 1:
            longer = self._step.seconds - self._without_messages.seconds
            of["messages between stages"] = min(max(0.0, longer), waiting)
        of["bubble"] = waiting - of["messages between stages"]
        of["launches"] += self.step_seconds - self._step.seconds
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
        before, versions = before_backwards(self.program, whole, half, self.message), [1] * self.program.ranks
        if not self._short:
            from shoal.pipeline.simulator.columns import before_backwards as of_columns  # which needs numpy

            before = of_columns(self.timeline.columns, whole, half, self.message).T.tolist()
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
        return self.fullest.reserved <= self.capacity


NAMES = (
    "matrix products", "attention", "element by element", "recomputation", "tensor parallelism",
    "context parallelism", "expert parallelism", "gathers and reductions", "optimizer", "launches",
    "messages between stages", "bubble",
)  # fmt: skip
