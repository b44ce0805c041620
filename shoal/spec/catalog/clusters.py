"""Clusters by name: ``8xH100``, ``64x8xH100-IB400``, ``v5p-4096``, or one accelerator by its name in the catalog."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section
from shoal.spec.catalog.accelerators import Accelerator, accelerator, accelerators
from shoal.spec.catalog.links import Link, link
from shoal.spec.catalog.tables import entries, wrong

NETWORKS = {
    "IB100": "infiniband-edr", "IB200": "infiniband-hdr", "IB400": "infiniband-ndr", "IB800": "infiniband-xdr",
    "ETH10": "ethernet-10g", "ETH100": "ethernet-100g", "ETH400": "ethernet-400g",
    "EFA50": "efa-50g", "EFA400": "efa-400g",
}  # fmt: skip
"""What a cluster's name may end in: the network between its nodes."""


class Node(Section):
    """What accelerators share, in a server or a pod."""

    name: str
    """The name in the catalog."""

    accelerator: str
    """Its accelerators, by their name in the catalog."""

    per_node: PositiveInt = 1
    """How many a node has, unless the cluster's name says otherwise."""

    inside: str
    """The link by which each reaches the others of its node, or its neighbours in a torus."""

    nic: str | None = None
    """The link that leads out of the node."""

    nics: PositiveInt | None = None
    """How many of these a node has."""

    dimensions: PositiveInt | None = None
    """Of a pod: those of its torus."""

    most: PositiveInt | None = None
    """Of a pod: its chips."""

    wraps_at: PositiveInt = 1
    """Of a pod: an axis of a multiple of so many chips is closed to a ring; any other is a line."""

    wraps_from: PositiveInt = 1
    """Of a pod: chips of the smallest slice that has rings."""

    cores_per_chip: PositiveInt = 1
    """Of a pod: what the number in a slice's name counts for each chip."""

    at_once: PositiveInt | None = None
    """How many of a node's accelerators compute at one time, where they are ranks that share its cores; the others wait
    for their turn. They also share its memory, which is their accelerator's. All unless given."""

    watts: PositiveFloat | None = None
    """The most that a whole node draws, with its host, switches and fans; None where its maker does not say."""

    constants: dict[str, NonNegativeFloat] = Field(default={})
    """Of the calibrated cost model (`calibration.toml`), where they were measured on this very node."""

    reference: PositiveFloat | None = None
    """Seconds of one and the same work on each of its cores (`bench/calibration/measure.py`) when these were measured:
    how fast the machine was."""

    source: str
    """Where the numbers are from."""


@dataclass(frozen=True)
class Cluster:
    """Accelerators, and what connects them.

    Attributes:
        name: as it was given.
        accelerator: each of them.
        nodes, per_node: how many, and accelerators in each. A torus is one node.
        inside: of one accelerator, to a switch that it shares with its node; in a torus each of its links.
        nic: of one adapter, out of the node; None for a single node.
        nics: of a node.
        torus: the sizes of its dimensions, empty for switched nodes.
        wraps_at: of these, multiples of so many are rings, the others lines; 0 where all are.
        thin: how much of the adapters' bandwidth collectives lose each time the nodes that they span double: the
            exponent of a power.
        at_once: accelerators of a node that compute at one time, and share its memory; None for all.
        watts: of one accelerator, with its share of its node; None where nobody says.
        constants: of the calibrated cost model, measured here.
    """

    name: str
    accelerator: Accelerator
    nodes: int
    per_node: int
    inside: Link | None = None
    nic: Link | None = None
    nics: int = 1
    torus: tuple[int, ...] = ()
    wraps_at: int = 1
    thin: float = 0.0
    at_once: int | None = None
    watts: float | None = None
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def turns(self) -> float:
        """Accelerators that share what one of them needs to compute: 1 where each has its own."""
        return max(1.0, self.per_node / self.at_once) if self.at_once else 1.0

    @property
    def memory_bytes(self) -> float:
        """Of one accelerator: those that share a memory have equal parts of it."""
        return self.accelerator.memory_bytes / (self.per_node if self.at_once else 1)

    @property
    def size(self) -> int:
        """Number of accelerators."""
        return self.nodes * self.per_node

    def closed(self, chips: int) -> bool:
        """Whether an axis of so many chips of the torus is a ring."""
        return bool(self.wraps_at) and chips % self.wraps_at == 0

    def describe(self) -> str:
        """In words, for the head of a table."""
        what = f"{self.size:,} x {self.accelerator.name}"
        if self.inside is None:
            return what
        if self.torus:
            return f"{what}, torus {' x '.join(map(str, self.torus))} of {self.inside.name}"
        out = f", {self.nodes:,} nodes with {self.nics} x {self.nic.name}" if self.nic else ""
        return f"{what}, {self.inside.name} inside {'each node' if self.nic else 'the node'}{out}"


def nodes() -> Mapping[str, Node]:
    """Every node type, by name."""
    return entries("nodes", Node)


def cluster(name: str) -> Cluster:
    """A cluster by its name.

    ``8xH100`` is a node, ``64x8xH100`` 64 of them, ``-IB400`` names another network between them; ``4xA100`` is half a
    node. ``v5p-4096`` is a slice of a pod in the maker's words, which for v4 and v5p count TensorCores, two a chip.

    >>> cluster("64x8xH100-IB200").nic.name, cluster("v5p-4096").torus
    ('infiniband-hdr', (8, 16, 16))

    Raises:
        UsageError: a form, an accelerator or a network that is not known, or a slice larger than its pod.
    """
    given = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?(.+)", name, re.IGNORECASE)
    wanted, per_node, rest = given.groups() if given else (None, None, name)
    if wanted is None and per_node is None:
        pod = re.fullmatch(r"(?:tpu-)?(\w+)-(\d+)", rest)
        if pod and (kind := _known(pod[1])) and nodes()[kind].dimensions:
            return _slice(name, nodes()[kind], int(pod[2]))
        if rest in accelerators():
            return Cluster(name, accelerator(rest), 1, 1)
    rest, _, network = rest.rpartition("-") if _network(rest) else (rest, "", "")
    kind = _known(rest)
    if kind is None:
        raise UsageError(
            f"cluster '{name}': there is no node type '{rest}'; {did_you_mean(rest, nodes())}"
            "\n  Write 8xH100, 64x8xH100-IB400, v5p-4096, or one accelerator of the catalog, as h100-sxm."
        )
    node = nodes()[kind]
    if node.dimensions:
        whole = f"{kind}-{node.cores_per_chip * 256}"
        raise UsageError(f"cluster '{name}': a {kind} comes in slices of a pod.\n  Write {whole}.")
    count, each = int(wanted or 1), int(per_node or (node.per_node if wanted else 1))
    if not count or not each:
        raise UsageError(f"cluster '{name}': at least one node of at least one {kind}.")
    if wanted is None and each > node.per_node:
        if each % node.per_node:
            raise UsageError(
                f"cluster '{name}': a node has {node.per_node} {kind}, which does not divide {each}."
                f"\n  Write nodes and accelerators of each, as {-(-each // node.per_node)}x{node.per_node}x{kind}."
            )
        count, each = each // node.per_node, node.per_node
    if each > node.per_node:
        raise UsageError(f"cluster '{name}': a node has at most {node.per_node} {kind}, not {each}.")
    adapter = NETWORKS[network.upper()] if network else node.nic
    nic = link(adapter) if count > 1 and adapter else None
    if count > 1 and nic is None:
        raise UsageError(f"cluster '{name}': node type {kind} has no nic.\n  Name a network: {', '.join(NETWORKS)}.")
    nics = max(1, (node.nics or node.per_node) * each // node.per_node)
    return Cluster(
        name, accelerator(node.accelerator), count, each, link(node.inside), nic, nics, at_once=node.at_once,
        watts=node.watts / node.per_node if node.watts else None, constants=node.constants,
    )


def _known(name: str) -> str | None:
    """The node type that a name means, in any capitals."""
    return {known.lower(): known for known in nodes()}.get(name.lower())


def _network(name: str) -> bool:
    """Whether a node type's name is followed by a network's.

    Raises:
        UsageError: it is followed by something that is neither.
    """
    if _known(name) or "-" not in name or not _known(name.rpartition("-")[0]):
        return False
    network = name.rpartition("-")[2].upper()
    if network not in NETWORKS:
        raise UsageError(f"cluster: there is no network '{network}'; {did_you_mean(network, NETWORKS)}")
    return True


def _slice(name: str, node: Node, count: int) -> Cluster:
    if node.dimensions is None or node.most is None:
        raise wrong("nodes", node.name, "a pod needs both dimensions and most")
    chips, left = divmod(count, node.cores_per_chip)
    if left or not chips or chips > node.most:
        raise UsageError(
            f"cluster '{name}': a slice of {node.name} has up to {node.most:,} chips, and its name counts "
            f"{node.cores_per_chip} for each.\n  The largest is {node.name}-{node.most * node.cores_per_chip}."
        )
    torus, wraps_at = _cube(chips, node.dimensions), node.wraps_at if chips >= node.wraps_from else 0
    return Cluster(name, accelerator(node.accelerator), 1, chips, link(node.inside), torus=torus, wraps_at=wraps_at)


def _cube(chips: int, dimensions: int) -> tuple[int, ...]:
    """The most even sizes of a torus, in rising order.

    >>> _cube(2048, 3), _cube(8960, 3), _cube(256, 2)
    ((8, 16, 16), (16, 20, 28), (16, 16))
    """

    def sizes(left: int, count: int, least: int) -> list[tuple[int, ...]]:
        if count == 1:
            return [(left,)]
        return [
            (d, *more)
            for d in range(least, int(left ** (1 / count)) + 2)
            if left % d == 0
            for more in sizes(left // d, count - 1, d)
            if more[0] >= d
        ]

    return min((s for s in sizes(chips, dimensions, 1) if prod(s) == chips), key=lambda s: (sum(s), s))
