"""One rank of a plan's mesh, which moves its blocks of tensors with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group, create_backend, world
from shoal.engine.collectives.ops import all_gather, all_reduce, all_to_all, reduce_scatter
from shoal.engine.sharding.moves import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SLICE, Move
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes, block_box


class MeshRank:
    """One rank of a mesh; all ranks run the same moves in the same order.

    Args:
        connect: returns the group of some ranks of the mesh, in rising order; they all call it at the same point.
    """

    def __init__(self, mesh: NamedMesh, rank: int, connect: Callable[[tuple[int, ...]], Group]):
        self.mesh, self.rank, self._connect = mesh, rank, connect
        self._groups: dict[str, tuple[Group, list[int]]] = {}

    def block(self, tensor: Tensor, sharding: Sharding, sizes: Sizes) -> Tensor:
        return tensor[block_box(sharding, self.rank, sizes, self.mesh).slices]

    def move_all(self, moves: Sequence[Move], x: Tensor) -> Tensor:
        """Return this rank's block after some moves, from its block before them."""
        for move in moves:
            x = self._move(move, x)
        return x

    def _move(self, move: Move, x: Tensor) -> Tensor:
        letters = move.before.letters
        source, target = (letters.index(letter) if letter else -1 for letter in (move.source, move.target))
        if move.kind == SLICE:
            return x.chunk(self.mesh.size(move.axes), target)[self.mesh.position(self.rank, move.axes)].contiguous()
        group, places = self.group(move.axes)
        sent = [x]
        if move.target:  # a group counts its ranks in rising order, and a dim its blocks in the order of its axes
            parts = x.chunk(len(places), target)
            sent = [parts[place].contiguous() for place in places]
        received = self.exchange(move, sent, group)
        if not move.source:
            return received[0]
        return torch.cat([received[places.index(place)] for place in range(len(places))], source)

    def exchange(self, move: Move, sent: list[Tensor], group: Group) -> list[Tensor]:
        """Run the collective of a move: one block to all ranks, or one to each of them. Returns the block of this rank,
        or (if a dim loses its axes) the one of every rank."""
        if move.kind == ALL_REDUCE:
            return [all_reduce(sent[0].clone(memory_format=torch.contiguous_format), group)]
        if move.kind == ALL_GATHER:
            return list(all_gather(sent[0].unsqueeze(0), group).unbind(0))
        if move.kind == REDUCE_SCATTER:
            return [reduce_scatter(torch.stack(sent), group).squeeze(0)]
        return all_to_all(sent, [part.shape for part in sent], group)

    def group(self, axes: str) -> tuple[Group, list[int]]:
        """Return the group of the ranks that differ from this one along these axes alone, and their places in order."""
        if axes not in self._groups:
            ranks = next(group for group in self.mesh.groups(axes) if self.rank in group)
            same = next((group for key, (group, _) in self._groups.items() if sorted(key) == sorted(axes)), None)
            places = [self.mesh.position(rank, axes) for rank in ranks]
            self._groups[axes] = same or self._connect(ranks), places
        return self._groups[axes]


def connect_ranks(ranks: Sequence[int], first: int = 0) -> Group:
    """Return the group of some ranks of a mesh whose first rank is ``first`` of the world."""
    everyone = len(ranks) == world().size()
    return Group.from_backend(world() if everyone else create_backend([first + rank for rank in ranks]))
