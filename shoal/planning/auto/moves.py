"""Search for the cheapest moves from one sharding of an array to another.

A sharding is a state; a move leads from state to state and costs seconds (Dijkstra 1959 finds the cheapest path).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, permutations
from typing import Protocol

from shoal.base.errors import UsageError
from shoal.engine.sharding.moves import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SLICE, Move
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes

STEP = 1e-12  # s added to each move, so that of paths with equal times the one with fewer moves is taken


class Network(Protocol):
    def price(self, collective: str, axes: str, size: float) -> tuple[float, str]:
        """Return seconds and algorithm for S of ``size`` bytes: the largest input or output of one rank."""


def list_moves(sharding: Sharding, mesh: NamedMesh, sizes: Sizes) -> Iterator[Move]:
    """List every possible next move. All blocks stay equal: no dim is split unevenly."""

    def even(letter: str, axes: str) -> bool:
        return sizes[letter] % mesh.size(sharding.axes[letter] + axes) == 0

    for letter, axes in sharding.dims:
        for start in range(len(axes)):
            tail = axes[start:]
            yield Move(ALL_GATHER, sharding, tail, source=letter)
            for other in sharding.letters:
                if other != letter and even(other, tail):
                    yield Move(ALL_TO_ALL, sharding, tail, source=letter, target=other)
    sums = sharding.unreduced
    for some in chain.from_iterable(combinations(sums, n) for n in range(1, len(sums) + 1)):
        yield Move(ALL_REDUCE, sharding, "".join(some))
        for order in map("".join, permutations(some)):
            for letter in sharding.letters:
                if even(letter, order):
                    yield Move(REDUCE_SCATTER, sharding, order, target=letter)
    for axis in mesh.axes:
        if axis not in sharding.used:
            for letter in sharding.letters:
                if even(letter, axis):
                    yield Move(SLICE, sharding, axis, target=letter)


@dataclass(frozen=True)
class Path:
    """The cheapest path to a state."""

    cost: float  # seconds
    origin: Sharding  # the state that it starts from
    moves: tuple[Move, ...]


@dataclass
class MoveSearch:
    """Finds and prices moves."""

    mesh: NamedMesh
    sizes: Sizes
    itemsize: int  # bytes of an element
    network: Network
    _next: dict[Sharding, list[Move]] = field(default_factory=dict)

    def moves(self, sharding: Sharding) -> list[Move]:
        """List every possible next move, priced."""
        if sharding not in self._next:
            self._next[sharding] = [self._price(move) for move in list_moves(sharding, self.mesh, self.sizes)]
        return self._next[sharding]

    def _price(self, move: Move) -> Move:
        if move.kind == SLICE:
            return move
        size = move.payload(self.mesh, self.sizes) * self.itemsize
        seconds, algorithm = self.network.price(move.kind, move.axes, size)
        return replace(move, algorithm=algorithm, seconds=seconds)

    def reach(self, starts: Mapping[Sharding, float]) -> dict[Sharding, Path]:
        """Find the cheapest path to every state from any of some states, which have costs [s] already."""
        return find_cheapest(starts, lambda state: [(move.after, move) for move in self.moves(state)])

    def reshard(self, before: Sharding, after: Sharding) -> tuple[Move, ...]:
        """Find the cheapest moves from one state of an array to another.

        Raises:
            UsageError: no moves lead there: only a product makes an array unreduced.
        """
        reached = self.reach({before: 0.0})
        if after not in reached:
            raise UsageError(f"{before} cannot become {after}: no collective leaves an array unreduced, a product does")
        return reached[after].moves


def find_cheapest(
    starts: Mapping[Sharding, float], steps: Callable[[Sharding], list[tuple[Sharding, Move]]]
) -> dict[Sharding, Path]:
    """Find the cheapest path to every state (Dijkstra 1959), by steps that lead from one to the next."""
    done: dict[Sharding, Path] = {}
    queue = [(cost, i, Path(cost, state, ()), state) for i, (state, cost) in enumerate(starts.items())]
    heapq.heapify(queue)
    count = len(queue)  # breaks ties, so that states need no order
    while queue:
        cost, _, path, state = heapq.heappop(queue)
        if state in done:
            continue
        done[state] = path
        for after, move in steps(state):
            if after not in done:
                total = cost + move.seconds + STEP
                heapq.heappush(queue, (total, count, Path(total, path.origin, (*path.moves, move)), after))
                count += 1
    return done
