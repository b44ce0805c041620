"""Memory of a run's pipeline stages: between steps, per micro-batch, and at the peak of a backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, TypeVar

from shoal.pipeline.simulator.columns import EVERY, NONE, NTH, SOME
from shoal.planning.cost.buckets import count_elements, fill_buckets
from shoal.planning.cost.memory import activations
from shoal.planning.cost.memory.between_backward_halves import between
from shoal.planning.cost.memory.state import StateBytes, state_bytes
from shoal.planning.cost.memory.transient import UnshardedBytes, count_unsharded
from shoal.planning.cost.memory.working_set import PASSES, Half, Moment, above, moments
from shoal.planning.cost.micro_batch import EightBits, MicroBatch
from shoal.planning.cost.parameters import SPLITTING, StagePart
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog.calibration import Calibration, cluster_calibration
from shoal.spec.catalog.clusters import Cluster

T = TypeVar("T")
GB = 1e9


class PassContext(NamedTuple):
    """A pass of a stage and its history on the rank, which determine the unsharded tensors at that time."""

    kind: Half  # kind of the pass
    nth: int  # micro-batches with finished weight gradients on the stage: none, one, or more
    others: int  # the same for the rank's other stages
    after: bool  # the stage's previous pass was a forward; second halves of backwards do not count
    gathered: int  # how many of the other stages last ran a forward: none, some, or all


TIMES = [PassContext(*of) for of in product(PASSES, range(NTH), range(NTH), (False, True), (NONE, SOME, EVERY))]
"""All possible times, in the order of `shoal.pipeline.simulator.columns.live_before_backwards`."""
PASS_FIELDS = ("micro_batch", "tp", "tp_x", "sequence_parallel", "cp", "ulysses", "ep", "etp", "recompute")
"""Layout fields that affect a micro-batch's activations on a stage and the working memory of its backward."""

Alive = Mapping[PassContext, float]
"""Maximum bytes of activations at the start of a pass or the end of a forward, for the times that occur."""

Kinds = tuple[tuple[tuple[bool, bool], int], ...]
"""Number of layers of each kind: (has experts, only some tokens pass through)."""


@dataclass(frozen=True)
class PeakMemory:
    """Peak bytes on a rank during a step, by use."""

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
        """Bytes allocated by tensors: `torch.cuda.max_memory_allocated`."""
        return self.reserved - self.reserve

    @property
    def reserved(self) -> float:
        """Bytes taken from the device, including the allocator's cache and libraries."""
        return sum(vars(self).values())


def alive_at(most: Sequence[float], times: Sequence[PassContext] = TIMES) -> Alive:
    """Build one stage's map from an array of bytes by time; -inf marks times that do not occur."""
    return {when: peak for when, peak in zip(times, most, strict=True) if peak >= 0}


class StageMemory:
    """Memory of the single stages of a run, for any order of micro-batches.

    Args:
        run: a run with a checked layout and schedule that fills the cluster.
        known: cache of stage counts; runs that differ only in layout may share it.
    """

    def __init__(self, run: EstimatedRun, known: dict | None = None):
        self.run = run
        self.known = {} if known is None else known
        self.calibration: Calibration = self.once("constants", lambda: (
            cluster_calibration(run.cluster, run.software.name)
        ))  # fmt: skip
        self.constants = self.calibration.numbers
        self.capacity, self.library_bytes, self.fragmentation = self.once("device", lambda: (
            device_capacity(run.cluster, self.calibration), library_bytes(run.cluster, self.calibration),
            self.calibration.at("fragmentation"),
        ))  # fmt: skip
        self.forward = self.once(("pass", self.pass_key), lambda: MicroBatch(
            run.shape, run.layout, run.sequence_length, run.policy.compute.itemsize, run.attention,
            run.document_mask, run.fuses,
            EightBits.from_formats(run.policy, run.float8, packed=run.products == "fp4"), run.by_lengths,
        ))  # fmt: skip

    def once(self, key: Hashable, count: Callable[[], T]) -> T:
        """Return a cached count; all runs that share `known` share it by key."""
        if key not in self.known:
            self.known[key] = count()
        return self.known[key]

    def kinds(self, part: StagePart) -> Kinds:
        """Return the number of a stage's layers by kind: expert or dense, for all tokens or some."""
        shape, layers = self.run.shape, part.layers
        if shape.experts is None and shape.depths is None:
            return (((False, False), len(layers)),)
        return self.once(("kinds", layers), lambda: tuple(
            sorted(Counter((shape.sparse(i), shape.skips(i)) for i in layers).items())
        ))  # fmt: skip

    def _layers(self, part: StagePart) -> tuple[Kinds, int] | Sequence[int]:
        """Return the properties of a stage's layers that affect its passes, as a cache key."""
        return part.layers if self.forward.distinguishes_layers else (self.kinds(part), self._begins(part))

    def _begins(self, part: StagePart) -> int:
        """Return the position of a stage's first layer in the order of kinds of layers."""
        experts = self.run.shape.experts
        return part.layers[0] % experts.every if experts and part.layers else 0

    # ---- between steps -------------------------------------------------------------------------------------------

    @cached_property
    def state_key(self) -> tuple:
        """Layout fields that affect a stage's memory between steps."""
        layout = self.run.layout
        experts = layout.expert_shape[2] if self.run.shape.experts else 1
        return (
            layout.sync, layout.zero, layout.shards, experts, layout.bucket_bytes, layout.prefetch,
            layout.reshard_after_forward, *(getattr(layout, name) for name in SPLITTING),
        )  # fmt: skip

    def stage_state(self, parts: Sequence[StagePart]) -> StateBytes:
        """Return the state bytes of some stages together, cached for equal stages."""
        key = (
            self.state_key,
            *((self.kinds(part), self._begins(part), part.first, part.last, part.shared) for part in parts),
        )
        run = self.run
        return self.once(key, lambda: state_bytes(run.shape, run.layout, run.policy, run.optimizer, parts))

    def stage_elements(self, part: StagePart) -> tuple[int, int]:
        """Return a stage's parameters without padding: non-expert and expert parameters. Cached for equal stages."""
        split = tuple(getattr(self.run.layout, name) for name in SPLITTING)
        key = ("elements", split, self.kinds(part), part.first, part.last, part.shared)
        return self.once(key, lambda: count_elements(self.run.shape, self.run.layout, part, 0, 0, 0))

    def unsharded_bytes(self, part: StagePart) -> UnshardedBytes:
        """Return the unsharded tensors of one stage's backward, cached for equal stages."""
        key = ("passing", self.state_key, self.kinds(part), self._begins(part), part.first, part.last, part.shared)
        return self.once(key, lambda: count_unsharded(self.run.shape, self.run.layout, self.run.policy, part))

    def message_counts(self, part: StagePart, zero: int) -> tuple[int, int]:
        """Return the number of messages that gather a stage's parameters or reduce their gradients.

        Counts the messages of non-expert and of expert parameters, for this ZeRO stage.
        """
        layout = self.run.layout
        split = (layout.bucket_bytes, *(getattr(layout, name) for name in SPLITTING))
        key = ("messages", zero == 3, split, self.kinds(part), part.first, part.last, part.shared)

        def count() -> tuple[int, int]:
            as_it_is = layout if (zero == 3) == (layout.zero == 3) else layout.model_copy(update={"zero": zero})
            stage = fill_buckets(self.run.shape, as_it_is, part, self.run.policy.reduce.itemsize, 0, 0, 0)
            experts = sum(size.expert for size in stage.sizes)
            return len(stage.buckets) - experts, experts

        return self.once(key, count)

    # ---- in a step -----------------------------------------------------------------------------------------------

    @cached_property
    def pass_key(self) -> tuple:
        return tuple(getattr(self.run.layout, name) for name in PASS_FIELDS)

    def activation_bytes(self, part: StagePart) -> int:
        """Return the bytes that one micro-batch keeps alive on a stage, cached for equal stages."""
        key = ("kept", self.pass_key, self._layers(part), part.first, part.last)
        return self.once(key, lambda: activations.total(
            activations.stage(self.forward, part.layers, first=part.first, last=part.last)
        ))

    def layers_bytes(self, part: StagePart) -> int:
        """Return the bytes that one micro-batch keeps alive in the layers of a stage alone, cached."""
        key = ("layers kept", self.pass_key, self._layers(part))
        return self.once(key, lambda: activations.total(activations.several(self.forward, part.layers)))

    @property
    def message(self) -> int:
        """Bytes of one micro-batch between two stages."""
        return self.forward.hidden_bytes

    def split_backward_bytes(self, part: StagePart) -> int:
        """Return the bytes of one micro-batch between the halves of its backward on a stage."""
        key = ("between", self.pass_key, self._layers(part), part.first, part.last)
        return self.once(key, lambda: between(self.forward, part))

    def peak_memory(
        self, parts: Sequence[StagePart], alive: Sequence[Alive], versions: int = 1
    ) -> PeakMemory:
        """Return the peak memory of a rank that holds some stages, with the activations alive on each."""
        run, state, found = self.run, self.stage_state(parts), []
        each = [self.unsharded_bytes(part) for part in parts]
        stays = [self._stays(unsharded, at) for unsharded, at in zip(each, alive, strict=True)]
        for i, (part, unsharded) in enumerate(zip(parts, each, strict=True)):
            going, kept = self._of_others(each, stays, i)
            times: dict[Half, list[tuple[Sequence[int], int, Sequence[int]]]] = {}
            for when, most in alive[i].items():
                if when.kind not in times:
                    times[when.kind] = self._times(part, unsharded, when.kind, stays[i])
                options = [(full[when.after], more + made[when.nth]) for full, more, made in times[when.kind]]
                gathered, passing = max(options, key=sum)
                holes = self.fragmentation * (most + self.peak_transient(part, when.kind))
                found.append((most, gathered + kept[when.gathered], passing + going[when.others], holes))
        most, gathered, passing, holes = max(found, key=sum)
        buffers = max(passing + state.estimating, state.updating - most - gathered)  # the update comes after them
        encoded = parts if run.layout.zero < 3 else ()  # a rank keeps the codes of weights that it keeps
        codes = sum(self.forward.weight_codes(part.layers) for part in encoded)
        held = (
            state.parameters + codes, state.gradients, state.optimizer, most, gathered, buffers,
            (versions - 1) * state.elements * run.policy.compute.itemsize,
        )
        return PeakMemory(*held, float(self.library_bytes + holes))

    def peak_transient(self, part: StagePart, kind: Half) -> int:
        """Return the maximum transient bytes in a pass of one stage, cached for equal stages."""
        key = ("most", kind, self.pass_key, self._layers(part), part.first, part.last)
        return self.once(key, lambda: max(moment.bytes for moment in self._moments(part, kind)))

    def _times(
        self, part: StagePart, unsharded: UnshardedBytes, kind: Half, stays: int
    ) -> list[tuple[Sequence[int], int, Sequence[int]]]:
        """Return the bytes at each moment of a pass, also if the moment recurs in a lower layer.

        Each entry has the gathered parameters of the stage (see `Time`), the transient bytes, and the unsharded
        gradients by micro-batch. ``stays`` is from `_stays`.
        """
        found: list[tuple[Sequence[int], int, Sequence[int]]] = []
        for moment in self._moments(part, kind):
            if moment.where != "layer":
                places = [(0, unsharded.end[moment.time] if moment.where == "end" else unsharded.head[moment.time])]
            else:
                counted = self._above(part, moment.done, kind)
                places = [(self._above(part, turn.done, kind) - counted, turn.times[moment.time])
                          for turn in unsharded.layers if turn.sparse == moment.sparse]  # fmt: skip
            for gone, time in places:
                gathered = (0, stays) if kind == "weight" or moment.where == "loss" else time.parameters
                if kind == "forward":  # in a layer, or at its end
                    gathered = (time.parameters if moment.where == "layer" else unsharded.stays)[1:] * 2
                # A full backward or its second half creates weight gradients.
                made = unsharded.carried if kind in ("input", "forward") else time.gradients
                found.append((gathered, moment.bytes - gone, made))
        return found

    def _above(self, part: StagePart, done: int, kind: Half) -> int:
        """Return the bytes freed after the backward of the last ``done`` layers of one micro-batch."""
        key = ("above", kind, self.pass_key, self._layers(part), done)
        return self.once(key, lambda: above(self.forward, part, done, kind))

    @staticmethod
    def _stays(unsharded: UnshardedBytes, alive: Alive) -> int:
        """Return the bytes of a stage's parameters that stay gathered from a forward until its backward."""
        backward_follows = all(when.after for when in alive if when.kind in ("full", "input"))
        return unsharded.stays[backward_follows]

    @staticmethod
    def _of_others(passing: Sequence[UnshardedBytes], stays: Sequence[int], i: int) -> tuple[list[int], list[int]]:
        """Return the bytes of a rank's other stages: gradients being reduced, by micro-batch; and gathered parameters.

        The latter are for none of these stages waiting for its backward, for some, and for all.
        """
        going = [sum(at.carried[nth] for j, at in enumerate(passing) if j != i) for nth in range(NTH)]
        each = [kept for j, kept in enumerate(stays) if j != i]
        return going, [0, sum(each) - min(each, default=0), sum(each)]

    def _moments(self, part: StagePart, kind: Half) -> list[Moment]:
        """Return the moments of a backward or of a half of one, cached for equal stages."""
        key = ("moments", kind, self.pass_key, self._layers(part), part.first, part.last)
        return self.once(key, lambda: moments(self.forward, part, kind))

    def with_holes(self, alive: float) -> float:
        """Return the bytes that the allocator reserves for this many bytes of activations."""
        return (1 + self.fragmentation) * alive


def device_capacity(cluster: Cluster, calibration: Calibration) -> float:
    """Return the bytes of a cluster's device available to a process."""
    return cluster.memory_bytes * (calibration.numbers["usable"] if cluster.accelerator.is_gpu else 1.0)


def library_bytes(cluster: Cluster, calibration: Calibration) -> float:
    """Return the bytes of a cluster's device used by libraries and the process."""
    if not cluster.accelerator.is_gpu:
        return 0.0
    return (calibration.numbers["base"] + calibration.numbers["context"]) * GB
