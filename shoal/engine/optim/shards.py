"""Flat parameter shards that an optimizer updates on one rank, and the ranks that hold the other shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.json_collectives import all_gather
from shoal.engine.collectives.ops import all_gather_flat, all_reduce, reduce_scatter_flat


@dataclass(frozen=True)
class ShardPart:
    """A box of one parameter inside a shard.

    Attributes:
        copies: number of holders with this same box.
        primary: whether this rank, of all holders of the box, saves it.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    start: int
    copies: int = 1
    primary: bool = True

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.box.numel)

    def piece(self, flat: Tensor) -> Piece:
        """Return this part of a tensor with the shard's layout, as a view."""
        return Piece(self.global_shape, self.box, flat[self.slice].view(self.box.shape), self.primary)


@dataclass(frozen=True)
class Shard:
    """Consecutive elements updated by one rule with the same settings.

    Attributes:
        weights, gradient: [n], used in place.
        parts: the boxes inside, in order; elements outside of them are padding.
        decay: weight decay per unit of learning rate.
    """

    weights: Tensor
    gradient: Tensor
    parts: tuple[ShardPart, ...] = ()
    decay: float = 0.0
    rate: float = 1.0

    def cut(self, key: Callable[[ShardPart], Any]) -> Iterator[tuple[Any, Shard]]:
        """Yield consecutive parts with the same ``key`` as separate shards (views of this one)."""
        groups = [(k, tuple(parts)) for k, parts in groupby(self.parts, key)]
        bounds = pairwise([0, *(parts[0].start for _, parts in groups[1:]), self.weights.numel()])
        for (k, parts), (start, stop) in zip(groups, bounds, strict=False):  # padding alone has no group
            inside = tuple(replace(part, start=part.start - start) for part in parts)
            yield k, replace(
                self, weights=self.weights[start:stop], gradient=self.gradient[start:stop], parts=inside
            )


class Holders:
    """Ranks that hold shards of the same parameters (over dp_shard and tp), seen from one of them; by default one.

    Args:
        connect: returns their group; called when it is needed, because element-wise rules need none.
    """

    def __init__(self, ranks: int = 1, index: int = 0, connect: Callable[[], Group | None] = lambda: None):
        self.ranks, self.index, self._connect = ranks, index, connect

    def sum(self, x: Tensor) -> None:
        """Sum contiguous ``x`` in place."""
        all_reduce(x, self._connect())

    def maximum(self, x: Tensor) -> None:
        """Take the element-wise maximum of ``x`` in place."""
        all_reduce(x, self._connect(), dist.ReduceOp.MAX)

    def collect(self, x: Any) -> list[Any]:
        """Gather every holder's ``x``, a small JSON value, in order; tuples become lists."""
        if (group := self._connect()) is None or group.is_dry_run:
            return [x if i == self.index else type(x)() for i in range(self.ranks)]
        return all_gather(x, group.backend)

    def reduce_scatter(self, part: Tensor, full: Tensor) -> None:
        """Sum flat ``full`` [ranks x n] and keep this rank's ``part`` [n]."""
        if (group := self._connect()) is None:
            part.copy_(full)
        else:
            reduce_scatter_flat(part, full, group).wait()

    def all_gather(self, full: Tensor, part: Tensor) -> None:
        """Concatenate every rank's ``part`` [n] into ``full`` [ranks x n]."""
        if (group := self._connect()) is None:
            full.copy_(part)
        else:
            all_gather_flat(full, part, group).wait()


@dataclass
class Shards:
    """All shards that one rank updates.

    Attributes:
        parameters: name and global shape of every parameter of the holders, in the same order on all of them.
        dtype, device: of the weights, also on a rank without any.
        saves: parameters whose unsharded states this rank saves.
    """

    parameters: dict[str, tuple[int, ...]]
    shards: list[Shard]
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    holders: Holders = field(default_factory=Holders)
    saves: frozenset[str] = frozenset()

    @staticmethod
    def from_parameters(
        named: Iterable[tuple[str, Tensor, Tensor]], decay: Callable[[str, Tensor], float],
        rate: Callable[[str], float] = lambda name: 1.0,
    ) -> Shards:
        """Build shards from the unsharded parameters of one device: (name, weights, gradient), contiguous tensors used
        in place.
        """
        named = list(named)
        shards = [
            Shard(
                weights.view(-1), gradient.view(-1),
                (ShardPart(name, tuple(weights.shape), Box.full(tuple(weights.shape)), 0),), decay(name, weights),
                rate(name),
            )
            for name, weights, gradient in named
        ]
        shapes = {name: tuple(weights.shape) for name, weights, _ in named}
        first = named[0][1]
        return Shards(shapes, shards, first.dtype, first.device, saves=frozenset(shapes))

    def cut(self, key: Callable[[str, tuple[int, ...]], Any]) -> dict[Any, Shards]:
        """Group the shards and parameters by a function of a parameter's name and global shape.

        Every holder gets an entry for every key of any holder, and so takes part in its collectives.
        """
        keys = {name: key(name, shape) for name, shape in self.parameters.items()}
        apart = {
            k: replace(self, parameters={n: self.parameters[n] for n in keys if keys[n] == k}, shards=[])
            for k in dict.fromkeys(keys.values())
        }
        for shard in self.shards:
            for k, inside in shard.cut(lambda part: keys[part.name]):
                apart[k].shards.append(inside)
        return apart

    def zeros(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Allocate zeros for every element of each shard, the initial value of most states."""
        return [torch.zeros_like(shard.weights, dtype=dtype) for shard in self.shards]
