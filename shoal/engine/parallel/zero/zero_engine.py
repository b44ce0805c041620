"""Data parallelism in all its stages: one engine, which differs in what stays whole and when it is reduced.

    stage     parameters   gradients    optimizer    collectives per step (Psi parameters, n micro-batches)
    0 (DDP)   whole        whole        whole        all-reduce Psi
    1         whole        whole        sharded      reduce-scatter Psi, all-gather Psi
    2         whole        sharded      sharded      n reduce-scatter Psi, all-gather Psi
    3         sharded      sharded      sharded      n reduce-scatter Psi, 2n all-gather Psi

(Rajbhandari et al. 2020, "ZeRO", sections 5 and 7.) Parameters lie in buckets (`shoal.engine.parallel.zero.bucket`); a
bucket's gradients are reduced as soon as backward has produced the last of them, while backward goes on. Stages 0 and
1 keep whole gradients and so reduce once a step, in the last micro-batch; stages 2 and 3 have no place to accumulate
whole gradients, and reduce in each.

All ranks start the reductions in one order: that in which the first backward of rank 0 completed the buckets. A
parameter that gets no gradient on some rank thus cannot make it reduce another bucket than the rest; what is not
complete when a backward ends is reduced then, with zeros where nothing came.

Gradients are sums, never means: the loss is divided by the global number of tokens before backward.
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
    """A reduce-scatter on its way; ``whole`` is kept alive until it has arrived."""

    gradients: Gradients
    shard: Tensor
    whole: Tensor
    work: Pending | None
    last: bool


@dataclass(frozen=True)
class DataParallelGroups:
    """The ranks along one axis of the mesh, "replicas" or "edp", that hold the same parameters.

    Attributes:
        shard_group: over which they are sharded.
        replicate_group: that hold the same shard.
        shards, index: the size of the first, and this rank's place in it.
        copies, copy: of the second.
    """

    shard_group: Group | None
    replicate_group: Group | None
    shards: int
    index: int
    copies: int
    copy: int

    @staticmethod
    def along(axis: str, mesh: Mesh) -> DataParallelGroups:
        """Those of a mesh."""
        shard, replicate = ("edp_shard", "edp_replicate") if axis == "edp" else ("shard", "replicate")
        return DataParallelGroups(
            mesh.group(shard), mesh.group(replicate),
            mesh.size(shard), mesh.index(shard), mesh.size(replicate), mesh.index(replicate),
        )


class ShardedParameters:
    """The parameters of one pipeline stage, their gradients, and the collectives that keep replicas equal.

    Args:
        units: groups of parameters in forward order, each (parameter, its split, whether it decays); the parameters may
            be on the meta device. A bucket holds whole units.
        mesh: its "shard" ranks shard, its "replicate" ranks replicate; for experts "edp_shard" and "edp_replicate".
        policy: the number formats.

    Attributes:
        last_microbatch: whether what is added now completes the gradients of the step.
        watch: called with each parameter and the sum of its gradients, as that grows.
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
        # Of the reductions, the last used first; a guess, until a backward has shown it.
        self.order = sorted(range(len(self.buckets)), key=lambda b: -first[b])
        self._shown: list[int] | None = None
        self._learned = len(self.buckets) == 1
        self._completed: list[int] = []  # buckets, by the backward under way
        self._started = 0  # reductions, in it
        self.last_microbatch = True
        self.watch: Callable[[nn.Parameter, Tensor], object] | None = None
        self._later: list[tuple[Sequence[nn.Parameter], Term]] | None = None
        self._deferred: dict[Hashable, list[tuple[Sequence[nn.Parameter], Term]]] = {}
        self._scattering: list[_Reduction] = []
        self._replicating: list[tuple[Gradients, Pending]] = []
        # A parameter owns its hook where Python's garbage collector does not look, and this engine owns the parameter:
        # the hook must not own the engine.
        alive = weakref.ref(self)

        def made(parameter: nn.Parameter) -> None:
            engine = alive()
            assert engine is not None
            engine._made(parameter)

        for parameter in self.places:
            parameter.register_post_accumulate_grad_hook(made)

    def shard_group(self, bucket: Bucket) -> Group | None:
        """The ranks that hold the shards of a bucket."""
        return self.replicas[bucket.replicas].shard_group

    def expect(self, given: Mapping[Tensor, int]) -> None:
        """How many gradients each backward will `add` of these parameters; of others, autograd makes one."""
        for gradients in self.gradients:
            gradients.expect(given)

    # ---- one step ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for gradients in self.gradients:
            gradients.begin()

    def backward_done(self) -> None:
        """A backward has made and added all that it will. To be called after each, but in or after `deferred`."""
        self._end_making()
        self._end_adding()

    @contextmanager
    def deferred(self, key: Hashable) -> Iterator[None]:
        """Backward in this context only makes the gradients' terms; `add_deferred` adds them."""
        self._later = self._deferred[key] = []
        try:
            yield
        finally:
            self._later = None
        self._end_making()

    def add_deferred(self, key: Hashable) -> None:
        """Add what the backward with this key left for later, and start the reductions of what is complete."""
        for parameters, term in self._deferred.pop(key):
            self._add(parameters, term)
        self._end_adding()

    def lie_end_to_end(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are consecutive in one bucket."""
        b, i = self.places[parameters[0]]
        return [self.places[p] for p in parameters] == [(b, i + k) for k in range(len(parameters))]

    def add(self, parameters: nn.Parameter | Sequence[nn.Parameter], term: Term) -> None:
        """Backward gives a term of a parameter's gradient, or of several matrices' that lie end to end."""
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
        """Autograd has made a parameter's gradient, or (None) was told that there is none to make."""
        gradient = parameter.grad
        if gradient is None:
            return
        b, i = self.places[parameter]
        views = self.gradients[b].views
        if views and same_memory(gradient, views[i]):
            self.add(parameter, lambda total, fresh: None)  # it was added in place
        else:
            parameter.grad = None
            self.add(parameter, partial(self._copy, parameter, gradient))

    def _copy(self, parameter: nn.Parameter, gradient: Tensor, total: Tensor, fresh: bool) -> None:
        (total.copy_ if fresh else total.add_)(gradient)
        if self.zero < 2 and total.dtype == parameter.dtype:
            parameter.grad = total  # autograd adds the next micro-batch's in place

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
        """Backward will make no more gradients of these: what has none yet gets none."""
        if self._later is None:
            self._complete([self.buckets.index(bucket) for bucket in buckets])

    def _complete(self, buckets: Iterable[int]) -> None:
        self._completed += [b for b in buckets if b not in self._completed]
        self._reduce_complete()

    def _learn_order(self) -> None:
        """Take the order that the first backward has shown on the first of the replicas, or of the stage's ranks."""
        axis = "stage" if "edp" in self.replicas else "replicas"
        assert self._shown is not None  # a backward was before
        self.order, self._learned = broadcast_ints(self._shown, self.mesh.group(axis), self.mesh.device), True

    def _reduce_complete(self) -> None:
        """Start the reductions that are next in order, as far as buckets are complete."""
        if self.zero < 2 and not self.last_microbatch:
            return
        while self._started < len(self.order) and (b := self.order[self._started]) in self._completed:
            self._started += 1
            self._reduce(self.gradients[b])

    def _reduce(self, gradients: Gradients) -> None:
        """Start summing a bucket's gradients over the ranks that shard it."""
        whole, shard = gradients.take()
        work, group = None, self.replicas[gradients.bucket.replicas].shard_group
        if group is not None:
            work = reduce_scatter_flat(shard, whole, group)
        elif not same_memory(shard, whole):
            shard.copy_(whole)
        self._scattering.append(_Reduction(gradients, shard, whole, work, self.last_microbatch))
        # Where whole gradients are freed, only one bucket may be on its way: so two at most are alive.
        ahead = 1 if self.zero >= 2 else len(self.buckets)
        self._settle(keep=ahead if work is not None and self.overlap else 0)

    def _settle(self, keep: int = 0) -> None:
        """Wait for reductions that were started, oldest first, until ``keep`` are on their way."""
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
        """Complete the gradients: wait for the replicas' sums, add what tensor parallelism and copies left partial.

        What the ends of the model share is summed by `shoal.engine.parallel.zero.rank_parameters`, which knows both.
        """
        self._settle()
        if not self._learned:
            self._learn_order()
        for gradients, work in self._replicating:
            work.wait()
            gradients.on_reduced()  # while the others are on their way
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
        """This rank's share of the squared gradient norm, float64; summed over all ranks it is the model's.

        What several ranks hold is divided by their number, so that every element counts once.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            copies = self.replicas[bucket.replicas].copies
            for run in bucket.runs:
                total += gradients.square(run).to(total.device) / (run.copies * copies)
        return total

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for gradients in self.gradients:
            gradients.update.mul_(factor)

    def gather(self) -> None:
        """After the step: make the updated parameters whole where they stay whole."""
        for bucket in self.buckets:
            bucket.mark_dirty()
            if bucket.keep_full:
                bucket.gather(self.shard_group(bucket))
        for bucket in self.buckets:
            bucket.wait()

    # ---- what it holds -----------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[ShardSegment, Tensor, Tensor]]:
        """What the optimizer updates: (run, flat weights, flat gradients) of this rank's shards, as views."""
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for run in bucket.runs:
                yield run, bucket.master[run.slice], gradients.update[run.slice]

    def pieces(self, tensors: Iterable[Tensor]) -> dict[str, list[Piece]]:
        """Name the parts of tensors that lie like the shards of the buckets (weights, gradients, moments).

        Args:
            tensors: for each of `runs`, in order, a flat tensor of its length.
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
        """The pieces of the parameters that this rank updates."""
        return self.pieces(weight for _, weight, _ in self.runs())

    def reduced_gradients(self) -> dict[str, list[Piece]]:
        """The pieces of their gradients, complete after `finish`."""
        return self.pieces(gradient for _, _, gradient in self.runs())

    def bytes(self) -> dict[str, int]:
        """Bytes alive between steps, by what they hold: parameters (whole, shards and master) and gradients on the
        device; and what is offloaded to the host."""
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
