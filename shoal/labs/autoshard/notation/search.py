"""Search for routes to a product of sharded arrays, or through a chain of them, over the shardings of each array.

A sharding is a state; a move leads from state to state and costs seconds (Dijkstra 1959 finds the cheapest path). A
product can be taken in every pair of states that `ShardedProduct.local` allows, and leads to a state of its result. So
a route is such a pair, with the cheapest moves before and after; all pairs are priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shoal.base.errors import UsageError
from shoal.engine.sharding.moves import Move
from shoal.engine.sharding.named_axes import Sharding
from shoal.labs.autoshard.notation.notation import Expression
from shoal.labs.autoshard.notation.product import ShardedProduct, list_products
from shoal.planning.auto.moves import STEP, MoveSearch, Path, find_cheapest


@dataclass(frozen=True)
class Route:
    """A way to a product: moves of the left factor, moves of the right one, the local product, moves of the result.

    Attributes:
        names: of the left factor, the right one and the result.
        a, b: the shardings that the factors start from.
        compute: seconds of the local product.
    """

    names: tuple[str, str, str]
    product: ShardedProduct
    a: Sharding
    b: Sharding
    left: tuple[Move, ...]
    right: tuple[Move, ...]
    after: tuple[Move, ...]
    compute: float

    @property
    def multiplied(self) -> tuple[Sharding, Sharding]:
        """The shardings of the factors when they are multiplied."""
        return (self.left[-1].after if self.left else self.a, self.right[-1].after if self.right else self.b)

    @property
    def local(self) -> Sharding:
        local = self.product.local(*self.multiplied)
        assert local is not None, "the search multiplies only what can be"
        return local

    @property
    def out(self) -> Sharding:
        return self.after[-1].after if self.after else self.local

    @property
    def moves(self) -> tuple[Move, ...]:
        return (*self.left, *self.right, *self.after)

    @property
    def steps(self) -> list[tuple[str, Move | None]]:
        """The moves in order, each with the name of its array; None is the product."""
        left, right, out = self.names
        before = [*((left, move) for move in self.left), *((right, move) for move in self.right)]
        return [*before, (out, None), *((out, move) for move in self.after)]

    @property
    def communication(self) -> float:
        """Seconds of the moves, one after another."""
        return sum(move.seconds for move in self.moves)


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
        pairs = zip(reversed(self.weights), reversed(self.inputs), strict=True)
        return tuple(route for pair in pairs for route in pair)


@dataclass
class RouteSearch(MoveSearch):
    """Finds and prices routes.

    Attributes:
        peak_flops: of one device, FLOP/s.
    """

    peak_flops: float = field(kw_only=True)

    def multiply(
        self, product: ShardedProduct, a: Mapping[Sharding, Path], b: Mapping[Sharding, Path],
        names: tuple[str, str, str],
    ) -> Iterator[tuple[float, Route]]:
        """Take a product in every pair of states in which it can be taken: seconds, and the route without moves after.

        Args:
            a, b: paths to the states of the left and the right factor, as from `reach`; their costs count.
        """
        for x, to_x in a.items():
            for y, to_y in b.items():
                if product.local(x, y) is not None:
                    compute = product.flops(x, y, self.sizes, self.mesh) / self.peak_flops
                    origins = to_x.origin, to_y.origin
                    yield (to_x.cost + to_y.cost + compute,
                           Route(names, product, *origins, to_x.moves, to_y.moves, (), compute))

    def routes(
        self, product: ShardedProduct, a: Mapping[Sharding, Path], b: Mapping[Sharding, Path],
        wanted: Sharding, names: tuple[str, str, str] = ("A", "B", "C"),
    ) -> list[tuple[float, Route]]:
        """List the routes to a product in a wanted state, with their seconds, the cheapest first.

        For every pair of states that can be multiplied these are the cheapest moves before and after it, and a single
        collective where several are cheaper (an all-reduce).

        Raises:
            UsageError: no route exists.
        """
        multiplied = list(self.multiply(product, a, b, names))
        onward = self._reach_backwards(wanted, dict.fromkeys(route.out for _, route in multiplied))
        found = []
        for before, route in multiplied:
            if (out := route.out) in onward:
                paths = {onward[out].moves: onward[out].cost}
                paths |= {(move,): move.seconds + STEP for move in self.moves(out) if move.after == wanted}
                found += [(before + cost, replace(route, after=after)) for after, cost in paths.items()]
        if not found:
            raise UsageError(f"no route leads to {names[2]}{wanted}: nothing can be multiplied so that it comes of it")
        return sorted(found, key=lambda item: item[0])

    def _reach_backwards(self, wanted: Sharding, starts: Iterable[Sharding]) -> dict[Sharding, Path]:
        """Find the cheapest path from each of some states to a wanted one."""
        against: dict[Sharding, list[tuple[Sharding, Move]]] = {}
        for state in self.reach(dict.fromkeys(starts, 0.0)):
            for move in self.moves(state):
                against.setdefault(move.after, []).append((state, move))
        found = find_cheapest({wanted: 0.0}, lambda state: against.get(state, []))
        return {state: Path(path.cost, state, path.moves[::-1]) for state, path in found.items()}


# ---- chains of products ----------------------------------------------------------------------------------------------


def find_forward(expression: Expression, search: RouteSearch) -> list[tuple[float, tuple[Route, ...]]]:
    """Find the routes through a chain for each way to take its last product, with their seconds, the cheapest first.

    Intermediate results may have any sharding: the cheapest for the full chain is found by dynamic programming over the
    sharding in which its product leaves each.

    Raises:
        UsageError: a product cannot be taken.
    """
    assert expression.result is not None, "products have a result"
    *steps, last = list_products(expression)
    names = intermediate_names(expression)
    first, *factors = expression.arrays
    left = search.reach({first.sharding: 0.0})
    before: dict[Sharding, tuple[Route, ...]] = {first.sharding: ()}
    for number, (product, factor) in enumerate(zip(steps, factors, strict=False)):
        right = search.reach({factor.sharding: 0.0})
        made: dict[Sharding, float] = {}
        routes: dict[Sharding, tuple[Route, ...]] = {}
        for cost, route in search.multiply(product, left, right, (names[number], factor.name, names[number + 1])):
            if cost < made.get(route.out, float("inf")):
                made[route.out] = cost
                routes[route.out] = (*before[route.a], route)
        left, before = search.reach(made), routes
    right = search.reach({factors[-1].sharding: 0.0})
    called = (names[-2], factors[-1].name, expression.result.name)
    found = search.routes(last, left, right, expression.result.sharding, called)
    return [(cost, (*before[route.a], route)) for cost, route in found]


def add_backward(expression: Expression, routes: tuple[Route, ...], search: RouteSearch) -> ProductChain:
    """Find the cheapest backward pass of a forward pass: every gradient gets the sharding of its array, summed."""
    assert expression.result is not None, "products have a result"
    first, *factors = expression.arrays
    names = intermediate_names(expression)
    kept = [first.sharding, *(route.multiplied[0] for route in routes[1:])]
    gradients = [sharding.reduced for sharding in (*kept, expression.result.sharding)]
    weights, inputs = [], []
    for number, (route, factor) in enumerate(zip(routes, factors, strict=True)):
        p, out, out_name = route.product, gradients[number + 1], f"d{names[number + 1]}"
        x, y, dout = (search.reach({sharding: 0.0}) for sharding in (kept[number], factor.sharding, out))
        of_weight = ShardedProduct(p.left, p.out, p.right)
        called = (names[number], out_name, f"d{factor.name}")
        weights.append(search.routes(of_weight, x, dout, factor.sharding.reduced, called)[0][1])
        dout = search.reach({out: 0.0, weights[-1].multiplied[1]: 0.0})
        of_input = ShardedProduct(p.out, p.right, p.left)
        called = (out_name, factor.name, f"d{names[number]}")
        inputs.append(search.routes(of_input, dout, y, gradients[number], called)[0][1])
    return ProductChain(routes, tuple(weights), tuple(inputs))


def intermediate_names(expression: Expression) -> list[str]:
    """Name what stands before, between and after the products: the first factor, T1, T2, ..., the result."""
    assert expression.result is not None, "products have a result"
    between = [f"T{i}" for i in range(1, len(expression.arrays) - 1)]
    return [expression.arrays[0].name, *between, expression.result.name]
