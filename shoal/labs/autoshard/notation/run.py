"""Run routes on real ranks, which hold their blocks alone, by the algorithms that were priced; compare with one device.

Each set of mesh axes has a process group of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.sharding.moves import Move
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes, block_box
from shoal.engine.sharding.ranks import MeshRank, connect_ranks
from shoal.labs.autoshard.notation.moves import describe_move
from shoal.labs.autoshard.notation.notation import Array, Expression
from shoal.labs.autoshard.notation.search import ProductChain, Route
from shoal.labs.collectives.description import Collective
from shoal.labs.collectives.run import run_blocks, run_vector


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


class RouteRank(MeshRank):
    """One rank of a mesh that is the world; its collectives run by the algorithms of their moves."""

    def __init__(self, mesh: NamedMesh):
        super().__init__(mesh, dist.get_rank(), connect_ranks)

    def run(self, route: Route, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute this rank's block of the product from its blocks of the factors.

        Returns:
            The factors as they were multiplied, and the product at the end of the route.
        """
        a, b = self.move_all(route.left, a), self.move_all(route.right, b)
        return a, b, self.move_all(route.after, torch.einsum(route.product.einsum, a, b))

    def exchange(self, move: Move, sent: list[Tensor], group: Group) -> list[Tensor]:
        description, flat = describe_move(move, self.mesh), torch.cat([block.reshape(-1) for block in sent])
        if move.kind == Collective.ALL_REDUCE:
            flat = run_vector(description, flat, group.backend, pieces=1)
        else:
            flat = run_blocks(description, flat, [sent[0].numel()] * description.blocks, group.backend)
        return list(flat.view(-1, *sent[0].shape).unbind(0))


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
    runner, result = RouteRank(mesh), expression.result
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


def _run_forward(routes: tuple[Route, ...], factors: list[Tensor], runner: RouteRank) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's block of the result, and of each product's left factor as it waits for the backward pass."""
    kept, out = [], factors[0]
    for number, route in enumerate(routes):
        multiplied, _, after = runner.run(route, out, factors[number + 1])
        kept.append(multiplied if number else out)
        out = after
    return out, kept


def _run_backward(
    chain: ProductChain, factors: list[Tensor], kept: list[Tensor], gradient: Tensor, runner: RouteRank
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
    runner, full = RouteRank(mesh), random_array(before.sharding.letters, sizes, 0)
    block = runner.move_all(moves, shard_array(full, before.sharding, runner.rank, sizes, mesh))
    return {before.name: difference(block, full, after, runner, sizes)}


def random_array(letters: str, sizes: Sizes, seed: int) -> Tensor:
    """Draw a full float64 array, the same on every rank."""
    shape = [sizes[letter] for letter in letters]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def difference(block: Tensor, full: Tensor, sharding: Sharding, runner: RouteRank, sizes: Sizes) -> float:
    """Return the largest difference of a rank's block from its part of the full array; terms of a sum are added up."""
    total = block.clone()
    if sharding.unreduced:
        dist.all_reduce(total, group=runner.group(sharding.unreduced)[0].backend)
    return (total - full[block_box(sharding, runner.rank, sizes, runner.mesh).slices]).abs().max().item()
