"""Run routes on real ranks, which hold their blocks alone, by the algorithms that were priced; compare with one device.

Each set of mesh axes has a process group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.base.boxes import Box
from shoal.engine.sharding.moves import SLICE, Move
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes
from shoal.labs.autoshard.notation.moves import describe_move
from shoal.labs.autoshard.notation.notation import Array, Expression
from shoal.labs.autoshard.notation.search import ProductChain, Route
from shoal.labs.collectives.description import Collective
from shoal.labs.collectives.run import run_blocks, run_vector


def block_box(sharding: Sharding, rank: int, sizes: Sizes, mesh: NamedMesh) -> Box:
    """Return the index range of a rank's block; of an unreduced array, of the block whose term it holds."""
    shape = sharding.local_shape(sizes, mesh)
    return Box(tuple(n * mesh.position(rank, axes) for n, (_, axes) in zip(shape, sharding.dims, strict=True)), shape)


def shard_array(full: Tensor, sharding: Sharding, rank: int, sizes: Sizes, mesh: NamedMesh) -> Tensor:
    """Return a rank's block of a full array.

    Of an unreduced array this is a term of the sum: random numbers, the same for all copies, whose sum is the array.
    """
    block = full[block_box(sharding, rank, sizes, mesh).slices].contiguous()
    terms = mesh.size(sharding.unreduced)
    if terms == 1:
        return block
    term = mesh.position(rank, sharding.unreduced)
    seed = mesh.position(rank, "".join(axes for _, axes in sharding.dims))
    generator = torch.Generator().manual_seed(seed)
    others = torch.randn(terms - 1, *block.shape, dtype=block.dtype, generator=generator)
    return others[term] if term < terms - 1 else block - others.sum(0)


class Runner:
    """One rank of a mesh, which runs routes; all ranks of the mesh run the same routes in the same order.

    Args:
        first: the mesh's first rank in the default process group; without it the mesh is the world.
    """

    def __init__(self, mesh: NamedMesh, first: int | None = None):
        if first is None and mesh.ranks != dist.get_world_size():
            raise ValueError(f"a mesh of {mesh.ranks} devices in a world of {dist.get_world_size()}")
        self.mesh, self.first = mesh, first or 0
        self.rank = dist.get_rank() - self.first
        self._groups: dict[str, dist.ProcessGroup] = {}

    def run(self, route: Route, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute this rank's block of the product from its blocks of the factors.

        Returns:
            The factors as they were multiplied, and the product at the end of the route.
        """
        a, b = self.move_all(route.left, a), self.move_all(route.right, b)
        return a, b, self.move_all(route.after, torch.einsum(route.product.einsum, a, b))

    def move_all(self, moves: Sequence[Move], x: Tensor) -> Tensor:
        for move in moves:
            x = self.move(move, x)
        return x

    def move(self, move: Move, x: Tensor) -> Tensor:
        """Return this rank's block after a move, from its block before it."""
        letters = move.before.letters
        target = letters.index(move.target) if move.target else -1
        parts = self.mesh.size(move.axes)
        if move.kind == SLICE:
            return x.chunk(parts, target)[self.mesh.position(self.rank, move.axes)].contiguous()
        group, description = self.group(move.axes), describe_move(move, self.mesh)
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
        """Return the process group of the ranks that differ from this one along these axes alone."""
        key = "".join(sorted(axes))
        if key not in self._groups:
            ranks = [self.first + r for r in next(group for group in self.mesh.groups(axes) if self.rank in group)]
            everyone = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if everyone else dist.new_group(ranks, use_local_synchronization=True)
            assert group is not None, "this rank is one of them"
            self._groups[key] = group
        return self._groups[key]


# ---- beside the plain product ----------------------------------------------------------------------------------------


def compare(
    routes: tuple[Route, ...], chain: ProductChain | None, expression: Expression, mesh: NamedMesh, sizes: Sizes
) -> dict[str, float]:
    """Run a product or a chain on random float64 numbers beside `torch.einsum`; to be called by every rank of the mesh.

    Args:
        routes: of the products, from left to right.
        chain: the same routes with their backward pass, to compare the gradients with autograd's as well.

    Returns:
        The largest difference on this rank, of the result and of each factor's gradient, by their names.
    """
    assert expression.result is not None, "products have a result"
    runner, result = Runner(mesh), expression.result
    factors = [random_array(a.sharding.letters, sizes, i).requires_grad_() for i, a in enumerate(expression.arrays)]
    plain = factors[0]
    for route, factor in zip(routes, factors[1:], strict=True):
        plain = torch.einsum(route.product.einsum, plain, factor)
    blocks = [
        shard_array(full.detach(), array.sharding, runner.rank, sizes, mesh)
        for full, array in zip(factors, expression.arrays, strict=True)
    ]
    out, kept = _run_forward(routes, blocks, runner)
    errors = {result.name: difference(out, plain.detach(), result.sharding, runner, sizes)}
    if chain is not None:
        gradient = random_array(result.sharding.letters, sizes, len(factors))
        plain.backward(gradient)
        part = shard_array(gradient, result.sharding.reduced, runner.rank, sizes, mesh)
        found = _run_backward(chain, blocks, kept, part, runner)
        for block, full, array in zip(found, factors, expression.arrays, strict=True):
            assert full.grad is not None, "every factor has a gradient"
            errors[f"d{array.name}"] = difference(block, full.grad, array.sharding.reduced, runner, sizes)
    return errors


def _run_forward(routes: tuple[Route, ...], factors: list[Tensor], runner: Runner) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's block of the result, and of each product's left factor as it waits for the backward pass."""
    kept, out = [], factors[0]
    for number, route in enumerate(routes):
        multiplied, _, after = runner.run(route, out, factors[number + 1])
        kept.append(multiplied if number else out)
        out = after
    return out, kept


def _run_backward(
    chain: ProductChain, factors: list[Tensor], kept: list[Tensor], gradient: Tensor, runner: Runner
) -> list[Tensor]:
    """Return this rank's blocks of every factor's gradient, from its block of the result's gradient."""
    gradients = []
    for number in reversed(range(len(chain.forward))):
        of_weight, of_input = chain.weights[number], chain.inputs[number]
        _, moved, weight = runner.run(of_weight, kept[number], gradient)
        start = gradient if of_input.a == of_weight.b else moved
        _, _, gradient = runner.run(of_input, start, factors[number + 1])
        gradients.append(weight)
    return [gradient, *reversed(gradients)]


def compare_moves(
    moves: tuple[Move, ...], before: Array, after: Sharding, mesh: NamedMesh, sizes: Sizes
) -> dict[str, float]:
    """Move an array of random float64 numbers; to be called by every rank of the mesh.

    Returns:
        The largest difference on this rank from the full array, by its name.
    """
    runner, full = Runner(mesh), random_array(before.sharding.letters, sizes, 0)
    block = runner.move_all(moves, shard_array(full, before.sharding, runner.rank, sizes, mesh))
    return {before.name: difference(block, full, after, runner, sizes)}


def random_array(letters: str, sizes: Sizes, seed: int) -> Tensor:
    """Draw a full float64 array, the same on every rank."""
    shape = [sizes[letter] for letter in letters]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def difference(block: Tensor, full: Tensor, sharding: Sharding, runner: Runner, sizes: Sizes) -> float:
    """Return the largest difference of a rank's block from its part of the full array; terms of a sum are added up."""
    total = block.clone()
    if sharding.unreduced:
        dist.all_reduce(total, group=runner.group(sharding.unreduced))
    return (total - full[block_box(sharding, runner.rank, sizes, runner.mesh).slices]).abs().max().item()
