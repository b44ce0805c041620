"""Routes executed by real ranks: each holds its blocks and nothing else, and talks over one process group for each set
of mesh axes, by the very algorithms that were priced."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.base.boxes import Box
from shoal.labs.autoshard.notation.moves import SLICE
from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding, Sizes
from shoal.labs.autoshard.notation.route import Route, RoutedMove
from shoal.labs.collectives.description import Collective
from shoal.labs.collectives.run import run_blocks, run_vector


def box(sharding: Sharding, rank: int, sizes: Sizes, mesh: NamedMesh) -> Box:
    """The block that a rank holds, or holds a term of the sum of."""
    shape = sharding.local_shape(sizes, mesh)
    return Box(tuple(n * mesh.position(rank, axes) for n, (_, axes) in zip(shape, sharding.dims, strict=True)), shape)


def held(whole: Tensor, sharding: Sharding, rank: int, sizes: Sizes, mesh: NamedMesh) -> Tensor:
    """What a rank holds of an array that it is given whole.

    Of an unreduced array it holds a term of the sum: random numbers, the same for all copies, whose sum is the array.
    """
    block = whole[box(sharding, rank, sizes, mesh).slices].contiguous()
    terms = mesh.size(sharding.unreduced)
    if terms == 1:
        return block
    term = mesh.position(rank, sharding.unreduced)
    seed = mesh.position(rank, "".join(axes for _, axes in sharding.dims))
    generator = torch.Generator().manual_seed(seed)
    others = torch.randn(terms - 1, *block.shape, dtype=block.dtype, generator=generator)
    return others[term] if term < terms - 1 else block - others.sum(0)


class Runner:
    """One rank of a mesh, which runs routes; all ranks of the mesh run the same, in the same order.

    Args:
        mesh: of as many devices as the world has ranks, or of some of them, one after another.
        first: the rank of the default process group that is the mesh's first; without it the mesh is the world.
    """

    def __init__(self, mesh: NamedMesh, first: int | None = None):
        if first is None and mesh.ranks != dist.get_world_size():
            raise ValueError(f"a mesh of {mesh.ranks} devices in a world of {dist.get_world_size()}")
        self.mesh, self.first = mesh, first or 0
        self.rank = dist.get_rank() - self.first
        self._groups: dict[str, dist.ProcessGroup] = {}

    def run(self, route: Route, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's block of the product from its blocks of the factors.

        Returns:
            The factors as they were multiplied, and the product as the route leaves it.
        """
        for transfer in route.left:
            a = self.move(transfer, a)
        for transfer in route.right:
            b = self.move(transfer, b)
        out = torch.einsum(route.product.einsum, a, b)
        for transfer in route.after:
            out = self.move(transfer, out)
        return a, b, out

    def move(self, transfer: RoutedMove, x: Tensor) -> Tensor:
        """This rank's block after a move, from its block before it."""
        move, letters = transfer.move, transfer.before.letters
        target = letters.index(move.target) if move.target else -1
        parts = self.mesh.size(move.axes)
        if move.kind == SLICE:
            return x.chunk(parts, target)[self.mesh.position(self.rank, move.axes)].contiguous()
        group = self.group(move.axes)
        description = transfer.description(self.mesh)
        assert description is not None
        if move.kind == Collective.ALL_REDUCE:
            return run_vector(description, x.clone(memory_format=torch.contiguous_format), group, pieces=1)
        # A group counts its ranks in rising order, and a dim its blocks in the order of its axes.
        ranks = dist.get_process_group_ranks(group)
        order = [self.mesh.position(rank - self.first, move.axes) for rank in ranks]
        if move.kind == Collective.ALL_GATHER:
            flat, sizes = x.reshape(-1), [x.numel()] * parts
        else:
            pieces = x.chunk(parts, target)
            flat = torch.cat([pieces[place].reshape(-1) for place in order])
            sizes = [pieces[0].numel()] * description.blocks
        out = run_blocks(description, flat, sizes, group)
        if move.kind == Collective.REDUCE_SCATTER:
            return out.view(pieces[0].shape)
        shape = x.shape if move.kind == Collective.ALL_GATHER else pieces[0].shape
        blocks: list[Tensor] = [out] * parts
        for place, block in zip(order, out.view(parts, *shape).unbind(0), strict=True):
            blocks[place] = block
        return torch.cat(blocks, letters.index(move.source))

    def group(self, axes: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along these axes alone."""
        key = "".join(sorted(axes))
        if key not in self._groups:
            ranks = [self.first + r for r in next(group for group in self.mesh.groups(axes) if self.rank in group)]
            whole = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if whole else dist.new_group(ranks, use_local_synchronization=True)
            assert group is not None, "this rank is one of them"
            self._groups[key] = group
        return self._groups[key]
