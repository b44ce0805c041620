"""Bucket: adjacent parameters in one flat buffer, cut into equal shards.

Parameters are views of the buffer, so collectives over all of them need no copy, and the optimizer updates one flat
array. Shards are cut at equal sizes, possibly inside a row; `Bucket.pieces` returns the parts of each parameter as
boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.group import Group, allocate
from shoal.engine.collectives.ops import Pending, all_gather_flat
from shoal.engine.device import host_zeros
from shoal.engine.parallel.placement import ENDS, ParamPlacement
from shoal.engine.precision.policy import Policy

_ALIGN = 64  # elements: aligns shards to vector registers and cache lines


@dataclass(frozen=True)
class BucketSlot:
    """Location of one parameter in a bucket."""

    parameter: nn.Parameter
    split: ParamPlacement
    decay: bool
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.split.numel


@dataclass(frozen=True)
class ShardSegment:
    """Consecutive elements of a shard with equal treatment.

    Attributes:
        start, stop: range inside the shard.
        sum_over: mesh axes over which the gradients are partial sums.
        copies: number of ranks along tp and pp that hold the same elements.
        decay: whether weight decay applies.
    """

    start: int
    stop: int
    sum_over: tuple[str, ...]
    copies: int
    decay: bool

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Bucket:
    """Flat storage of some parameters: all of them in `full`, this rank's shard in `master`.

    The replicas of all members lie along one mesh axis, `replicas`.

    Args:
        members: (parameter on any device, placement, whether it decays), in any order. They are sorted so that elements
            with equal treatment are contiguous, and their data is replaced by views of the buffer.
        shards: number of equal parts.
        index: this rank's shard.
        keep_full: whether full parameters persist between uses (not in ZeRO-3).
        offload: whether `master` is in host memory. "optimizer" keeps the compute weights on the device, full or
            sharded (`shard`); "parameters" keeps only gathered parameters on the device.
        group: the ranks that hold the shards.
    """

    def __init__(
        self,
        members: list[tuple[nn.Parameter, ParamPlacement, bool]],
        *,
        shards: int,
        index: int,
        policy: Policy,
        device: torch.device,
        keep_full: bool,
        offload: str = "none",
        group: Group | None = None,
    ):
        members = sorted(members, key=lambda m: (m[1].sum_over, m[1].copies, m[2]))
        self.slots: list[BucketSlot] = []
        self.replicas = members[0][1].replicas
        self.numel = 0
        for parameter, split, decay in members:
            self.slots.append(BucketSlot(parameter, split, decay, self.numel))
            self.numel += split.numel
        self.shards, self.index, self.policy = shards, index, policy
        self.chunk = -(-self.numel // (shards * _ALIGN)) * _ALIGN
        # Shared by all ranks of a host: each updates its part in place, and all wait for each other after the step.
        self.full = allocate(shards * self.chunk, policy.compute, device, group if keep_full else None, one=True)
        for slot in self.slots:
            slot.parameter.data = self.full[slot.start : slot.stop].view(slot.split.local)
        self.keep_full = keep_full
        self.offloaded = offload != "none"
        if self.offloaded:
            self.master = host_zeros(self.chunk, policy.storage, device)
        elif keep_full and policy.storage == policy.compute:
            self.master = self.mine(self.full)
        else:
            self.master = torch.zeros(self.chunk, dtype=policy.storage, device=device)
        in_part = offload == "optimizer" and not keep_full
        self.shard = torch.zeros(self.chunk, dtype=policy.compute, device=device) if in_part else None
        self.runs = list(self._runs())
        self._used: Tensor | None = None
        self._gathering: Pending | None = None
        self.gathered = True
        if not keep_full:
            self.free()

    def mine(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of a full flat buffer, as a view."""
        return flat[self.index * self.chunk : (self.index + 1) * self.chunk]

    def _runs(self) -> Iterator[ShardSegment]:
        begin = self.index * self.chunk
        run: ShardSegment | None = None
        for slot in self.slots:
            start, stop = max(slot.start - begin, 0), min(slot.stop - begin, self.chunk)
            if start >= stop:
                continue
            alike = (slot.split.sum_over, slot.split.copies, slot.decay)
            if run and (run.sum_over, run.copies, run.decay) == alike:
                run = ShardSegment(run.start, stop, *alike)
                continue
            if run:
                yield run
            run = ShardSegment(start, stop, *alike)
        if run:
            yield run

    def pieces(self, flat: Tensor, start: int = 0) -> Iterator[tuple[str, Piece]]:
        """Yield the named parts of ``flat``.

        Args:
            flat: elements ``start : start + flat.numel()`` of this rank's shard of weights, gradients or moments.

        Yields:
            (parameter name, piece), each piece a view of ``flat``.
        """
        for slot, at, box in self.boxes(start, start + flat.numel()):
            values = flat[at : at + box.numel].view(box.shape)
            yield slot.split.name, Piece(slot.split.whole, box, values, slot.split.primary)

    def boxes(self, start: int, stop: int) -> Iterator[tuple[BucketSlot, int, Box]]:
        """Yield (slot, offset from ``start``, box of the parameter) for elements ``start:stop`` of the local shard."""
        begin, end = self.index * self.chunk + start, self.index * self.chunk + stop
        for slot in self.slots:
            first, last = max(slot.start, begin), min(slot.stop, end)
            for offset, box in slot.split.boxes(first - slot.start, last - slot.start):
                yield slot, first - begin + offset, box

    # ---- full parameters from shards ---------------------------------------------------------------------------

    def gather(self, group: Group | None) -> None:
        """Start gathering `full` from every rank's `master`; call `wait` before using it."""
        if self.gathered or self._gathering is not None:
            return
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
        mine = self.mine(self.full)
        if self._used is not None and not self.keep_full:
            source = self._used
        else:
            source = self.master if self.shard is None else self.shard
        if not same_memory(mine, source):
            mine.copy_(source, non_blocking=True)
        if group is None:
            self.gathered = True
        else:
            self._gathering = all_gather_flat(self.full, mine, group)

    def wait(self) -> None:
        """Wait until the parameters are gathered."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self.gathered = None, True

    def mark_dirty(self) -> None:
        """Mark `full` as outdated after a change of the masters."""
        self.wait()
        self.gathered = False
        if self.shard is not None:
            self.shard.copy_(self.master)

    def free(self) -> None:
        """Free the memory of `full` until the next `gather`."""
        self.wait()
        self.full.untyped_storage().resize_(0)
        self.gathered = False

    # ---- versions of the weights -------------------------------------------------------------------------------

    @property
    def resident(self) -> Tensor:
        """Return the tensor that stores the weights between uses: `full`, or in ZeRO-3 `shard` or `master`."""
        if self.keep_full:
            return self.full
        return self.master if self.shard is None else self.shard

    def swap_weights(self, version: Tensor | None) -> None:
        """Use a copy of `resident` as the parameters; None restores the weights that the optimizer updates."""
        if version is self._used:
            return
        self._used = version
        if not self.keep_full:
            self.free()  # forces a new gather at the next use
            return
        flat = self.full if version is None else version
        for slot in self.slots:
            slot.parameter.data = flat[slot.start : slot.stop].view(slot.split.local)


def grouped(
    units: list[list[tuple[nn.Parameter, ParamPlacement, bool]]], limit: float, itemsize: int
) -> Iterator[list[tuple[nn.Parameter, ParamPlacement, bool]]]:
    """Yield the members of each bucket: complete units, up to ``limit`` bytes at ``itemsize`` bytes per element.

    A parameter that two stages share gets its own bucket, so both stages shard it identically. Parameters with
    different replica axes go to different buckets.
    """
    filling: dict[str, list[tuple[nn.Parameter, ParamPlacement, bool]]] = {}
    for unit in units:
        yield from ([member] for member in unit if ENDS in member[1].sum_over)
        for member in unit:
            if ENDS not in member[1].sum_over:
                filling.setdefault(member[1].replicas, []).append(member)
        for axis, members in list(filling.items()):
            if sum(split.numel for _, split, _ in members) * itemsize >= limit:
                yield filling.pop(axis)
    yield from filling.values()


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors begin at the same address of the same storage."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def end_to_end(matrices: Sequence[Tensor]) -> Tensor:
    """Return adjacent matrices of equal width as one matrix [all rows, columns], without a copy."""
    first, *others = matrices
    if not others:
        return first
    return first.detach().as_strided((sum(len(m) for m in matrices), first.shape[1]), first.stride())
