"""Price collectives on a network in the alpha-beta-gamma model (Hockney 1994), with lower bounds.

A round takes the latency of its slowest message, plus the time of its most loaded link (messages that cross it share
it), plus the time of the largest reduction. Each is linear in the size, so an algorithm's time is a line
``latency + size x per_byte``, and one algorithm overtakes another where two lines cross.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from shoal.labs.collectives.description import REDUCING, VECTORS, Collective, Description, Message, Round
from shoal.labs.collectives.topology import Edge, Topology


@dataclass(frozen=True)
class Price:
    """A time [s] that is linear in the size S: the bytes of the largest input or output of one rank."""

    latency: float = 0.0
    per_byte: float = 0.0

    def seconds(self, size: float) -> float:
        """Return the time for S = ``size`` bytes."""
        return self.latency + size * self.per_byte

    def __add__(self, other: Price) -> Price:
        return Price(self.latency + other.latency, self.per_byte + other.per_byte)


def price(description: Description, topology: Topology) -> Price:
    """Price all rounds, one after another."""
    return sum((price_round(messages, description.share, topology) for messages in description.rounds), Price())


def price_round(messages: Round, share: Fraction, topology: Topology) -> Price:
    """Price one round; ``share`` is one block as a fraction of S."""
    load = traffic(messages, share, topology)
    latency = max(sum(topology.wires[edge].latency for edge in topology.route(m.source, m.target)) for m in messages)
    transfer = max(float(part) * topology.wires[edge].beta for edge, part in load.items())
    added = max((len(message.blocks) for message in messages if message.reduce), default=0)
    return Price(latency, transfer + float(added * share) * topology.gamma)


def traffic(messages: Iterable[Message], share: Fraction, topology: Topology) -> dict[Edge, Fraction]:
    """Sum what crosses each link, in units of S; links that carry nothing are left out."""
    blocks: defaultdict[Edge, int] = defaultdict(int)
    for message in messages:
        for edge in topology.route(message.source, message.target):
            blocks[edge] += len(message.blocks)
    return {edge: count * share for edge, count in blocks.items()}


@dataclass(frozen=True)
class Bound:
    """Lower bounds of any algorithm where a rank sends one message at a time (Chan et al. 2007, table 1).

    Each is a bound by itself; an algorithm need not reach all of them together.

    Attributes:
        volume: what some rank must send or receive, in units of S.
        reduced: what some rank must add, in units of S.
    """

    collective: Collective
    rounds: int
    volume: Fraction
    reduced: Fraction

    def seconds(self, size: float, topology: Topology) -> float:
        """Return the largest of the three bounds over the fastest links of a rank, and of what some node must send.

        Where ranks share the links out of their node, the node counts as one rank of a collective among nodes; in an
        all-to-all it sends for all of its ranks.
        """
        wire, nodes = topology.fastest, topology.ranks // topology.per_node
        leaving = lower_bound(self.collective, nodes).volume
        if self.collective is Collective.ALL_TO_ALL:
            leaving *= topology.per_node
        return max(
            self.rounds * wire.latency,
            float(self.volume) * size * wire.beta,
            float(self.reduced) * size * topology.gamma,
            float(leaving) * size / topology.out_of_node,
        )


def lower_bound(collective: Collective, ranks: int) -> Bound:
    """Return the lower bounds of a collective."""
    most = Fraction(ranks - 1, ranks)
    once = Fraction(ranks > 1)
    volume = 2 * most if collective is Collective.ALL_REDUCE else once if collective in VECTORS else most
    return Bound(collective, (ranks - 1).bit_length(), volume, most if collective in REDUCING else Fraction(0))


def bus_bandwidth(collective: Collective, ranks: int, size: float, seconds: float) -> float:
    """Return bytes/s of a rank if the collective moved only its lower bound (nccl-tests, doc/PERFORMANCE.md)."""
    return size / seconds * float(lower_bound(collective, ranks).volume)


def sort_by_time(prices: Mapping[str, Price], size: float) -> list[str]:
    """Return the algorithms, the fastest for ``size`` bytes first; times that differ by rounding alone are equal."""
    return sorted(prices, key=lambda name: float(f"{prices[name].seconds(size):.9g}"))


def fastest(prices: Mapping[str, Price]) -> list[tuple[float, str]]:
    """Return the lower envelope: each size [bytes] from which another algorithm is the fastest, starting at 0.

    Algorithms whose costs differ by rounding alone count as equal; the first one wins.

    >>> fastest({"tree": Price(1.0, 3.0), "ring": Price(5.0, 1.0), "flat": Price(6.0, 3.0)})
    [(0.0, 'tree'), (2.0, 'ring')]
    """
    prices = {n: Price(float(f"{p.latency:.9g}"), float(f"{p.per_byte:.9g}")) for n, p in prices.items()}
    name = min(prices, key=lambda n: (prices[n].latency, prices[n].per_byte))
    size, envelope = 0.0, [(0.0, name)]
    while True:
        now = prices[name]
        crossings = [
            ((other.latency - now.latency) / (now.per_byte - other.per_byte), other.per_byte, n)
            for n, other in prices.items()
            if other.per_byte < now.per_byte
        ]
        if not crossings:
            return envelope
        size, _, name = min(crossings, key=lambda crossing: crossing[:2])
        envelope.append((size, name))
