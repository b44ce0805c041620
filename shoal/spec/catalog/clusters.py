"""Links, nodes and clusters. A cluster's name is ``8xH100``, ``64x8xH100-IB400``, ``v5p-4096`` or an accelerator's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from shoal.base.calls import check_arguments
from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section
from shoal.spec.catalog.accelerators import Accelerator, accelerator, accelerators
from shoal.spec.catalog.tables import entries, find, wrong

NETWORKS = {
    "IB100": "infiniband-edr", "IB200": "infiniband-hdr", "IB400": "infiniband-ndr", "IB800": "infiniband-xdr",
    "ETH10": "ethernet-10g", "ETH100": "ethernet-100g", "ETH400": "ethernet-400g",
    "EFA50": "efa-50g", "EFA400": "efa-400g",
}  # fmt: skip
"""Suffixes of a cluster's name: the network between its nodes."""


class Link(Section):
    """One direction of a link."""

    name: str  # Name in the catalog
    bandwidth: PositiveFloat  # Bandwidth in bytes/s
    latency: NonNegativeFloat  # Latency of a message of any size, in seconds
    source: str  # Source of the numbers


class Node(Section):
    """A server or pod of accelerators."""

    name: str  # Name in the catalog
    accelerator: str  # Name of its accelerators in the catalog
    per_node: PositiveInt = 1  # Accelerators per node, unless the cluster's name gives a number
    per_host: PositiveInt | None = None  # Racks of many hosts that one link joins: accelerators per host
    inside: str  # Link from each accelerator to the others of its node, or to its neighbours in a torus
    nic: str | None = None  # Link that leads out of the node
    nics: PositiveInt | None = None  # Number of these links per node
    dimensions: PositiveInt | None = None  # Pods: dimensions of the torus
    most: PositiveInt | None = None  # Pods: maximum number of chips
    wraps_at: PositiveInt = 1  # Pods: an axis is a ring if its number of chips is a multiple of this, else a line
    wraps_from: PositiveInt = 1  # Pods: chips of the smallest slice that has rings
    cores_per_chip: PositiveInt = 1  # Pods: cores per chip, which the number in a slice's name counts
    # Accelerators of a node that compute at the same time (default: all), for ranks that share the node's cores; the
    # others wait. They also share the accelerator's memory.
    at_once: PositiveInt | None = None
    # Maximum power of a complete node in W, with its host, switches and fans; None if not published
    watts: PositiveFloat | None = None
    # Power of a complete node relative to its accelerators' boards, where ``watts`` is not published. 1.8 is the ratio
    # of NVIDIA's DGX H100 and DGX B200 (10.2 kW of 8 x 700 W, 14.3 kW of 8 x 1 kW).
    power_overhead: PositiveFloat = 1.8
    # Power of a building relative to its computers' power; large ones report 1.10 to 1.12 (Patterson et al. 2021, table
    # 4, Google's).
    pue: PositiveFloat = 1.1
    # Constants of the calibrated cost model (`calibration.toml`) measured on this node
    constants: dict[str, NonNegativeFloat] = Field(default={})
    # Seconds of a reference computation on each core (`labs/calibration/measure.py`) when these were measured: the
    # speed of the machine at that time
    reference: PositiveFloat | None = None
    source: str  # Source of the numbers


RACK = re.compile(r"-?nvl(\d+)$", re.IGNORECASE)
"""End of the name of a rack whose accelerators one link joins, with their number."""


@dataclass(frozen=True)
class Cluster:
    """Accelerators and the links that connect them.

    Attributes:
        name: name as given.
        accelerator: type of all accelerators.
        nodes, per_node: number of nodes, and accelerators in each. A slice of a pod is one node.
        inside: link from one accelerator to the switch of its node; in a torus, each of its links.
        nic: link of one adapter, out of the node; None for a single node.
        nics: adapters per node.
        torus: sizes of a node's dimensions, empty for switched nodes.
        wraps_at: axes whose size is a multiple of this are rings, others are lines; 0 if all are lines.
        thin: loss of adapter bandwidth in collectives when the number of nodes doubles: the exponent of a power law.
        all_to_all: part of an adapter's bandwidth that an all-to-all attains.
        at_once: accelerators of a node that compute at the same time, and share its memory; None for all.
        watts: power of one accelerator with its share of the node, at the limit that ``watts_of`` states; None if
            unknown.
        watts_of: what ``watts`` counts.
        pue: power of the building relative to its computers.
        missing: accelerators that the last node has less than the others.
        constants: constants of the calibrated cost model measured on this cluster.
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
    all_to_all: float = 1.0
    at_once: int | None = None
    watts: float | None = None
    watts_of: str = ""
    pue: float = 1.0
    missing: int = 0
    constants: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Cluster {self.name}: {self.describe()}>"

    @property
    def turns(self) -> float:
        """Number of accelerators that share one compute resource: 1 if each has its own."""
        return max(1.0, self.per_node / self.at_once) if self.at_once else 1.0

    @property
    def memory_bytes(self) -> float:
        """Memory of one accelerator in bytes; accelerators that share a memory have equal parts of it."""
        return self.accelerator.memory_bytes / (self.per_node if self.at_once else 1)

    @property
    def size(self) -> int:
        """Number of accelerators."""
        return self.nodes * self.per_node - self.missing

    def part(self, nodes: int, per_node: int | None = None) -> Cluster:
        """Return the same kind of cluster with another number of full nodes, or with a part of each.

        Raises:
            UsageError: the cluster is a torus (a slice of a pod), or several nodes have no known interconnect.
        """
        if self.torus:
            raise UsageError(
                f"cluster '{self.name}': slices of a pod have sizes of their own.\n  Plan them one by one."
            )
        if nodes > 1 and self.nic is None:
            raise UsageError(
                f"cluster '{self.name}' is one node, which says nothing of a network."
                f"\n  Name two, as 2x{self.name}."
            )
        each = per_node or self.per_node
        name = f"{each}x{re.sub(r'^([0-9]+x){1,2}', '', self.name)}"
        name = f"{nodes}x{name}" if nodes > 1 else name
        nics, nic = max(1, self.nics * each // self.per_node), self.nic if nodes > 1 else None
        return replace(self, name=name, nodes=nodes, per_node=each, nics=nics, nic=nic, missing=0)

    def closed(self, chips: int) -> bool:
        """Return whether a torus axis of this size is a ring."""
        return bool(self.wraps_at) and chips % self.wraps_at == 0

    def describe(self) -> str:
        """Describe the cluster for the title of a table."""
        what = f"{self.size:,} x {self.accelerator.name}"
        if self.inside is None:
            return what
        if self.torus:
            out = f", {self.nodes} slices with {self.nic.name} between" if self.nic else ""
            return f"{what}, torus {' x '.join(map(str, self.torus))} of {self.inside.name}{out}"
        last = f" (the last has {self.per_node - self.missing})" if self.missing else ""
        out = f", {self.nodes:,} nodes{last} with {self.nics} x {self.nic.name}" if self.nic else ""
        return f"{what}, {self.inside.name} inside {'each node' if self.nic else 'the node'}{out}"


def link(name: str) -> Link:
    """Return a link by its name in the catalog.

    Raises:
        UsageError: the name is not in the catalog.
    """
    return find(name, entries("links", Link), "link")


def links() -> Mapping[str, Link]:
    """Return all links by name."""
    return entries("links", Link)


def nodes() -> Mapping[str, Node]:
    """Return all node types by name."""
    return entries("nodes", Node)


@check_arguments
def cluster(name: str) -> Cluster:
    """Return a cluster by its name.

    ``8xH100`` is a node, ``64x8xH100`` 64 nodes; ``-IB400`` selects another network between them; ``4xA100`` is half a
    node; ``100xH100`` is 12 nodes of 8 and one of 4. ``v5p-4096`` is a slice of a pod in the manufacturer's notation,
    which for v4, v5p and tpu7x counts TensorCores, two per chip; ``2xv5p-4096`` is two on a data-centre network.

    ``8xGB200-NVL72`` is eight racks of 72. ``32x4xGB200`` is 128 in 32 hosts of 4, as a job scheduler counts nodes: a
    rack of 72 and part of another, since NVLink joins the hosts of a rack.

    >>> cluster("64x8xH100-IB200").nic.name, cluster("v5p-4096").torus
    ('infiniband-hdr', (8, 16, 16))

    Raises:
        UsageError: a form, an accelerator or a network that is not known, or a slice larger than its pod.
    """
    given = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?(.+)", name, re.IGNORECASE)
    wanted, per_node, rest = given.groups() if given else (None, None, name)
    if wanted is None:
        pod = re.fullmatch(r"(?:tpu-)?(\w+)-(\d+)", rest, re.IGNORECASE)
        if pod and (kind := _known(pod[1])) and nodes()[kind].dimensions:
            return _slices(name, int(per_node or 1), nodes()[kind], int(pod[2]))
        if per_node is None and rest in accelerators():
            board = accelerator(rest)
            return Cluster(name, board, 1, 1, watts=board.watts, watts_of="of the board alone")
    rest, _, network = rest.rpartition("-") if _network(rest) else (rest, "", "")
    kind = _known(rest)
    if kind is None and rest == "here":
        raise UsageError(f"cluster '{name}': no --catalog has measurements of this machine."
                         "\n  Run shoal calibrate --out here.toml, then add --catalog here.toml.")  # fmt: skip
    if kind is None:
        raise UsageError(
            f"cluster '{name}': there is no node type '{rest}'; {did_you_mean(rest, nodes())}"
            "\n  Write 8xH100, 64x8xH100-IB400, v5p-4096, or one accelerator of the catalog, as h100-sxm."
        )
    node = nodes()[kind]
    if node.dimensions:
        full_pod = f"{kind}-{node.cores_per_chip * 256}"
        raise UsageError(f"cluster '{name}': a {kind} comes in slices of a pod.\n  Write {full_pod}.")
    plain = f"{kind}-{network}" if network else kind
    if RACK.search(rest):
        racks = f"{wanted}x{per_node}" if wanted else f"{per_node or 1}x{node.per_node}"
        return cluster(f"{racks}x{plain}")
    if wanted and int(wanted) > 1 and per_node == str(node.per_host):
        return cluster(f"{int(wanted) * int(per_node)}x{plain}")
    count, each = int(wanted or 1), int(per_node or (node.per_node if wanted else 1))
    if not count or not each:
        raise UsageError(f"cluster '{name}': at least one node of at least one {kind}.")
    missing = 0
    if wanted is None and each > node.per_node:
        count, missing, each = -(-each // node.per_node), -each % node.per_node, node.per_node
    if each > node.per_node:
        raise UsageError(f"cluster '{name}': a node has at most {node.per_node} {kind}, not {each}.")
    adapter = NETWORKS[network.upper()] if network else node.nic
    nic = link(adapter) if count > 1 and adapter else None
    if count > 1 and nic is None:
        raise UsageError(f"cluster '{name}': node type {kind} has no nic.\n  Name a network: {', '.join(NETWORKS)}.")
    nics = max(1, (node.nics or node.per_node) * each // node.per_node)
    return Cluster(
        name, accelerator(node.accelerator), count, each, link(node.inside), nic, nics, at_once=node.at_once,
        missing=missing, constants=node.constants, **_power(node),
    )


def _power(node: Node) -> dict[str, Any]:
    """Return a cluster's fields of power."""
    if node.watts:
        of = "with its share of a node at its power limit"
        return {"watts": node.watts / node.per_node, "watts_of": of, "pue": node.pue}
    board = accelerator(node.accelerator).watts
    of = f"{node.power_overhead:g} times its board's limit"
    return {"watts": board and board * node.power_overhead, "watts_of": of, "pue": node.pue}


def _known(name: str) -> str | None:
    """Return the node type with this name, ignoring case, and form and memory where these are its own.

    >>> _known("a100"), _known("A100-SXM4-80GB"), _known("A100-SXM4-40GB"), _known("H100-40GB"), _known("gb200-nvl72")
    ('A100', 'A100', 'A100-40GB', None, 'GB200')
    """
    types = {known.lower(): known for known in nodes()}
    plain, memory = re.fullmatch(r"(.*?)(?:-sxm\d?)?(-\d+gb)?", name.lower(), re.DOTALL).groups()  # type: ignore[union-attr]
    if kind := types.get(name.lower()) or types.get(f"{plain}{memory or ''}"):
        return kind
    if rack := RACK.search(plain):
        kind = types.get(plain[: rack.start()])
        return kind if kind and nodes()[kind].per_node == int(rack[1]) else None
    if (kind := types.get(plain)) and memory:
        size = accelerator(nodes()[kind].accelerator).memory_bytes
        return kind if abs(float(memory[1:-2]) * 1e9 / size - 1) < 0.1 else None
    return None


def _network(name: str) -> bool:
    """Return whether a node type's name is followed by a network's.

    Raises:
        UsageError: an unknown network follows.
    """
    if _known(name) or "-" not in name or not _known(name.rpartition("-")[0]):
        return False
    network = name.rpartition("-")[2].upper()
    if re.fullmatch(r"\d+GB", network):
        return False  # memory that no such node has
    node = nodes()[_known(name.rpartition("-")[0]) or ""]
    if node.per_host and RACK.fullmatch(network):
        kind, size = node.name, node.per_node
        raise UsageError(f"cluster: a rack of {kind} has {size}.\n  Write {kind}-NVL{size}.")
    if network not in NETWORKS:
        raise UsageError(f"cluster: there is no network '{network}'; {did_you_mean(network, NETWORKS)}")
    return True


def _slices(name: str, slices: int, node: Node, count: int) -> Cluster:
    if node.dimensions is None or node.most is None:
        raise wrong("nodes", node.name, "a pod needs both dimensions and most")
    chips, left = divmod(count, node.cores_per_chip)
    if not slices:
        raise UsageError(f"cluster '{name}': at least one slice.")
    if left or not chips or chips > node.most:
        raise UsageError(
            f"cluster '{name}': a slice of {node.name} has up to {node.most:,} chips, and its name counts "
            f"{node.cores_per_chip} for each.\n  The largest is {node.name}-{node.most * node.cores_per_chip}."
        )
    torus, wraps_at = _cube(chips, node.dimensions), node.wraps_at if chips >= node.wraps_from else 0
    nic = link(node.nic) if slices > 1 and node.nic else None
    return Cluster(
        name, accelerator(node.accelerator), slices, chips, link(node.inside), nic, chips, torus, wraps_at,
        **_power(node),
    )


def _cube(chips: int, dimensions: int) -> tuple[int, ...]:
    """Return the most balanced sizes of a torus, in ascending order.

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
