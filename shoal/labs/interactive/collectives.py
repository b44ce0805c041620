"""The collectives panel: one algorithm round by round on a network, and the time of all of them over the size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.labs.collectives.checker import play
from shoal.labs.collectives.description import ROOTED, Collective, Message
from shoal.labs.collectives.price import fastest, price_round, traffic
from shoal.labs.collectives.textbook import TEXTBOOK
from shoal.labs.collectives.topology import Topology
from shoal.labs.explain.collective import SIZES, TOPOLOGIES, CollectiveOptions, study_collective
from shoal.labs.explain.rounds import cells, describe_round
from shoal.spec.catalog.clusters import links

MOST_RANKS = 32  # whose blocks are drawn
MOST_SQUARES = 100_000  # blocks of all ranks, drawn after each round


class CollectivesRequest(Section):
    """One collective on one network."""

    collective: Collective = Collective.ALL_REDUCE
    algorithm: str = ""
    """Empty for the fastest."""

    ranks: Annotated[int, Field(ge=2, le=MOST_RANKS)] = 8
    root: NonNegativeInt = 0
    topology: str = "ring"
    link: str = "infiniband-ndr"
    size: PositiveFloat = 16e6
    """S: bytes of the largest input or output of one rank."""


def play_collective(request: CollectivesRequest) -> dict[str, Any]:
    """Play one algorithm, and price them all.

    Returns:
        ``rounds``: messages with their links, time [s] and words of each; ``held``: for the start and after each round,
        how complete each block is on each rank, 0 to 1; ``times``: seconds of each algorithm for `SIZES`; ``fastest``:
        the sizes [bytes] from which another algorithm is the fastest.

    Raises:
        UsageError: an unknown algorithm or network, or a number of ranks that does not fit it.
    """
    options = CollectiveOptions(
        ranks=request.ranks, algorithm=request.algorithm, size=f"{request.size:.0f}B", topology=request.topology,
        link=request.link, root=request.root if request.collective in ROOTED else 0,
    )  # fmt: skip
    found = study_collective(request.collective, options)
    shown, topology = found.shown, found.topology
    if len(shown.rounds) * shown.ranks**2 > MOST_SQUARES:
        raise UsageError(
            f"{shown.algorithm} has {len(shown.rounds)} rounds on {shown.ranks} ranks, too many to draw.\n"
            "  Choose fewer ranks, or another algorithm."
        )
    carried = traffic(shown.messages, shown.share, topology)
    return {
        "collective": shown.collective,
        "algorithm": shown.algorithm,
        "ranks": shown.ranks,
        "blocks": len(cells(shown, next(play(shown)), 0)),
        "copies": shown.copies,
        "topology": topology.name,
        "wire": options.describe_wire(),
        "edges": [[*edge, float(carried.get(edge, 0))] for edge in topology.wires],
        "rounds": [
            {
                "messages": [
                    {
                        "source": m.source, "target": m.target, "blocks": len(m.blocks), "reduce": m.reduce,
                        "first": _colour(m.blocks[0], shown.collective, shown.ranks),
                        "route": _path(topology, m),
                    }
                    for m in messages
                ],
                "seconds": price_round(messages, shown.share, topology).seconds(found.size),
                "words": describe_round(shown, messages),
            }
            for messages in shown.rounds
        ],
        "held": [[cells(shown, state, rank) for rank in range(shown.ranks)] for state in play(shown)],
        "sizes": SIZES,
        "algorithms": {
            name: {
                "rounds": len(d.rounds), "volume": float(d.volume), "reduced": float(d.reduced),
                "total": float(d.total), "seconds": found.prices[name].seconds(found.size),
            }
            for name, d in found.descriptions.items()
        },
        "times": {name: [price.seconds(size) for size in SIZES] for name, price in found.prices.items()},
        "bound": [found.bound.seconds(size, topology) for size in SIZES],
        "bound_seconds": found.bound.seconds(found.size, topology),
        "fastest": fastest(found.prices),
    }  # fmt: skip


def _path(topology: Topology, message: Message) -> list[str]:
    """Return the ends of the links that a message crosses, from its source to its target."""
    source, target = f"rank {message.source}", f"rank {message.target}"
    ends = [edge[0] for edge in topology.route(message.source, message.target)]
    return [*([] if ends[0] == source else [source]), *ends, target]


def _colour(block: int, collective: Collective, ranks: int) -> int:
    """Return the number by which a block is coloured: in an all-to-all, the rank that it comes from."""
    return block // ranks if collective is Collective.ALL_TO_ALL else block


def list_networks() -> dict[str, Any]:
    """List the collectives with their algorithms, the topologies and the links."""
    return {
        "collectives": {collective.value: list(known) for collective, known in TEXTBOOK.items()},
        "topologies": list(TOPOLOGIES),
        "links": list(links()),
        "rooted": sorted(ROOTED),
    }


def record_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of a saved page: every collective by its fastest algorithm, and every all-reduce."""
    yield "networks", {}
    first = CollectivesRequest().model_dump(mode="json")
    for collective in Collective:
        yield "collectives", first | {"collective": collective.value}
    for algorithm in TEXTBOOK[Collective.ALL_REDUCE]:
        yield "collectives", first | {"algorithm": algorithm}
