"""Seconds of a collective over axes of a mesh, which every group of the mesh along these axes runs at the same time."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.base.errors import UsageError
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.labs.collectives.description import Collective, Message
from shoal.labs.collectives.price import Price, price_round, sort_by_time
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.labs.collectives.topology import Topology, Wire

MOST_RANKS = 64  # of a topology: every message of every group is priced


@dataclass(frozen=True)
class Rings:
    """A ring of links for each mesh axis, used in both directions: the book's "bytes / bandwidth".

    With V the bytes of the array that is gathered or reduced and W the bandwidth of both directions of a link, an
    all-gather or a reduce-scatter over n axes takes V / (n W), an all-reduce twice that, an all-to-all a quarter; never
    less than a hop's latency for each hop to the farthest device, |x| / 2 along each axis (Austin et al. 2025,
    "Computation With Sharded Arrays" and "What Have We Learned?"). The part (|x| - 1) / |x| of V that really moves is
    taken as V, so that the time does not depend on the number of devices.
    """

    mesh: NamedMesh
    wire: Wire  # one direction of a link

    def price(self, collective: str, axes: str, size: float) -> tuple[float, str]:
        """Return seconds, and the algorithm that sends the fewest bytes."""
        both = 2 * self.wire.bandwidth * sum(self.mesh.size(axis) > 1 for axis in axes)
        if not both:
            return 0.0, "ring"
        hops = sum(self.mesh.size(axis) // 2 for axis in axes)
        if collective == Collective.ALL_TO_ALL:  # S is what one rank has of V
            return max(size * self.mesh.size(axes) / 4 / both, hops * self.wire.latency), "pairwise"
        trips = 2 if collective == Collective.ALL_REDUCE else 1
        return trips * max(size / both, hops * self.wire.latency), "ring"


@dataclass
class Links:
    """Any topology of as many ranks as the mesh, by the best algorithms of the textbook in the alpha-beta-gamma model.

    The groups of the mesh run each round together, and share the bandwidth of links that several of them use.

    Raises:
        UsageError: the mesh has more than `MOST_RANKS` devices.
    """

    mesh: NamedMesh
    topology: Topology
    _prices: dict[tuple[str, str], dict[str, Price]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mesh.ranks > MOST_RANKS:
            raise UsageError(
                f"--mesh {self.mesh}: {self.mesh.ranks} devices; a topology has at most {MOST_RANKS}, since every "
                "message is priced.\n  For larger meshes: --topology rings"
            )

    def price(self, collective: str, axes: str, size: float) -> tuple[float, str]:
        """Return seconds, and the fastest algorithm."""
        key = (collective, "".join(sorted(axes)))
        if key not in self._prices:
            self._prices[key] = self._price_algorithms(*key)
        prices = self._prices[key]
        name = sort_by_time(prices, size)[0]
        return prices[name].seconds(size), name

    def _price_algorithms(self, collective: str, axes: str) -> dict[str, Price]:
        groups = self.mesh.groups(axes)
        prices = {}
        for name in TEXTBOOK[Collective(collective)]:
            if name == "hierarchical":
                continue  # gathering axis by axis is a route of its own
            description = describe(collective, name, len(groups[0]))
            rounds = (
                tuple(Message(g[m.source], g[m.target], m.blocks, m.reduce) for g in groups for m in messages)
                for messages in description.rounds
            )
            prices[name] = sum((price_round(r, description.share, self.topology) for r in rounds), Price())
        return prices
