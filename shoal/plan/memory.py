"""What pipeline stages of a run hold: between steps, of each micro-batch, and at the worst time of a backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shoal.catalog.calibration import calibration_of
from shoal.catalog.clusters import Cluster
from shoal.catalog.software import software_table
from shoal.cost import activations
from shoal.cost.activations import Pass
from shoal.cost.buckets import buckets_of
from shoal.cost.eight import EightBits
from shoal.cost.halves import between
from shoal.cost.outside import GB, outside
from shoal.cost.parameters import SPLITTING, StagePart
from shoal.cost.state import Passing, StateBytes, Whole, state_bytes
from shoal.cost.working import PASSES, Half, Moment, in_block, moments
from shoal.plan.run import Run

FORWARDS_FIRST = ("gpipe", "looped-bfs")  # schedules
PASSING = ("micro_batch", "tp", "tp_x", "sequence_parallel", "cp", "ulysses", "ep", "etp", "recompute")
"""All of a layout that changes what a micro-batch keeps on a stage, and what its backward needs besides."""

Kinds = tuple[tuple[tuple[bool, bool], int], ...]
"""How many layers are of each kind: (with experts, through which only some tokens pass)."""


@dataclass(frozen=True)
class Memory:
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


class StageMemory:
    """The bytes of single stages of a run, whatever the order is in which micro-batches go through them.

    Args:
        run: whose layout and schedule have been checked, and fill the cluster.
        known: what was counted of stages, by all that decides it; those of other layouts of the same run may share it.
    """

    def __init__(self, run: Run, known: dict | None = None):
        self.run = run
        self.known = {} if known is None else known
        if "constants" not in self.known:
            self.known["constants"] = calibration_of(run.cluster).values
        self.constants = self.known["constants"]
        if (key := ("pass", self.passing)) not in self.known:  # which counts for all of the same passes
            self.known[key] = Pass(
                run.shape, run.layout, run.sequence_length, run.policy.compute.itemsize, run.attention,
                run.document_mask, eight=EightBits.of(run.policy, run.float8),
            )  # fmt: skip
        self.forward: Pass = self.known[key]

    def sparse(self, part: StagePart) -> int:
        """Layers of a stage that have experts."""
        return 0 if self.run.shape.experts is None else sum(self.run.shape.sparse(layer) for layer in part.layers)

    def kinds(self, part: StagePart) -> Kinds:
        """How many layers of a stage there are with experts or without, through which all tokens pass or some."""
        shape = self.run.shape
        if shape.experts is None and shape.depths is None:
            return (((False, False), len(part.layers)),)
        return tuple(sorted(Counter((shape.sparse(i), shape.skips(i)) for i in part.layers).items()))

    def _layers(self, part: StagePart) -> Kinds | range:
        """All of a stage's layers that changes what passes through it."""
        return part.layers if self.forward.told_apart else self.kinds(part)

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
            *((self.kinds(part), part.first, part.last, part.shared) for part in parts),
        )
        if key not in self.known:
            run = self.run
            self.known[key] = state_bytes(run.shape, run.layout, run.policy, run.optimizer, parts)
        return self.known[key]

    def messages_of(self, part: StagePart, zero: int) -> tuple[int, int]:
        """In how many messages a stage's parameters are gathered, or their gradients reduced, under a stage of ZeRO:
        experts have their own, which come second.
        """
        layout = self.run.layout
        split = (layout.bucket_bytes, *(getattr(layout, name) for name in SPLITTING))
        key = ("messages", zero == 3, split, self.kinds(part), part.first, part.last, part.shared)
        if key not in self.known:
            as_it_is = layout if (zero == 3) == (layout.zero == 3) else layout.model_copy(update={"zero": zero})
            stage = buckets_of(self.run.shape, as_it_is, part, self.run.policy.reduce.itemsize, 0, 0, 0)
            experts = sum(count for size, count in zip(stage.sizes, stage.counts, strict=True) if size.expert)
            self.known[key] = len(stage.buckets) - experts, experts
        return self.known[key]

    # ---- in a step -----------------------------------------------------------------------------------------------

    @cached_property
    def passing(self) -> tuple:
        """The values of `PASSING`."""
        return tuple(getattr(self.run.layout, name) for name in PASSING)

    def kept_of(self, part: StagePart) -> int:
        """Bytes that one micro-batch keeps alive on a stage, counted once for those that are alike."""
        key = ("kept", self.passing, self._layers(part), part.first, part.last)
        if key not in self.known:
            saved = activations.stage(self.forward, part.layers, first=part.first, last=part.last)
            self.known[key] = activations.total(saved)
        return self.known[key]

    @property
    def message(self) -> int:
        """Bytes that one micro-batch has between two stages."""
        return self.forward.itemsize * self.forward.tokens_here * self.forward.hidden_here

    def between_of(self, part: StagePart) -> int:
        """Bytes of one micro-batch that are alive on a stage between the halves of its backward."""
        key = ("between", self.passing, self._layers(part), part.first, part.last)
        if key not in self.known:
            self.known[key] = between(self.forward, part)
        return self.known[key]

    def memory_of(
        self, parts: Sequence[StagePart], alive: Sequence[Sequence[float]], versions: int = 1,
        schedule: str | None = None,
    ) -> Memory:
        """Of a rank that holds some stages, at its worst time.

        Args:
            alive: [stages, passes] bytes of activations, at most, when each of `PASSES` of each stage begins; -inf
                where it has no such.
            versions: of the weights.
            schedule: instead of the layout's.
        """
        run, state, found = self.run, self.state_of(parts), []
        for i, (part, there) in enumerate(zip(parts, state.passing, strict=True)):
            kept, going = self._of_others([*state.passing[:i], *state.passing[i + 1 :]])
            for kind, most in zip(PASSES, alive[i], strict=True):
                if most < 0:
                    continue
                gathered, passing = max((
                    (
                        0 if kind == "weight" else whole.parameters + kept,
                        moment.bytes - gone + moment.reducing * whole.gradients + whole.before + later,
                    )
                    for moment in self._moments(part, kind) for gone, whole in self._at(part, there, moment, kind)
                    for later in self._later(part, whole, going, kind, schedule or run.layout.schedule)
                ), key=sum)  # fmt: skip
                found.append((most, gathered, passing, self.fragmentation * (most + self.most(part, kind))))
        most, gathered, passing, holes = max(found, key=sum)
        passing = max(passing + state.estimating, state.updating - most - gathered)  # which an update comes after
        held = (
            state.parameters, state.gradients, state.optimizer, most, gathered, passing,
            (versions - 1) * state.elements * run.policy.compute.itemsize,
        )
        return Memory(*held, self.unused + holes)

    def working(self, parts: Sequence[StagePart]) -> int:
        """The most bytes that come and go while a backward runs on a rank, less what it has freed by then; or if that
        is less, the first half of one; on the stage that needs least."""
        return min([self.most(part, kind) for part in parts for kind in PASSES[:2]])

    def most(self, part: StagePart, kind: Half) -> int:
        """The most bytes that come and go in a pass of one stage, found once for those that are alike."""
        key = ("most", kind, self.passing, self.run.layout.pp == 1, self._layers(part), part.first, part.last)
        if key not in self.known:
            self.known[key] = max(moment.bytes for moment in self._moments(part, kind))
        return self.known[key]

    def _at(self, part: StagePart, there: Passing, moment: Moment, kind: Half) -> list[tuple[int, Whole]]:
        """What is whole at a moment, also where it comes again in a layer below; and what those above have let go."""
        found = [(0, getattr(there, moment.where))]
        if moment.where != "layer" or kind == "input":
            return found
        return found + [(done * self._a_layer_keeps(part) * (kind == "whole"), whole) for done, whole in there.turns]

    def _a_layer_keeps(self, part: StagePart) -> int:
        """Of a micro-batch, on a stage's average."""
        key = ("layers", self.passing, self._layers(part))
        if key not in self.known:
            self.known[key] = activations.of_layers(self.forward, part.layers) // len(part.layers)
        return self.known[key]

    def _of_others(self, others: Sequence[Passing]) -> tuple[int, int]:
        """Bytes that a rank's other stages have meanwhile: of gathered parameters, where these stay until their
        backward, and of gradients whose reduction is on its way."""
        layout = self.run.layout
        stay = layout.zero == 3 and not layout.reshard_after_forward
        going = sum(at.head.second + at.head.third for at in others) if layout.overlap else 0
        return sum(at.head.parameters for at in others) * stay, going

    def _later(self, part: StagePart, whole: Whole, going: int, kind: Half, schedule: str) -> list[float]:
        """What is there besides in the first, the second and the third backward of a step, less the micro-batches that
        are over by then, where all forwards come first.

        Args:
            going: of other stages.
        """
        over = self.kept_of(part) if schedule in FORWARDS_FIRST and self.run.layout.pp > 1 else 0
        # Where nothing overlaps, a sum has its memory when what the block had in a whole backward is gone.
        second = whole.second if self.run.layout.overlap or kind == "weight" else 0
        found = [0, second + going - over, second + whole.third + going - 2 * over]
        return found[: min(3, self.run.microbatches)]

    def _moments(self, part: StagePart, kind: Half) -> list[Moment]:
        """Of a backward or of a half of one, found once for stages that are alike."""
        alone = self.run.layout.pp == 1
        key = ("moments", kind, self.passing, alone, self._layers(part), part.first, part.last)
        if key not in self.known:
            block = ("block", kind, self.passing, *sorted({self.run.shape.sparse(layer) for layer in part.layers}))
            if block not in self.known:
                self.known[block] = in_block(self.forward, part, kind)
            self.known[key] = moments(self.forward, part, kind, alone=alone, block=self.known[block])
        return self.known[key]

    @cached_property
    def unused(self) -> float:
        """Bytes that libraries and the process keep of a device."""
        return unused_of(self.run.cluster, self.constants)

    @cached_property
    def capacity(self) -> float:
        """Bytes of a device that a process can have: what is sold as 80 GB has 80 GiB."""
        return capacity_of(self.run.cluster, self.constants)

    @cached_property
    def fragmentation(self) -> float:
        """Of the bytes that come and go, how many the allocator has besides."""
        return fragmentation_of(self.constants)


def capacity_of(cluster: Cluster, constants: Mapping) -> float:
    """Bytes of a cluster's device that a process can have."""
    return cluster.memory_bytes * (constants["usable"] if cluster.accelerator.devices else 1.0)


def unused_of(cluster: Cluster, constants: Mapping) -> float:
    """Bytes that libraries and the process keep of a cluster's device."""
    if not cluster.accelerator.devices:
        return 0.0
    return constants["base"] * GB + outside(cluster.memory_bytes, constants)


def fragmentation_of(constants: Mapping) -> float:
    """Of the bytes that come and go, how many the allocator has besides."""
    return constants["fragmentation"][list(software_table()).index("shoal")]
