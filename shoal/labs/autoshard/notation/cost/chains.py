"""The cheapest way through a chain of products, and back."""

from __future__ import annotations

from shoal.labs.autoshard.notation.chain import ProductChain, gradient_products, reduced
from shoal.labs.autoshard.notation.cost.routes import Planner, Reached
from shoal.labs.autoshard.notation.notation import Array, Expression, Sharding
from shoal.labs.autoshard.notation.product import ShardedProduct, products
from shoal.labs.autoshard.notation.route import Route


def forward(expression: Expression, planner: Planner) -> list[tuple[float, tuple[Route, ...]]]:
    """The routes of every product of a chain for each way to take the last one, with their seconds, the cheapest first.

    What stands between two products may lie in any way: the cheapest for the whole chain is found (dynamic programming
    over how it lies when it comes out of its product).

    Raises:
        UsageError: no product can be taken.
    """
    assert expression.result is not None, "products have a result"
    steps = products(expression)
    names = intermediate_names(expression)
    first, *factors = expression.arrays
    left = planner.reach({first.sharding: 0.0})
    before: dict[Sharding, tuple[Route, ...]] = {first.sharding: ()}
    for number, (product, factor) in enumerate(zip(steps[:-1], factors, strict=False)):
        right = planner.reach({factor.sharding: 0.0})
        made: dict[Sharding, float] = {}
        then: dict[Sharding, tuple[Route, ...]] = {}
        for cost, route in _local(planner, product, left, right, (names[number], factor.name, names[number + 1])):
            if cost < made.get(route.out, float("inf")):
                made[route.out] = cost
                then[route.out] = (*before[left[route.multiplied[0]].origin], route)
        left, before = planner.reach(made), then
    last = factors[-1]
    called = (names[-2], last.name, expression.result.name)
    right = planner.reach({last.sharding: 0.0})
    found = planner.routes(steps[-1], left, right, expression.result.sharding, called)
    return [(cost, (*before[route.a], route)) for cost, route in found]


def _local(
    planner: Planner, product: ShardedProduct, left: dict[Sharding, Reached], right: dict[Sharding, Reached],
    names: tuple[str, str, str],
) -> list[tuple[float, Route]]:
    """Every way to take a product whose result may lie as it comes."""
    found = []
    for x, to_x in left.items():
        for y, to_y in right.items():
            if product.local(x, y) is not None:
                flops = product.flops(x, y, planner.sizes, planner.mesh)
                compute = flops / planner.peak_flops
                route = Route(names, product, to_x.origin, to_y.origin, to_x.path, to_y.path, (), flops, compute)
                found.append((to_x.cost + to_y.cost + compute, route))
    return found


def with_backward(expression: Expression, routes: tuple[Route, ...], planner: Planner) -> ProductChain:
    """A forward pass with the cheapest backward pass for it: every gradient lies as what it is the gradient of."""
    assert expression.result is not None, "products have a result"
    first, *factors = expression.arrays
    names = intermediate_names(expression)
    kept = [first.sharding, *(route.multiplied[0] for route in routes[1:])]
    lies = [*map(reduced, kept), reduced(expression.result.sharding)]  # the gradients of these, and of the result
    weights, inputs = [], []
    for number, (route, factor) in enumerate(zip(routes, factors, strict=True)):
        of_weight, of_input = gradient_products(route.product)
        x, y, out = Array(names[number], kept[number]), factor, Array(f"d{names[number + 1]}", lies[number + 1])
        as_x, as_y, as_out = (planner.reach({array.sharding: 0.0}) for array in (x, y, out))
        called = (x.name, out.name, f"d{y.name}")
        weights.append(planner.routes(of_weight, as_x, as_out, reduced(y.sharding), called)[0][1])
        at_hand = planner.reach({out.sharding: 0.0, weights[-1].multiplied[1]: 0.0})
        called = (out.name, y.name, f"d{x.name}")
        inputs.append(planner.routes(of_input, at_hand, as_y, lies[number], called)[0][1])
    return ProductChain(routes, tuple(weights), tuple(inputs))


def intermediate_names(expression: Expression) -> list[str]:
    """What stands before, between and after the products: the first factor, T1, T2, ..., the result."""
    assert expression.result is not None, "products have a result"
    between = [f"T{i}" for i in range(1, len(expression.arrays) - 1)]
    return [expression.arrays[0].name, *between, expression.result.name]
