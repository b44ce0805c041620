"""What pipeline stages of a run hold: between steps, of each micro-batch, and at the worst time of a backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, TypeVar

from shoal.pipeline.simulator.columns import EVERY, NONE, NTH, SOME
from shoal.planning.cost.buckets import buckets_of, elements_of
from shoal.planning.cost.memory import activations
from shoal.planning.cost.memory.between_backward_halves import between
from shoal.planning.cost.memory.device import GB, outside
from shoal.planning.cost.memory.float8 import EightBits
from shoal.planning.cost.memory.state import StateBytes, passing_bytes, state_bytes
from shoal.planning.cost.memory.transient import Passing
from shoal.planning.cost.memory.working_set import PASSES, Half, Moment, above, moments
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.parameters import SPLITTING, StagePart
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog.calibration import Calibration, calibration_of
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.software import software_table

T = TypeVar("T")


class When(NamedTuple):
    """A pass of a stage, and what came before it on its rank, which decides what is whole meanwhile.

    Attributes:
        kind: what it is.
        nth: micro-batches for which the stage has made the gradients of its weights: none, one, or more.
        others: for which the rank's other stages have.
        after: whether the stage's pass before was a forward; second halves of backwards do not count.
        gathered: of how many of the other stages it was one: of none, of some, or of every one.
    """

    kind: Half
    nth: int
    others: int
    after: bool
    gathered: int


TIMES = [When(*of) for of in product(PASSES, range(NTH), range(NTH), (False, True), (NONE, SOME, EVERY))]
"""All that there are, in the order of `shoal.pipeline.simulator.columns.before_backwards`."""
PASSING = ("micro_batch", "tp", "tp_x", "sequence_parallel", "cp", "ulysses", "ep", "etp", "recompute")
"""All of a layout that changes what a micro-batch keeps on a stage, and what its backward needs besides."""

Alive = Mapping[When, float]
"""Bytes of activations, at most, when a pass of a stage begins, or a forward ends: at those times that there are."""

Kinds = tuple[tuple[tuple[bool, bool], int], ...]
"""How many layers are of each kind: (with experts, through which only some tokens pass)."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on a rank at the worst time of a step, by what holds them."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    buffers: float
    stashed: float
    reserve: float

    @property
    def allocated(self) -> float:
        """By tensors: `torch.cuda.max_memory_allocated`."""
        return self.reserved - self.reserve

    @property
    def reserved(self) -> float:
        """From the device, with what the allocator and libraries keep."""
        return sum(vars(self).values())


def alive_at(most: Sequence[float], times: Sequence[When] = TIMES) -> Alive:
    """One stage's, of a number for each of some times, -inf where there is no such."""
    return {when: there for when, there in zip(times, most, strict=True) if there >= 0}


class StageMemory:
    """The bytes of single stages of a run, whatever the order is in which micro-batches go through them.

    Args:
        run: whose layout and schedule have been checked, and fill the cluster.
        known: what was counted of stages, by all that decides it; those of other layouts of the same run may share it.
    """

    def __init__(self, run: EstimatedRun, known: dict | None = None):
        self.run = run
        self.known = {} if known is None else known
        self.calibration: Calibration = self.once("constants", lambda: calibration_of(run.cluster))
        self.constants = self.calibration.numbers
        self.forward = self.once(("pass", self.passing), lambda: MicroBatch(
            run.shape, run.layout, run.sequence_length, run.policy.compute.itemsize, run.attention,
            run.document_mask, eight=EightBits.of(run.policy, run.float8),
        ))  # fmt: skip

    def once(self, key: Hashable, count: Callable[[], T]) -> T:
        """What is counted, once for all runs that share `known` and have this key."""
        if key not in self.known:
            self.known[key] = count()
        return self.known[key]

    def sparse(self, part: StagePart) -> int:
        """Layers of a stage that have experts."""
        return 0 if self.run.shape.experts is None else sum(self.run.shape.sparse(layer) for layer in part.layers)

    def kinds(self, part: StagePart) -> Kinds:
        """How many layers of a stage there are with experts or without, through which all tokens pass or some."""
        shape = self.run.shape
        if shape.experts is None and shape.depths is None:
            return (((False, False), len(part.layers)),)
        return tuple(sorted(Counter((shape.sparse(i), shape.skips(i)) for i in part.layers).items()))

    def _layers(self, part: StagePart) -> tuple[Kinds, int] | Sequence[int]:
        """All of a stage's layers that changes what passes through it."""
        return part.layers if self.forward.told_apart else (self.kinds(part), self._begins(part))

    def _begins(self, part: StagePart) -> int:
        """Where among those with experts and those without a stage's layers begin, which says their order."""
        experts = self.run.shape.experts
        return part.layers[0] % experts.every if experts and part.layers else 0

    # ---- between steps -------------------------------------------------------------------------------------------

    @cached_property
    def holding(self) -> tuple:
        """All of a layout that changes what a stage holds between steps."""
        layout = self.run.layout
        experts = layout.expert_shape[2] if self.run.shape.experts else 1
        return (
            layout.sync, layout.zero, layout.shards, experts, layout.bucket_bytes, layout.prefetch,
            layout.reshard_after_forward, *(getattr(layout, name) for name in SPLITTING),
        )  # fmt: skip

    def state_of(self, parts: Sequence[StagePart]) -> StateBytes:
        """Of some stages together, counted once for those that are alike."""
        key = (
            self.holding,
            *((self.kinds(part), self._begins(part), part.first, part.last, part.shared) for part in parts),
        )
        run = self.run
        return self.once(key, lambda: state_bytes(run.shape, run.layout, run.policy, run.optimizer, parts))

    def elements_of(self, part: StagePart) -> tuple[int, int]:
        """Parameters of a stage, padding and experts left out; and those of experts. Counted once for those alike."""
        split = tuple(getattr(self.run.layout, name) for name in SPLITTING)
        key = ("elements", split, self.kinds(part), part.first, part.last, part.shared)
        return self.once(key, lambda: elements_of(self.run.shape, self.run.layout, part, 0, 0, 0))

    def passing_of(self, part: StagePart) -> Passing:
        """Of one stage, what is whole for a while in a backward, counted once for those that are alike."""
        key = ("passing", self.holding, self.kinds(part), self._begins(part), part.first, part.last, part.shared)
        return self.once(key, lambda: passing_bytes(self.run.shape, self.run.layout, self.run.policy, part))

    def messages_of(self, part: StagePart, zero: int) -> tuple[int, int]:
        """In how many messages a stage's parameters are gathered, or their gradients reduced, under a stage of ZeRO:
        experts have their own, which come second.
        """
        layout = self.run.layout
        split = (layout.bucket_bytes, *(getattr(layout, name) for name in SPLITTING))
        key = ("messages", zero == 3, split, self.kinds(part), part.first, part.last, part.shared)

        def count() -> tuple[int, int]:
            as_it_is = layout if (zero == 3) == (layout.zero == 3) else layout.model_copy(update={"zero": zero})
            stage = buckets_of(self.run.shape, as_it_is, part, self.run.policy.reduce.itemsize, 0, 0, 0)
            experts = sum(count for size, count in zip(stage.sizes, stage.counts, strict=True) if size.expert)
            return len(stage.buckets) - experts, experts

        return self.once(key, count)

    # ---- in a step -----------------------------------------------------------------------------------------------

    @cached_property
    def passing(self) -> tuple:
        """The values of `PASSING`."""
        return tuple(getattr(self.run.layout, name) for name in PASSING)

    def kept_of(self, part: StagePart) -> int:
        """Bytes that one micro-batch keeps alive on a stage, counted once for those that are alike."""
        key = ("kept", self.passing, self._layers(part), part.first, part.last)
        return self.once(key, lambda: activations.total(
            activations.stage(self.forward, part.layers, first=part.first, last=part.last)
        ))

    @property
    def message(self) -> int:
        """Bytes that one micro-batch has between two stages."""
        return self.forward.itemsize * self.forward.tokens_here * self.forward.hidden_here

    def between_of(self, part: StagePart) -> int:
        """Bytes of one micro-batch that are alive on a stage between the halves of its backward."""
        key = ("between", self.passing, self._layers(part), part.first, part.last)
        return self.once(key, lambda: between(self.forward, part))

    def memory_of(
        self, parts: Sequence[StagePart], alive: Sequence[Alive], versions: int = 1
    ) -> PeakMemory:
        """Of a rank that holds some stages, at its worst time.

        Args:
            alive: of each stage.
            versions: of the weights.
        """
        run, state, found = self.run, self.state_of(parts), []
        each = [self.passing_of(part) for part in parts]
        stays = [self._stays(there, at) for there, at in zip(each, alive, strict=True)]
        for i, (part, there) in enumerate(zip(parts, each, strict=True)):
            going, kept = self._of_others(each, stays, i)
            times: dict[Half, list[tuple[Sequence[int], int, Sequence[int]]]] = {}
            for when, most in self._told_apart(alive[i], stays[i], going, kept).items():
                if when.kind not in times:
                    times[when.kind] = self._times(part, there, when.kind, stays[i])
                here = [(whole[when.after], more + made[when.nth]) for whole, more, made in times[when.kind]]
                gathered, passing = max(here, key=sum)
                holes = self.fragmentation * (most + self.most(part, when.kind))
                found.append((most, gathered + kept[when.gathered], passing + going[when.others], holes))
        most, gathered, passing, holes = max(found, key=sum)
        buffers = max(passing + state.estimating, state.updating - most - gathered)  # which an update comes after
        held = (
            state.parameters, state.gradients, state.optimizer, most, gathered, buffers,
            (versions - 1) * state.elements * run.policy.compute.itemsize,
        )
        return PeakMemory(*held, float(self.unused + holes))

    def _told_apart(self, alive: Alive, stays: int, going: Sequence[int], kept: Sequence[int]) -> Alive:
        """The most that is alive at those of its times at which gradients or gathered parameters differ."""
        of_stage, of_others, others_kept = self.run.layout.zero >= 2, any(going), any(kept)
        found: dict[When, float] = {}
        for (kind, nth, others, after, gathered), most in alive.items():
            when = When(kind, nth * of_stage, others * of_others, after and stays > 0, gathered * others_kept)
            found[when] = max(most, found.get(when, most))
        return found

    def working(self, parts: Sequence[StagePart]) -> int:
        """The most bytes that come and go while a backward runs on a rank, less what it has freed by then; or if that
        is less, the first half of one; on the stage that needs least. Not less than 0, which is where it begins."""
        return max(0, min([self.most(part, kind) for part in parts for kind in PASSES[:2]]))

    def most(self, part: StagePart, kind: Half) -> int:
        """The most bytes that come and go in a pass of one stage, found once for those that are alike."""
        key = ("most", kind, self.passing, self._layers(part), part.first, part.last)
        return self.once(key, lambda: max(moment.bytes for moment in self._moments(part, kind)))

    def _times(
        self, part: StagePart, there: Passing, kind: Half, stays: int
    ) -> list[tuple[Sequence[int], int, Sequence[int]]]:
        """At each moment of a pass, also where it comes again in a layer below: bytes of gathered parameters of the
        stage, as `Time` has them; those that come and go; and those of whole gradients, by micro-batch.

        Args:
            stays: of its parameters from a forward until its backward.
        """
        found: list[tuple[Sequence[int], int, Sequence[int]]] = []
        for moment in self._moments(part, kind):
            if moment.where != "layer":
                places = [(0, there.end[moment.time] if moment.where == "end" else there.head[moment.time])]
            else:
                counted = self._above(part, moment.done, kind)
                places = [(self._above(part, turn.done, kind) - counted, turn.times[moment.time])
                          for turn in there.layers if turn.sparse == moment.sparse]  # fmt: skip
            for gone, time in places:
                gathered = (0, stays) if kind == "weight" or moment.where == "loss" else time.parameters
                if kind == "forward":  # in a layer, or as it ends
                    gathered = (time.parameters if moment.where == "layer" else there.stays)[1:] * 2
                # Weights' gradients are made in a whole backward, or in its second half.
                made = there.carried if kind in ("input", "forward") else time.gradients
                found.append((gathered, moment.bytes - gone, made))
        return found

    def _above(self, part: StagePart, done: int, kind: Half) -> int:
        """Of a micro-batch, bytes that so many layers have let go of."""
        if not done:
            return 0
        key = ("above", kind, self.passing, self._layers(part), done)
        return self.once(key, lambda: above(self.forward, part, done, kind))

    @staticmethod
    def _stays(there: Passing, alive: Alive) -> int:
        """Bytes of a stage's parameters that are gathered from a forward until its backward."""
        backward_follows = all(when.after for when in alive if when.kind in ("whole", "input"))
        return there.stays[backward_follows]

    @staticmethod
    def _of_others(passing: Sequence[Passing], stays: Sequence[int], i: int) -> tuple[list[int], list[int]]:
        """Bytes that a rank's other stages have meanwhile: of gradients whose reduction is on its way, by micro-batch;
        and of gathered parameters, where none of them waits for its backward, where some do, and where each does."""
        going = [sum(at.carried[nth] for j, at in enumerate(passing) if j != i) for nth in range(NTH)]
        each = [kept for j, kept in enumerate(stays) if j != i]
        return going, [0, sum(each) - min(each, default=0), sum(each)]

    def _moments(self, part: StagePart, kind: Half) -> list[Moment]:
        """Of a backward or of a half of one, found once for stages that are alike."""
        key = ("moments", kind, self.passing, self._layers(part), part.first, part.last)
        return self.once(key, lambda: moments(self.forward, part, kind))

    @cached_property
    def unused(self) -> float:
        """Bytes that libraries and the process keep of a device."""
        return unused_of(self.run.cluster, self.calibration)

    @cached_property
    def capacity(self) -> float:
        """Bytes of a device that a process can have: what is sold as 80 GB has 80 GiB."""
        return capacity_of(self.run.cluster, self.calibration)

    def with_holes(self, alive: float) -> float:
        """Bytes that the allocator reserves for so many in activations."""
        return (1 + self.fragmentation) * alive

    @cached_property
    def fragmentation(self) -> float:
        """Of the bytes that come and go, how many the allocator has besides."""
        return fragmentation_of(self.calibration)


def capacity_of(cluster: Cluster, calibration: Calibration) -> float:
    """Bytes of a cluster's device that a process can have."""
    return cluster.memory_bytes * (calibration.numbers["usable"] if cluster.accelerator.devices else 1.0)


def unused_of(cluster: Cluster, calibration: Calibration) -> float:
    """Bytes that libraries and the process keep of a cluster's device."""
    if not cluster.accelerator.devices:
        return 0.0
    return calibration.numbers["base"] * GB + outside(cluster.memory_bytes, calibration)


def fragmentation_of(calibration: Calibration) -> float:
    """Of the bytes that come and go, how many the allocator has besides."""
    return calibration.tables["fragmentation"][list(software_table()).index("shoal")]
