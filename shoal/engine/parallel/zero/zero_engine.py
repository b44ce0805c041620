"""Engine for data parallelism and ZeRO: shards parameters, reduces gradients and gathers weights.

    stage     parameters   gradients    optimizer    collectives per step (Psi parameters, n micro-batches)
    0 (DDP)   replicated   full         replicated   all-reduce Psi
    1         replicated   full         sharded      reduce-scatter Psi, all-gather Psi
    2         replicated   sharded      sharded      n reduce-scatter Psi, all-gather Psi
    3         sharded      sharded      sharded      n reduce-scatter Psi, 2n all-gather Psi

(Rajbhandari et al. 2020, "ZeRO", sections 5 and 7.) Parameters are stored in buckets
(`shoal.engine.parallel.zero.bucket`). A bucket's gradients are reduced as soon as backward has produced the last of
them, overlapping the rest of backward. Stages 0 and 1 keep full gradients and reduce once per step, in the last
micro-batch. Stages 2 and 3 have no memory to accumulate full gradients and reduce in every micro-batch.

All ranks start reductions in the same order, in which the first backward of rank 0 completed the buckets. A
parameter without a gradient on some rank therefore cannot change the order. Buckets that are incomplete at the end of a
backward are reduced then, with zeros for missing gradients.

Gradients are sums, not means: the loss is divided by the global number of tokens before backward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from shoal.base.boxes import Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending, all_reduce, broadcast_ints, reduce_scatter_flat, start_all_reduce
from shoal.engine.parallel.placement import ENDS, ParamPlacement
from shoal.engine.parallel.zero.bucket import Bucket, ShardSegment, grouped, same_memory
from shoal.engine.parallel.zero.gradients import Gradients, Term
from shoal.engine.precision.policy import Policy


@dataclass
class _Reduction:
    """Reduce-scatter in flight; keeps ``whole`` alive until it completes."""

    gradients: Gradients
    shard: Tensor
    whole: Tensor
    work: Pending | None
    last: bool


@dataclass(frozen=True)
class DataParallelGroups:
    """Ranks along one mesh axis, "replicas" or "edp", that hold the same parameters.

    Attributes:
        shard_group: the ranks over which the parameters are sharded.
        replicate_group: the ranks that hold the same shard.
        shards, index: size of ``shard_group``, and this rank's index in it.
        copies, copy: size of ``replicate_group``, and this rank's index in it.
    """

    shard_group: Group | None
    replicate_group: Group | None
    shards: int
    index: int
    copies: int
    copy: int

    @staticmethod
    def along(axis: str, mesh: Mesh) -> DataParallelGroups:
        """Return the groups along an axis of a mesh."""
        shard, replicate = ("edp_shard", "edp_replicate") if axis == "edp" else ("shard", "replicate")
        return DataParallelGroups(
            mesh.group(shard), mesh.group(replicate),
            mesh.size(shard), mesh.index(shard), mesh.size(replicate), mesh.index(replicate),
        )


class ShardedParameters:
    """Parameters of one pipeline stage, their gradients, and the collectives that keep replicas equal.

    Args:
        units: groups of parameters in forward order, each (parameter, placement, whether it decays); the parameters may
            be on the meta device. A bucket holds complete units.
        mesh: its "shard" ranks shard, its "replicate" ranks replicate; for experts "edp_shard" and "edp_replicate".
        policy: the number formats.

    Attributes:
        last_microbatch: whether the current micro-batch completes the gradients of the step.
        watch: called with each parameter and its accumulated gradient after every addition.
    """

    def __init__(
        self,
        units: list[list[tuple[nn.Parameter, ParamPlacement, bool]]],
        mesh: Mesh,
        policy: Policy,
    ):
        self.mesh, self.policy = mesh, policy
        self.zero = mesh.layout.zero
        axes = {"replicas"} | {split.replicas for unit in units for _, split, _ in unit}
        self.replicas = {axis: DataParallelGroups.along(axis, mesh) for axis in sorted(axes)}
        limit = 0 if self.zero == 3 else mesh.layout.bucket_bytes
        self.buckets = []
        for members in grouped(units, limit, policy.reduce.itemsize):
            here = self.replicas[members[0][1].replicas]
            bucket = Bucket(
                members,
                shards=here.shards,
                index=here.index,
                policy=policy,
                device=mesh.device,
                keep_full=self.zero < 3,
                offload=mesh.layout.offload,
                group=here.shard_group,
            )
            self.buckets.append(bucket)
        self.gradients = [
            Gradients(bucket, keep_whole=self.zero < 2, group=here.shard_group or here.replicate_group)
            for bucket in self.buckets for here in [self.replicas[bucket.replicas]]
        ]
        self.places = {
            slot.parameter: (b, i) for b, bucket in enumerate(self.buckets) for i, slot in enumerate(bucket.slots)
        }
        self.overlap = mesh.layout.overlap
        place = {parameter: i for i, (parameter, *_) in enumerate(chain.from_iterable(units))}
        first = [min(place[slot.parameter] for slot in bucket.slots) for bucket in self.buckets]
        # Order of the reductions: reverse forward order until a backward has shown the actual one.
        self.order = sorted(range(len(self.buckets)), key=lambda b: -first[b])
        self._shown: list[int] | None = None
        self._learned = len(self.buckets) == 1
        self._completed: list[int] = []  # buckets completed by the current backward
        self._started = 0  # number of reductions started in it
        self.last_microbatch = True
        self.watch: Callable[[nn.Parameter, Tensor], object] | None = None
        self._later: list[tuple[Sequence[nn.Parameter], Term]] | None = None
        self._deferred: dict[Hashable, list[tuple[Sequence[nn.Parameter], Term]]] = {}
        self._scattering: list[_Reduction] = []
        self._replicating: list[tuple[Gradients, Pending]] = []
        # A parameter owns its hook outside the garbage collector's view, and this engine owns the parameter: the hook
        # must not own the engine.
        alive = weakref.ref(self)

        def made(parameter: nn.Parameter) -> None:
            engine = alive()
            assert engine is not None
            engine._made(parameter)

        for parameter in self.places:
            parameter.register_post_accumulate_grad_hook(made)

    def shard_group(self, bucket: Bucket) -> Group | None:
        """Return the ranks that hold the shards of a bucket."""
        return self.replicas[bucket.replicas].shard_group

    def expect(self, given: Mapping[Tensor, int]) -> None:
        """Set how many gradient terms each backward passes to `add` for these parameters; autograd gives others one."""
        for gradients in self.gradients:
            gradients.expect(given)

    # ---- one step ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Reset the gradients for a new step."""
        for gradients in self.gradients:
            gradients.begin()

    def backward_done(self) -> None:
        """Finish a backward. Call it after each one, but inside or after `deferred`."""
        self._end_making()
        self._end_adding()

    @contextmanager
    def deferred(self, key: Hashable) -> Iterator[None]:
        """Defer gradient terms of backwards in this context until `add_deferred`."""
        self._later = self._deferred[key] = []
        try:
            yield
        finally:
            self._later = None
        self._end_making()

    def add_deferred(self, key: Hashable) -> None:
        """Accumulate the terms deferred under this key, and start the reductions of complete buckets."""
        for parameters, term in self._deferred.pop(key):
            self._add(parameters, term)
        self._end_adding()

    def lie_end_to_end(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the parameters are adjacent in one bucket."""
        b, i = self.places[parameters[0]]
        return [self.places[p] for p in parameters] == [(b, i + k) for k in range(len(parameters))]

    def add(self, parameters: nn.Parameter | Sequence[nn.Parameter], term: Term) -> None:
        """Accumulate a gradient term of a parameter, or of several adjacent matrices."""
        together = [parameters] if isinstance(parameters, nn.Parameter) else parameters
        if self._later is None:
            self._add(together, term)
        else:
            self._later.append((together, term))
        b, _ = self.places[together[0]]
        gradients = self.gradients[b]
        gradients.pending_backward -= len(together)
        if gradients.pending_backward == 0 and self.zero == 3:
            self.buckets[b].free()

    def _made(self, parameter: nn.Parameter) -> None:
        """Handle the gradient that autograd computed for a parameter, possibly None."""
        gradient = parameter.grad
        if gradient is None:
            return
        b, i = self.places[parameter]
        views = self.gradients[b].views
        if views and same_memory(gradient, views[i]):
            self.add(parameter, lambda total, fresh: None)  # already added in place
        else:
            parameter.grad = None
            self.add(parameter, partial(self._copy, parameter, gradient))

    def _copy(self, parameter: nn.Parameter, gradient: Tensor, total: Tensor, fresh: bool) -> None:
        (total.copy_ if fresh else total.add_)(gradient)
        if self.zero < 2 and total.dtype == parameter.dtype:
            parameter.grad = total  # autograd adds the next micro-batch's gradient in place

    def _add(self, parameters: Sequence[nn.Parameter], term: Term) -> None:
        b, i = self.places[parameters[0]]
        gradients = self.gradients[b]
        totals = gradients.add(i, term, len(parameters))
        if self.watch:
            for parameter, total in zip(parameters, totals, strict=True):
                self.watch(parameter, total)
        if gradients.pending_accumulation == 0:
            self._completed.append(b)
            if self.zero >= 2 or self.overlap:
                self._reduce_complete()

    def _end_making(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            if gradients.pending_backward and self.zero == 3:
                bucket.free()
            gradients.pending_backward = gradients.terms

    def _end_adding(self) -> None:
        for gradients in self.gradients:
            gradients.pending_accumulation = gradients.terms
        self._complete(self.order)
        if self._shown is None:
            self._shown = self._completed
        self._completed, self._started = [], 0

    def passed(self, buckets: Iterable[Bucket]) -> None:
        """Mark buckets whose remaining parameters get no gradient in this backward."""
        if self._later is None:
            self._complete([self.buckets.index(bucket) for bucket in buckets])

    def _complete(self, buckets: Iterable[int]) -> None:
        self._completed += [b for b in buckets if b not in self._completed]
        self._reduce_complete()

    def _learn_order(self) -> None:
        """Broadcast the bucket order of the first backward from the first rank of the replicas or of the stage."""
        axis = "stage" if "edp" in self.replicas else "replicas"
        assert self._shown is not None  # set by a previous backward
        self.order, self._learned = broadcast_ints(self._shown, self.mesh.group(axis), self.mesh.device), True

    def _reduce_complete(self) -> None:
        """Start the next reductions in order, up to the first incomplete bucket."""
        if self.zero < 2 and not self.last_microbatch:
            return
        while self._started < len(self.order) and (b := self.order[self._started]) in self._completed:
            self._started += 1
            self._reduce(self.gradients[b])

    def _reduce(self, gradients: Gradients) -> None:
        """Start reducing a bucket's gradients over its shard group."""
        whole, shard = gradients.take()
        work, group = None, self.replicas[gradients.bucket.replicas].shard_group
        if group is not None:
            work = reduce_scatter_flat(shard, whole, group)
        elif not same_memory(shard, whole):
            shard.copy_(whole)
        self._scattering.append(_Reduction(gradients, shard, whole, work, self.last_microbatch))
        # If full gradients are freed, only one bucket may be in flight, so at most two are alive.
        ahead = 1 if self.zero >= 2 else len(self.buckets)
        self._settle(keep=ahead if work is not None and self.overlap else 0)

    def _settle(self, keep: int = 0) -> None:
        """Wait for the oldest reductions until only ``keep`` are in flight."""
        while len(self._scattering) > keep:
            reduction = self._scattering.pop(0)
            if reduction.work is not None:
                reduction.work.wait()
            shard = reduction.gradients.shard
            if reduction.shard is not shard:
                shard += reduction.shard
            group = self.replicas[reduction.gradients.bucket.replicas].replicate_group
            if reduction.last and group is not None:
                self._replicating.append((reduction.gradients, start_all_reduce(shard, group)))
            elif reduction.last:
                reduction.gradients.on_reduced()

    def finish(self) -> None:
        """Complete the gradients: wait for replica sums, reduce partial sums of tensor parallelism and model copies.

        `shoal.engine.parallel.zero.rank_parameters` sums parameters shared by the model's first and last stages.
        """
        self._settle()
        if not self._learned:
            self._learn_order()
        for gradients, work in self._replicating:
            work.wait()
            gradients.on_reduced()  # while other reductions are in flight
        self._replicating.clear()
        partial: dict[str, list[Tensor]] = defaultdict(list)
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for run in bucket.runs:
                for axis in run.sum_over:
                    if axis != ENDS:
                        partial[axis].append(gradients.shard[run.slice])
        for axis, parts in sorted(partial.items()):
            if len(parts) == 1:
                all_reduce(parts[0], self.mesh.group(axis))
                continue
            total = torch.cat(parts)
            all_reduce(total, self.mesh.group(axis))
            for part, summed in zip(parts, total.split([p.numel() for p in parts]), strict=True):
                part.copy_(summed)
        for gradients in self.gradients:
            gradients.finalise()

    def square_norm(self) -> Tensor:
        """Return this rank's share of the squared gradient norm, float64; the sum over all ranks is the global value.

        Elements held by several ranks are divided by their number, so each counts once.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            copies = self.replicas[bucket.replicas].copies
            for run in bucket.runs:
                total += gradients.square(run).to(total.device) / (run.copies * copies)
        return total

    def scale(self, factor: float) -> None:
        """Multiply every gradient by a factor."""
        for gradients in self.gradients:
            gradients.update.mul_(factor)

    def gather(self) -> None:
        """Gather updated parameters after the step, if full parameters persist."""
        for bucket in self.buckets:
            bucket.mark_dirty()
            if bucket.keep_full:
                bucket.gather(self.shard_group(bucket))
        for bucket in self.buckets:
            bucket.wait()

    # ---- contents ----------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[ShardSegment, Tensor, Tensor]]:
        """Yield (segment, flat weights, flat gradients) of this rank's shards, as views for the optimizer."""
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for run in bucket.runs:
                yield run, bucket.master[run.slice], gradients.update[run.slice]

    def pieces(self, tensors: Iterable[Tensor]) -> dict[str, list[Piece]]:
        """Return, by parameter name, the pieces of tensors laid out like the shards (weights, gradients, moments).

        Args:
            tensors: a flat tensor for each item of `runs`, in order.
        """
        named: dict[str, list[Piece]] = {}
        tensors = iter(tensors)
        for bucket in self.buckets:
            primary = self.replicas[bucket.replicas].copy == 0
            for run in bucket.runs:
                for name, piece in bucket.pieces(next(tensors), run.start):
                    piece.primary &= primary
                    named.setdefault(name, []).append(piece)
        return named

    def weights(self) -> dict[str, list[Piece]]:
        """Return the weights that this rank updates, as pieces by name."""
        return self.pieces(weight for _, weight, _ in self.runs())

    def reduced_gradients(self) -> dict[str, list[Piece]]:
        """Return the gradients of these weights, complete after `finish`, as pieces by name."""
        return self.pieces(gradient for _, _, gradient in self.runs())

    def bytes(self) -> dict[str, int]:
        """Return the bytes allocated between steps: parameters (full, shards, master) and gradients on the device, and
        offloaded tensors on the host.
        """
        storages: dict[str, dict[int, int]] = {"parameters": {}, "gradients": {}, "host": {}}
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            held: dict[str, list[Tensor]] = {"parameters": [bucket.full], "gradients": [gradients.shard], "host": []}
            held["parameters"] += [] if bucket.shard is None else [bucket.shard]
            held["host" if bucket.offloaded else "parameters"].append(bucket.master)
            held["host" if bucket.offloaded else "gradients"].append(gradients.update)
            for kind, tensors in held.items():
                for tensor in tensors:
                    storage = tensor.untyped_storage()
                    storages[kind][storage._cdata] = storage.nbytes()
        return {kind: sum(sizes.values()) for kind, sizes in storages.items()}
