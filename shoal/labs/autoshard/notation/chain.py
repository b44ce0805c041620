"""Chains of products, forward and backward: `In[Bx, D] * Win[D, Fy] * Wout[Fy, D] -> Out[Bx, D]`.

With T0 = In and Ti = Ti-1 * Gi, the product rules give, from dTi,

    dGi   = Ti-1 * dTi    contracted over the dims that Gi has not, wanted as Gi lies
    dTi-1 = dTi * Gi      contracted over the dims that Ti-1 has not, wanted as Ti-1 lies

so each gradient is a product of two sharded arrays again, with a route of its own. Factors wait for the backward pass
as they were given (a weight that was gathered is gathered anew), intermediate results as they were multiplied. What
the first of the two products makes of dTi the second may use as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.labs.autoshard.notation.notation import Sharding
from shoal.labs.autoshard.notation.product import ShardedProduct
from shoal.labs.autoshard.notation.route import Route

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.labs.autoshard.notation.run import Runner


@dataclass(frozen=True)
class ProductChain:
    """What all ranks do for a chain.

    Attributes:
        forward: a route for each product, from left to right.
        weights: for each of them, in the same order, the route of its right factor's gradient.
        inputs: and of its left factor's.
    """

    forward: tuple[Route, ...]
    weights: tuple[Route, ...]
    inputs: tuple[Route, ...]

    @property
    def backward(self) -> tuple[Route, ...]:
        """The routes in the order in which the backward pass takes them."""
        pairs = zip(reversed(self.weights), reversed(self.inputs), strict=True)
        return tuple(route for pair in pairs for route in pair)


def run_forward(routes: tuple[Route, ...], factors: list[Tensor], runner: Runner) -> tuple[Tensor, list[Tensor]]:
    """This rank's block of the result, and of the left factor of each product as it waits for the backward pass.

    Args:
        factors: this rank's blocks of them.
    """
    kept, out = [], factors[0]
    for number, route in enumerate(routes):
        multiplied, _, after = runner.run(route, out, factors[number + 1])
        kept.append(multiplied if number else out)
        out = after
    return out, kept


def run_backward(
    chain: ProductChain, factors: list[Tensor], kept: list[Tensor], gradient: Tensor, runner: Runner
) -> list[Tensor]:
    """This rank's blocks of every factor's gradient.

    Args:
        kept: as from `run_forward`.
        gradient: this rank's block of the result's gradient, which lies as the result does (reduced).
    """
    gradients = []
    for number in reversed(range(len(chain.forward))):
        of_weight, of_input = chain.weights[number], chain.inputs[number]
        _, moved, weight = runner.run(of_weight, kept[number], gradient)
        at_hand = gradient if of_input.a == of_weight.b else moved
        _, _, gradient = runner.run(of_input, at_hand, factors[number + 1])
        gradients.append(weight)
    return [gradient, *reversed(gradients)]


def gradient_products(product: ShardedProduct) -> tuple[ShardedProduct, ShardedProduct]:
    """The products that make the gradients of the right factor and of the left one.

    >>> gradient_products(ShardedProduct("BD", "DF", "BF"))
    (ShardedProduct(left='BD', right='BF', out='DF'), ShardedProduct(left='BF', right='DF', out='BD'))
    """
    return ShardedProduct(product.left, product.out, product.right), ShardedProduct(
        product.out, product.right, product.left
    )


def reduced(sharding: Sharding) -> Sharding:
    """How the gradient of an array lies: as the array, and whole, since every term of a sum has the sum's gradient."""
    return sharding.with_unreduced("")
