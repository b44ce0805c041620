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
from shoal.cost.outside import GB, outside
from shoal.cost.parameters import SPLITTING, StagePart
from shoal.cost.state import StateBytes, Whole, state_bytes
from shoal.cost.working import Moment, in_block, moments
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
        self.forward = Pass(
            run.shape, run.layout, run.sequence_length, run.policy.compute.itemsize, run.attention, run.document_mask,
            products=run.policy.products,
        )

    def sparse(self, part: StagePart) -> int:
        """Layers of a stage that have experts."""
        return 0 if self.run.shape.experts is None else sum(self.run.shape.sparse(layer) for layer in part.layers)

    def kinds(self, part: StagePart) -> Kinds:
        """How many layers of a stage there are with experts or without, through which all tokens pass or some."""
        shape = self.run.shape
        if shape.experts is None and shape.depths is None:
            return (((False, False), len(part.layers)),)
        return tuple(sorted(Counter((shape.sparse(i), shape.skips(i)) for i in part.layers).items()))

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
        key = ("kept", self.passing, self.kinds(part), part.first, part.last)
        if key not in self.known:
            saved = activations.stage(self.forward, part.layers, first=part.first, last=part.last)
            self.known[key] = activations.total(saved)
        return self.known[key]

    def memory_of(
        self, parts: Sequence[StagePart], alive: float, versions: int = 1, schedule: str | None = None
    ) -> Memory:
        """Of a rank that holds some stages, ``alive`` bytes of activations at its worst time, and some versions.

        Args:
            schedule: instead of the layout's.
        """
        run, state, work = self.run, self.state_of(parts), self.working(parts)
        gathered, passing = max((
            (whole.parameters, moment.bytes + moment.reducing * whole.gradients + whole.before + later)
            for part, there in zip(parts, state.passing, strict=True)
            for moment in self._moments(part) for whole in [getattr(there, moment.where)]
            for later in self._later(part, whole, schedule or run.layout.schedule)
        ), key=sum)  # fmt: skip
        passing = max(passing + state.estimating, state.updating - alive - gathered)  # which an update comes after
        held = (
            state.parameters, state.gradients, state.optimizer, alive, gathered, passing,
            (versions - 1) * state.elements * run.policy.compute.itemsize,
        )
        return Memory(*held, self.unused + self.fragmentation * (alive + work))

    def working(self, parts: Sequence[StagePart]) -> int:
        """The most bytes that come and go while a backward runs on a rank, less what it has freed by then."""
        return max(self._most(part) for part in parts)

    def _most(self, part: StagePart) -> int:
        """The same of one stage, found once for those that are alike."""
        key = ("most", self.passing, self.run.layout.pp == 1, self.kinds(part), part.first, part.last)
        if key not in self.known:
            self.known[key] = max(moment.bytes for moment in self._moments(part))
        return self.known[key]

    def _later(self, part: StagePart, whole: Whole, schedule: str) -> list[float]:
        """What is there besides in the first, the second and the third backward of a step, less the micro-batches that
        are over by then, where all forwards come first."""
        over = self.kept_of(part) if schedule in FORWARDS_FIRST and self.run.layout.pp > 1 else 0
        found = [0, whole.second - over, whole.second + whole.third - 2 * over]
        return found[: min(3, self.run.microbatches)]

    def _moments(self, part: StagePart) -> list[Moment]:
        """Of a backward, found once for stages that are alike."""
        alone = self.run.layout.pp == 1
        key = ("moments", self.passing, alone, self.kinds(part), part.first, part.last)
        if key not in self.known:
            block = ("block", self.passing)
            if block not in self.known:
                self.known[block] = in_block(self.forward)
            self.known[key] = moments(self.forward, part, alone=alone, block=self.known[block])
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
