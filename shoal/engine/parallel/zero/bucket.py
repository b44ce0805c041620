"""Bucket: adjacent parameters in one flat buffer, cut into equal shards.

Parameters are views of the buffer, so collectives over all of them need no copy, and the optimizer updates one flat
array. Shards are cut at equal sizes, possibly inside a row; `Bucket.pieces` returns the parts of each parameter as
boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.group import Group, allocate
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending, all_gather_flat
from shoal.engine.parallel.placement import ENDS, ParamPlacement
from shoal.engine.precision.policy import Policy
from shoal.engine.streams import Mark, SideStream, host_zeros

_ALIGN = 64  # elements: aligns shards to vector registers and cache lines

Member = tuple[nn.Parameter, ParamPlacement]
T = TypeVar("T")


@dataclass(frozen=True)
class DataParallelGroups:
    """Ranks along one mesh axis, "replicas" or "edp", that hold the same parameters.

    Attributes:
        reduce_group: the same ranks, for the sum of gradients. ZeRO-3 on CUDA has a second group for it, as NCCL runs
            the collectives of one group in sequence: a gather, which the next layer waits for, would wait for a sum.
        copies, copy: size of ``replicate_group``, and this rank's index in it.
    """

    shard_group: Group | None
    reduce_group: Group | None
    replicate_group: Group | None
    shards: int
    index: int
    copies: int
    copy: int

    @staticmethod
    def along(axis: str, mesh: Mesh) -> DataParallelGroups:
        shard, replicate = ("edp_shard", "edp_replicate") if axis == "edp" else ("shard", "replicate")
        apart = "reduce" if mesh.layout.zero == 3 and mesh.device.type == "cuda" else ""
        return DataParallelGroups(
            mesh.group(shard), mesh.group(shard, apart), mesh.group(replicate),
            mesh.size(shard), mesh.index(shard), mesh.size(replicate), mesh.index(replicate),
        )


@dataclass(frozen=True)
class BucketSlot:
    """Location of one parameter in a bucket."""

    parameter: nn.Parameter
    placement: ParamPlacement
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.placement.numel

    def view(self, flat: Tensor) -> Tensor:
        """Return this parameter's part of a tensor with the bucket's layout."""
        return flat[self.start : self.stop].view(self.placement.local)


@dataclass(frozen=True)
class ShardSegment:
    """Consecutive elements of a shard with equal treatment.

    Attributes:
        sum_over: mesh axes over which the gradients are partial sums.
        copies: number of ranks along tp and pp that hold the same elements.
    """

    start: int
    stop: int
    sum_over: tuple[str, ...]
    copies: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class OffloadStreams:
    """Streams of copies between host memory and the device, one for each direction."""

    def __init__(self, device: torch.device):
        self.to_device, self.to_host = SideStream(device), SideStream(device)


class Bucket:
    """Flat storage of some parameters: all of them in `full`, this rank's shard in `master`.

    Args:
        members: parameters on any device, in any order. They are sorted so that elements with equal treatment are
            contiguous, and their data is replaced by views of the buffer.
        groups: the ranks that hold the same parameters; their number of shards is the number of equal parts.
        keep_full: whether full parameters persist between uses (not in ZeRO-3).
        offload: whether `master` is in host memory. "optimizer" keeps the compute weights on the device, full or
            sharded (`shard`); "parameters" keeps only gathered parameters on the device.

    A CUDA device copies from page-locked memory in the format that it computes with: from `shadow`, a copy of the
    master weights, if that is another format. The copy is queued where `gather` is called, one or more units ahead of
    its use, and the current stream waits for it in `wait`.
    """

    def __init__(
        self,
        members: list[Member],
        groups: DataParallelGroups,
        policy: Policy,
        device: torch.device,
        *,
        keep_full: bool,
        offload: str = "none",
        streams: OffloadStreams | None = None,
    ):
        self.slots: list[BucketSlot] = []
        self.numel = 0
        for parameter, placement in sorted(members, key=lambda m: m[1].treatment):
            self.slots.append(BucketSlot(parameter, placement, self.numel))
            self.numel += placement.numel
        self.groups, self.index, self.policy = groups, groups.index, policy
        self.chunk = -(-self.numel // (groups.shards * _ALIGN)) * _ALIGN
        # Shared by all ranks of a host: each updates its part in place, and all wait for each other after the step.
        shared = groups.shard_group if keep_full else None
        self.full = allocate(groups.shards * self.chunk, policy.compute, device, shared, one=True)
        for slot in self.slots:
            slot.parameter.data = slot.view(self.full)
        self.keep_full = keep_full
        self.offloaded = offload != "none"
        if self.offloaded:
            self.master = host_zeros(self.chunk, policy.storage, device)
        elif keep_full and policy.storage == policy.compute:
            self.master = self.mine(self.full)
        else:
            self.master = torch.zeros(self.chunk, dtype=policy.storage, device=device)
        self.streams = streams or OffloadStreams(device)
        queues = self.offloaded and self.streams.to_device.queues
        self.shadow = host_zeros(self.chunk, policy.compute, device) if queues and policy.formats.master else None
        in_part = offload == "optimizer" and not keep_full
        self.shard = torch.zeros(self.chunk, dtype=policy.compute, device=device) if in_part else None
        self.segments = list(self._segments())
        self._version: Tensor | None = None  # the weights in use, if not the newest
        self._derived: dict[Hashable, tuple[int, Any]] = {}
        self._gathering: Callable[[], object] | None = None  # waits for what is in flight
        self._uploads = queues and self.shard is None  # whether each gather copies from host memory
        self._copied = Mark()  # when the last copy from host memory is done
        self.gathered = True
        if not keep_full:
            self.free()

    def mine(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of a full flat buffer, as a view."""
        return flat[self.index * self.chunk : (self.index + 1) * self.chunk]

    def _segments(self) -> Iterator[ShardSegment]:
        begin = self.index * self.chunk
        for (sum_over, copies), group in groupby(self.slots, lambda slot: slot.placement.treatment[:2]):
            slots = list(group)
            start, stop = max(slots[0].start - begin, 0), min(slots[-1].stop - begin, self.chunk)
            if start < stop:
                yield ShardSegment(start, stop, sum_over, copies)

    def pieces(self, flat: Tensor, start: int = 0) -> Iterator[tuple[str, Piece]]:
        """Yield the named parts of ``flat``.

        Args:
            flat: elements ``start : start + flat.numel()`` of this rank's shard of weights, gradients or moments.

        Yields:
            (parameter name, piece), each piece a view of ``flat``.
        """
        for slot, at, box in self.boxes(start, start + flat.numel()):
            values = flat[at : at + box.numel].view(box.shape)
            placement = slot.placement
            yield placement.name, Piece(placement.global_shape, box, values, placement.primary)

    def boxes(self, start: int, stop: int) -> Iterator[tuple[BucketSlot, int, Box]]:
        """Yield (slot, offset from ``start``, box of the parameter) for elements ``start:stop`` of the local shard."""
        begin, end = self.index * self.chunk + start, self.index * self.chunk + stop
        for slot in self.slots:
            first, last = max(slot.start, begin), min(slot.stop, end)
            for offset, box in slot.placement.boxes(first - slot.start, last - slot.start):
                yield slot, first - begin + offset, box

    # ---- full parameters from shards ---------------------------------------------------------------------------

    def gather(self) -> None:
        """Start gathering `full` from every rank's `master`; call `wait` before using it."""
        if self.gathered or self._gathering is not None:
            return
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
        mine = self.mine(self.full)
        source = self._stored if self.keep_full or self._version is None else self._version
        if self._uploads:
            host = self.shadow if self.shadow is not None and source is self.master else source
            self._gathering = self._upload(mine, host)
            return
        if not same_memory(mine, source):
            mine.copy_(source, non_blocking=True)
        if self.groups.shard_group is None:
            self.gathered = True
        else:
            self._gathering = all_gather_flat(self.full, mine, self.groups.shard_group).wait

    def _upload(self, mine: Tensor, source: Tensor) -> Callable[[], object]:
        """Copy a shard from host memory, then start gathering, on the stream of such copies; return what waits for it.

        `full` was allocated on the current stream, after whose work so far the copy runs, and is freed only after
        `wait`; its memory therefore needs no other record of the stream.
        """
        collectives: list[Pending] = []

        def copy() -> None:
            mine.copy_(source, non_blocking=True)
            if self.groups.shard_group is not None:
                collectives.append(all_gather_flat(self.full, mine, self.groups.shard_group))

        def wait() -> None:
            copied.wait()
            for work in collectives:
                work.wait()

        self._copied = copied = self.streams.to_device.run(copy)
        return wait

    def wait(self) -> None:
        """Wait until the parameters are gathered."""
        if self._gathering is not None:
            self._gathering()
            self._gathering, self.gathered = None, True

    def mark_dirty(self) -> None:
        """Mark `full` as outdated after a change of the masters."""
        self.wait()
        self._derived.clear()
        self.gathered = False
        self.release_host()
        if self.shadow is not None:
            self.shadow.copy_(self.master)
        if self.shard is not None:
            shard, source = self.shard, self.master if self.shadow is None else self.shadow
            self._copied = self.streams.to_device.run(lambda: shard.copy_(source, non_blocking=True))

    def release_host(self) -> None:
        """Wait on the host until no copy reads its memory, before weights in it change."""
        self._copied.synchronize()
        self._copied = Mark()

    def free(self) -> None:
        """Free the memory of `full` until the next `gather`."""
        self.wait()
        self._derived.clear()
        self.full.untyped_storage().resize_(0)
        self.gathered = False

    def derive(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return a value computed from the parameters in use, kept until they change.

        They change in `mark_dirty`, `free` and `swap_weights`, and by any operation of torch on the flat buffer or on
        views of it. In ZeRO-3 parameters are freed after each use, and nothing is kept.
        """
        if not self.keep_full:
            return compute()
        changes = (self.full if self._version is None else self._version)._version
        if key not in self._derived or self._derived[key][0] != changes:
            self._derived[key] = changes, compute()
        return self._derived[key][1]

    # ---- versions of the weights -------------------------------------------------------------------------------

    @property
    def resident(self) -> Tensor:
        """Return the tensor that stores the weights between uses: `full`, or in ZeRO-3 `shard` or `master`."""
        return self.full if self.keep_full else self._stored

    @property
    def _stored(self) -> Tensor:
        if self.shard is None:
            return self.master
        self._copied.wait()
        return self.shard

    def swap_weights(self, version: Tensor | None) -> None:
        """Use a copy of `resident` as the parameters; None restores the weights that the optimizer updates."""
        if version is self._version:
            return
        self._version = version
        self._derived.clear()
        if not self.keep_full:
            self.free()  # forces a new gather at the next use
            return
        flat = self.full if version is None else version
        for slot in self.slots:
            slot.parameter.data = slot.view(flat)


def group_into_buckets(units: list[list[Member]], limit: float, itemsize: int) -> Iterator[list[Member]]:
    """Yield the members of each bucket: complete units, up to ``limit`` bytes at ``itemsize`` bytes per element.

    A parameter that two stages share gets its own bucket, so both stages shard it identically. Parameters with
    different replica axes go to different buckets.
    """
    filling: dict[str, list[Member]] = {}
    for unit in units:
        for parameter, placement in unit:
            if ENDS in placement.sum_over:
                yield [(parameter, placement)]
            else:
                filling.setdefault(placement.replicas, []).append((parameter, placement))
        for axis, members in list(filling.items()):
            if sum(placement.numel for _, placement in members) * itemsize >= limit:
                yield filling.pop(axis)
    yield from filling.values()


def same_memory(a: Tensor, b: Tensor, further: int = 0) -> bool:
    """Return whether a tensor begins where another does, or ``further`` elements after it, in the same storage."""
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same and a.storage_offset() == b.storage_offset() + further


def join_adjacent(matrices: Sequence[Tensor]) -> Tensor:
    """Return adjacent matrices of equal width as one matrix [all rows, columns], or vectors as one, without a copy."""
    first, *others = matrices
    if not others:
        return first
    return first.detach().as_strided((sum(len(m) for m in matrices), *first.shape[1:]), first.stride())
