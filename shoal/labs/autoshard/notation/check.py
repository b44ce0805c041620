"""A sharded product, or array, beside the plain one: every rank has all numbers once, to compare with what the route
made of its blocks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.labs.autoshard.notation.chain import ProductChain, reduced, run_backward, run_forward
from shoal.labs.autoshard.notation.notation import Array, Expression, NamedMesh, Sharding, Sizes
from shoal.labs.autoshard.notation.route import Route, RoutedMove
from shoal.labs.autoshard.notation.run import Runner, box, held


def compare(
    routes: tuple[Route, ...], chain: ProductChain | None, expression: Expression, mesh: NamedMesh, sizes: Sizes
) -> dict[str, float]:
    """Run a product or a chain on random float64 numbers; to be called by every rank of the mesh.

    Args:
        routes: of the products, from left to right.
        chain: the same routes with their backward pass, to compare the gradients with autograd's as well.

    Returns:
        The largest difference on this rank, of the result and of each factor's gradient, by their names.
    """
    assert expression.result is not None, "products have a result"
    runner, rank, result = Runner(mesh), dist.get_rank(), expression.result
    factors = [numbers(a.sharding.letters, sizes, i).requires_grad_() for i, a in enumerate(expression.arrays)]
    plain = factors[0]
    for route, factor in zip(routes, factors[1:], strict=True):
        plain = torch.einsum(route.product.einsum, plain, factor)
    blocks = [
        held(whole.detach(), array.sharding, rank, sizes, mesh)
        for whole, array in zip(factors, expression.arrays, strict=True)
    ]
    out, kept = run_forward(routes, blocks, runner)
    errors = {result.name: difference(out, plain.detach(), result.sharding, runner, sizes)}
    if chain is not None:
        gradient = numbers(result.sharding.letters, sizes, len(factors))
        plain.backward(gradient)
        part = held(gradient, reduced(result.sharding), rank, sizes, mesh)
        found = run_backward(chain, blocks, kept, part, runner)
        for block, whole, array in zip(found, factors, expression.arrays, strict=True):
            assert whole.grad is not None, "every factor has a gradient"
            errors[f"d{array.name}"] = difference(block, whole.grad, reduced(array.sharding), runner, sizes)
    return errors


def compare_moves(
    moves: tuple[RoutedMove, ...], before: Array, after: Sharding, mesh: NamedMesh, sizes: Sizes
) -> dict[str, float]:
    """Move an array of random float64 numbers; to be called by every rank of the mesh.

    Returns:
        The largest difference on this rank from the whole array, by its name.
    """
    runner, whole = Runner(mesh), numbers(before.sharding.letters, sizes, 0)
    block = held(whole, before.sharding, dist.get_rank(), sizes, mesh)
    for transfer in moves:
        block = runner.move(transfer, block)
    return {before.name: difference(block, whole, after, runner, sizes)}


def numbers(letters: str, sizes: Sizes, seed: int) -> Tensor:
    """A whole random array, the same on every rank."""
    shape = [sizes[letter] for letter in letters]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def difference(block: Tensor, whole: Tensor, sharding: Sharding, runner: Runner, sizes: Sizes) -> float:
    """The largest difference of a rank's block from its part of the whole array, the terms of a sum added up."""
    total = block.clone()
    if sharding.unreduced:
        dist.all_reduce(total, group=runner.group(sharding.unreduced))
    return (total - whole[box(sharding, dist.get_rank(), sizes, runner.mesh).slices]).abs().max().item()
