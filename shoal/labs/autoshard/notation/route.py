"""Routes: the moves and the local product by which two sharded arrays become their product in a wanted sharding.

Plain data: the search makes and prices a route, ranks run it, the report draws it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.labs.autoshard.notation.moves import Move
from shoal.labs.autoshard.notation.notation import Sharding
from shoal.labs.autoshard.notation.product import ShardedProduct


@dataclass(frozen=True)
class Route:
    """A way to a product: moves of the left factor, moves of the right one, the local product, moves of the result.

    Attributes:
        names: of the left factor, the right one and the result.
        a, b: the shardings that the factors start from.
        flops: of one device.
        compute: seconds of the local product.
    """

    names: tuple[str, str, str]
    product: ShardedProduct
    a: Sharding
    b: Sharding
    left: tuple[Move, ...]
    right: tuple[Move, ...]
    after: tuple[Move, ...]
    flops: float
    compute: float

    @property
    def multiplied(self) -> tuple[Sharding, Sharding]:
        """The shardings of the factors when they are multiplied."""
        return (self.left[-1].after if self.left else self.a, self.right[-1].after if self.right else self.b)

    @property
    def local(self) -> Sharding:
        """The sharding of the local products."""
        local = self.product.local(*self.multiplied)
        assert local is not None, "the search multiplies only what can be"
        return local

    @property
    def out(self) -> Sharding:
        """The sharding of the result."""
        return self.after[-1].after if self.after else self.local

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves."""
        return (*self.left, *self.right, *self.after)

    @property
    def communication(self) -> float:
        """Seconds of the moves, one after another."""
        return sum(move.seconds for move in self.moves)

    @property
    def seconds(self) -> float:
        """Seconds of moves and product, nothing overlapped."""
        return self.compute + self.communication


@dataclass(frozen=True)
class ProductChain:
    """A chain of products, `In[Bx, D] * Win[D, Fy] * Wout[Fy, D] -> Out[Bx, D]`, with its backward pass.

    With T0 = In and Ti = Ti-1 * Gi, the product rules give, from dTi,

        dGi   = Ti-1 * dTi    contracted over the dims that Gi lacks, wanted in Gi's sharding
        dTi-1 = dTi * Gi      contracted over the dims that Ti-1 lacks, wanted in Ti-1's sharding

    so each gradient is a product of two sharded arrays again, with a route of its own. Factors wait for the backward
    pass as they were given (a gathered weight is gathered again), intermediate results as they were multiplied. The
    second of the two products may use dTi as the first one moved it.

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
        """The routes in the order of the backward pass."""
        pairs = zip(reversed(self.weights), reversed(self.inputs), strict=True)
        return tuple(route for pair in pairs for route in pair)
