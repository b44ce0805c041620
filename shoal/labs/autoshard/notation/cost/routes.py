"""Every way to a product of sharded arrays, with its price: a search over how each array can lie.

How an array lies is a state; a move leads from state to state and costs seconds (Dijkstra 1959 finds the cheapest way).
A product can be taken in every pair of states that `ShardedProduct.local` allows, and leads to a state of its result.
So a route is such a pair, with the cheapest moves before and after; there are finitely many, and all are priced. One
collective is listed besides where the cheapest moves are several.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.base.errors import UsageError
from shoal.labs.autoshard.notation.cost.network import Network
from shoal.labs.autoshard.notation.moves import SLICE, Move, moves, payload
from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding, Sizes
from shoal.labs.autoshard.notation.product import ShardedProduct
from shoal.labs.autoshard.notation.route import Route, RoutedMove

STEP = 1e-12  # s: of ways that take equally long, the one with fewer steps


@dataclass(frozen=True)
class Reached:
    """The cheapest way to a state.

    Attributes:
        cost: s.
        origin: the state that it starts from.
        path: the moves from there.
    """

    cost: float
    origin: Sharding
    path: tuple[RoutedMove, ...]


@dataclass
class Planner:
    """Prices and finds routes.

    Attributes:
        itemsize: bytes of an element.
        peak_flops: of one device, FLOP/s.
    """

    mesh: NamedMesh
    sizes: Sizes
    itemsize: int
    network: Network
    peak_flops: float
    _next: dict[Sharding, list[RoutedMove]] = field(default_factory=dict)

    def transfers(self, sharding: Sharding) -> list[RoutedMove]:
        """All that can be done next, priced."""
        if sharding not in self._next:
            self._next[sharding] = [self._priced(move, sharding) for move in moves(sharding, self.mesh, self.sizes)]
        return self._next[sharding]

    def _priced(self, move: Move, before: Sharding) -> RoutedMove:
        if move.kind == SLICE:
            return RoutedMove(move, before)
        size = payload(move, before, self.sizes, self.mesh) * self.itemsize
        seconds, algorithm = self.network.price(move.kind, move.axes, size)
        return RoutedMove(move, before, algorithm, seconds)

    def reach(self, starts: Mapping[Sharding, float]) -> dict[Sharding, Reached]:
        """The cheapest way to every state from any of some, each of which costs something already."""
        return _cheapest(starts, lambda state: [(move.after, move) for move in self.transfers(state)])

    def reshard(self, before: Sharding, after: Sharding) -> tuple[RoutedMove, ...]:
        """The cheapest moves from one state of an array to another.

        Raises:
            UsageError: no moves lead there: nothing but a product makes an array unreduced.
        """
        reached = self.reach({before: 0.0})
        if after not in reached:
            raise UsageError(f"{before} cannot become {after}: no collective leaves an array unreduced, a product does")
        return reached[after].path

    def routes(
        self, product: ShardedProduct, a: Mapping[Sharding, Reached], b: Mapping[Sharding, Reached],
        wanted: Sharding, names: tuple[str, str, str] = ("A", "B", "C"),
    ) -> list[tuple[float, Route]]:
        """The routes to a product in a wanted state, with their seconds, the cheapest first.

        For every pair of states that can be multiplied the cheapest moves before and after it; and where one
        collective does what several do more cheaply (an all-reduce), that one too.

        Args:
            a: the ways to the states of the left factor, as from `reach`; their costs count.
            b: those of the right one.

        Raises:
            UsageError: there is none.
        """
        takes = [(x, y, out) for x in a for y in b if (out := product.local(x, y)) is not None]
        onward = self._to(wanted, dict.fromkeys(out for *_, out in takes))  # not a set: its order decides ties
        found = []
        for x, y, out in takes:
            if out not in onward:
                continue
            flops = product.flops(x, y, self.sizes, self.mesh)
            compute = flops / self.peak_flops
            before = a[x].cost + b[y].cost + compute
            ways = {onward[out].path: onward[out].cost}
            ways |= {(move,): move.seconds + STEP for move in self.transfers(out) if move.after == wanted}
            for after, cost in ways.items():
                origins, left, right = (a[x].origin, b[y].origin), a[x].path, b[y].path
                found.append((before + cost, Route(names, product, *origins, left, right, after, flops, compute)))
        if not found:
            raise UsageError(f"no route leads to {names[2]}{wanted}: nothing can be multiplied so that it comes of it")
        return sorted(found, key=lambda item: item[0])

    def _to(self, wanted: Sharding, starts: Iterable[Sharding]) -> dict[Sharding, Reached]:
        """The cheapest way from each of some states to one: against the moves."""
        against: dict[Sharding, list[tuple[Sharding, RoutedMove]]] = {}
        for state in self.reach(dict.fromkeys(starts, 0.0)):
            for move in self.transfers(state):
                against.setdefault(move.after, []).append((state, move))
        found = _cheapest({wanted: 0.0}, lambda state: against.get(state, []))
        return {state: Reached(way.cost, state, way.path[::-1]) for state, way in found.items()}


def _cheapest(
    starts: Mapping[Sharding, float], steps: Callable[[Sharding], list[tuple[Sharding, RoutedMove]]]
) -> dict[Sharding, Reached]:
    """The cheapest way to every state (Dijkstra 1959), by steps that lead from one to the next."""
    done: dict[Sharding, Reached] = {}
    queue = [(cost, i, Reached(cost, state, ()), state) for i, (state, cost) in enumerate(starts.items())]
    heapq.heapify(queue)
    count = len(queue)  # breaks ties, so that states need no order
    while queue:
        cost, _, way, state = heapq.heappop(queue)
        if state in done:
            continue
        done[state] = way
        for after, move in steps(state):
            if after not in done:
                then = cost + move.seconds + STEP
                heapq.heappush(queue, (then, count, Reached(then, way.origin, (*way.path, move)), after))
                count += 1
    return done
