"""Engine for data parallelism and ZeRO: shards parameters, reduces gradients and gathers weights.

    stage     parameters   gradients    optimizer    collectives per step (Psi parameters, n micro-batches)
    0 (DDP)   replicated   full         replicated   all-reduce Psi
    1         replicated   full         sharded      reduce-scatter Psi, all-gather Psi
    2         replicated   sharded      sharded      n reduce-scatter Psi, all-gather Psi
    3         sharded      sharded      sharded      n reduce-scatter Psi, 2n all-gather Psi

(Rajbhandari et al. 2020, "ZeRO", sections 5 and 7.) A bucket's gradients are reduced as soon as backward has produced
the last of them. Stages 0 and 1 keep full gradients and reduce once per step, in the last micro-batch. Stages 2 and 3
have no memory to accumulate full gradients and reduce in every micro-batch.

All ranks start reductions in the same order, the reverse of forward. A parameter without a gradient on some rank
therefore cannot change the order. Buckets that are incomplete at the end of a backward are reduced then, with zeros for
missing gradients.

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
from typing import Any

from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending, reduce_scatter_flat, start_all_reduce, sum_together
from shoal.engine.parallel.placement import ENDS
from shoal.engine.parallel.zero.bucket import (
    Bucket,
    DataParallelGroups,
    Member,
    OffloadStreams,
    group_into_buckets,
    same_memory,
)
from shoal.engine.parallel.zero.gradients import Gradients, Term
from shoal.engine.precision.policy import Policy


@dataclass
class _Reduction:
    """Reduce-scatter in flight; keeps ``full`` alive until it completes."""

    gradients: Gradients
    shard: Tensor
    full: Tensor
    work: Pending | None
    last: bool


class ShardedParameters:
    """Parameters of one pipeline stage, their gradients, and the collectives that keep replicas equal.

    Args:
        units: groups of parameters in forward order, which may be on the meta device. A bucket holds complete units.
        mesh: its "shard" ranks shard, its "replicate" ranks replicate; for experts "edp_shard" and "edp_replicate".
        trained: whether the parameters get gradients; without, no memory is allocated for them.

    Attributes:
        last_microbatch: whether the current micro-batch completes the gradients of the step.
        watch: called with each parameter and its accumulated gradient after every addition.
        on_reduction: called with a bucket's number and True when the reduction of its gradients starts, and with False
            when this rank has the result.
    """

    def __init__(self, units: list[list[Member]], mesh: Mesh, policy: Policy, *, trained: bool = True):
        self.mesh = mesh
        self.zero = mesh.layout.zero
        axes = {"replicas"} | {placement.replicas for unit in units for _, placement in unit}
        groups = {axis: DataParallelGroups.along(axis, mesh) for axis in sorted(axes)}
        limit = 0 if self.zero == 3 else mesh.layout.bucket_bytes
        streams = OffloadStreams(mesh.device)
        self.buckets = [
            Bucket(
                members, groups[members[0][1].replicas], policy, mesh.device,
                keep_full=self.zero < 3, offload=mesh.layout.offload, streams=streams,
            )
            for members in group_into_buckets(units, limit, policy.reduce.itemsize)
        ]
        self.gradients = [Gradients(bucket, keep_full=self.zero < 2) for bucket in self.buckets] if trained else []
        self.places = {
            slot.parameter: (b, i) for b, bucket in enumerate(self.buckets) for i, slot in enumerate(bucket.slots)
        }
        self.overlap = mesh.layout.overlap
        place = {parameter: i for i, (parameter, _) in enumerate(chain.from_iterable(units))}
        first = [min(place[slot.parameter] for slot in bucket.slots) for bucket in self.buckets]
        self.order = sorted(range(len(self.buckets)), key=lambda b: -first[b])  # of the reductions: reverse forward
        self._completed: list[int] = []  # buckets completed by the current backward
        self._started = 0  # number of reductions started in it
        self.last_microbatch = True
        self.watch: Callable[[nn.Parameter, Tensor], object] | None = None
        self.on_reduction: Callable[[int, bool], object] | None = None
        self._later: list[tuple[Sequence[nn.Parameter], Term]] | None = None
        self._deferred: dict[Hashable, list[tuple[Sequence[nn.Parameter], Term]]] = {}
        self._scattering: list[_Reduction] = []
        self._replicating: list[tuple[Gradients, Pending]] = []
        # A parameter owns its hook outside the garbage collector's view, and this engine owns the parameter: the hook
        # must not own the engine.
        take_gradient: Callable[[], Any] = weakref.WeakMethod(self._take_gradient)
        for parameter in self.places:
            parameter.register_post_accumulate_grad_hook(lambda parameter: take_gradient()(parameter))

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
        self._end_backward()
        self._end_accumulation()

    @contextmanager
    def deferred(self, key: Hashable) -> Iterator[None]:
        """Defer gradient terms of backwards in this context until `add_deferred`."""
        self._later = self._deferred[key] = []
        try:
            yield
        finally:
            self._later = None
        self._end_backward()

    @property
    def deferring(self) -> bool:
        """Whether a backward runs inside `deferred`."""
        return self._later is not None

    def add_deferred(self, key: Hashable) -> None:
        """Accumulate the terms deferred under this key, and start the reductions of complete buckets."""
        for parameters, term in self._deferred.pop(key):
            self._add(parameters, term)
        self._end_accumulation()

    def are_adjacent(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the parameters are adjacent in one bucket."""
        b, i = self.places[parameters[0]]
        return [self.places[p] for p in parameters] == [(b, i + k) for k in range(len(parameters))]

    def add(self, parameters: Sequence[nn.Parameter], term: Term) -> None:
        """Accumulate a gradient term of a parameter, or of several adjacent matrices."""
        if self._later is None:
            self._add(parameters, term)
        else:
            self._later.append((parameters, term))
        b, _ = self.places[parameters[0]]
        gradients = self.gradients[b]
        gradients.pending_backward -= len(parameters)
        if gradients.pending_backward == 0 and self.zero == 3:
            self.buckets[b].free()

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        """Accumulate the gradient that autograd computed for a parameter, possibly None."""
        gradient = parameter.grad
        if gradient is None:
            return
        b, i = self.places[parameter]
        views = self.gradients[b].views
        if views and same_memory(gradient, views[i]):
            self.add([parameter], lambda total, fresh: None)  # already added in place
        else:
            parameter.grad = None
            self.add([parameter], partial(self._copy, parameter, gradient))

    def _copy(self, parameter: nn.Parameter, gradient: Tensor, total: Tensor, fresh: bool) -> None:
        (total.copy_ if fresh else total.add_)(gradient)
        if self.zero < 2 and total.dtype == parameter.dtype:
            parameter.grad = total  # autograd adds the next micro-batch's gradient in place

    def _add(self, parameters: Sequence[nn.Parameter], term: Term) -> None:
        b, i = self.places[parameters[0]]
        gradients = self.gradients[b]
        if self.zero == 3 and gradients.pending_accumulation < len(parameters):
            raise UsageError(f"parallel.zero = 3: {self.buckets[b].slots[i].placement.name} has a gradient after those "
                             "of its block were summed: it is used outside of the block.\n  Leave the block out.")
        totals = gradients.add(i, term, len(parameters))
        if self.watch:
            for parameter, total in zip(parameters, totals, strict=True):
                self.watch(parameter, total)
        if gradients.pending_accumulation == 0:
            self._completed.append(b)
            if self.zero >= 2 or self.overlap:
                self._reduce_complete()

    def _end_backward(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            if gradients.pending_backward and self.zero == 3:
                bucket.free()
            gradients.pending_backward = gradients.terms

    def _end_accumulation(self) -> None:
        for gradients in self.gradients:
            gradients.pending_accumulation = gradients.terms
        self._complete(self.order)
        self._completed, self._started = [], 0

    def complete(self, buckets: Iterable[Bucket]) -> None:
        """Mark buckets complete: their remaining parameters get no gradient in this backward."""
        if self._later is None:
            numbers = [self.buckets.index(bucket) for bucket in buckets]
            for b in numbers:
                self.gradients[b].pending_accumulation = 0
            self._complete(numbers)

    def _complete(self, buckets: Iterable[int]) -> None:
        self._completed += [b for b in buckets if b not in self._completed]
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Start the next reductions in order, up to the first incomplete bucket."""
        if self.zero < 2 and not self.last_microbatch:
            return
        while self._started < len(self.order) and (b := self.order[self._started]) in self._completed:
            self._started += 1
            self._reduce(self.gradients[b])

    def _reduce(self, gradients: Gradients) -> None:
        """Start reducing a bucket's gradients over its shard group."""
        self._tell(gradients, starts=True)
        full, shard = gradients.take()
        work, group = None, gradients.bucket.groups.reduce_group
        if group is not None:
            work = reduce_scatter_flat(shard, full, group)
        elif not same_memory(shard, full):
            shard.copy_(full)
        self._scattering.append(_Reduction(gradients, shard, full, work, self.last_microbatch))
        # If full gradients are freed, only one bucket may be in flight, so at most two are alive.
        ahead = 1 if self.zero >= 2 else len(self.buckets)
        self._wait_reductions(keep=ahead if work is not None and self.overlap else 0)

    def _wait_reductions(self, keep: int = 0) -> None:
        """Wait for the oldest reductions until only ``keep`` are in flight."""
        while len(self._scattering) > keep:
            reduction = self._scattering.pop(0)
            if reduction.work is not None:
                reduction.work.wait()
            shard = reduction.gradients.shard
            if reduction.shard is not shard:
                shard += reduction.shard
            group = reduction.gradients.bucket.groups.replicate_group
            if reduction.last and group is not None:
                self._replicating.append((reduction.gradients, start_all_reduce(shard, group)))
                continue
            self._tell(reduction.gradients, starts=False)
            if reduction.last:
                reduction.gradients.on_reduced()

    def _tell(self, gradients: Gradients, *, starts: bool) -> None:
        if self.on_reduction:
            self.on_reduction(self.gradients.index(gradients), starts)

    def finish(self) -> None:
        """Complete the gradients: wait for replica sums, reduce partial sums of tensor parallelism and model copies.

        `shoal.engine.parallel.zero.rank_parameters` sums parameters shared by the model's first and last stages.
        """
        self._wait_reductions()
        for gradients, work in self._replicating:
            work.wait()
            self._tell(gradients, starts=False)
            gradients.on_reduced()  # while other reductions are in flight
        self._replicating.clear()
        partial: dict[str, list[Tensor]] = defaultdict(list)
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for segment in bucket.segments:
                for axis in segment.sum_over:
                    if axis != ENDS:
                        partial[axis].append(gradients.shard[segment.slice])
        for axis, parts in sorted(partial.items()):
            sum_together(parts, self.mesh.group(axis))
        for gradients in self.gradients:
            gradients.finalise()
        for gradients in self.gradients:
            gradients.arrive()

    def gather(self) -> None:
        """Gather updated parameters after the step, if full parameters persist."""
        for bucket in self.buckets:
            bucket.mark_dirty()
            if bucket.keep_full:
                bucket.gather()
        for bucket in self.buckets:
            bucket.wait()
