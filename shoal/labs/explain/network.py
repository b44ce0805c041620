"""The network of an explanation: options, and the topology that they name."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import BANDWIDTH, TIME, parse, show_bytes, show_seconds
from shoal.labs.collectives import topology as networks
from shoal.labs.collectives.topology import Topology, Wire
from shoal.labs.explain.device.accelerators import find_node
from shoal.spec.catalog.accelerators import accelerator
from shoal.spec.catalog.clusters import link

INSIDE = "nvlink-4"  # link inside an island
READ_BY = {"oversubscription": ("fat-tree",), "nics": ("islands",)}
"""The topologies that use each option."""


class NetworkOptions(Section):
    """What connects the ranks."""

    topology: str = "full"
    """Shape of the network."""

    link: str = ""
    """Link between ranks, or of a NIC: a name of the catalog, such as ici-v5p (default: the link in a node of the
    accelerator)."""

    alpha: str = ""
    """Latency of that link instead of the catalog's: 5us."""

    bandwidth: str = ""
    """Its bandwidth in one direction instead of the catalog's: 45GB/s."""

    per_node: PositiveInt | None = None
    """Ranks of a node or of a leaf switch (default: the largest divisor of their number up to 8)."""

    nics: PositiveInt | None = None
    """NICs of an island's node (default: one for each rank)."""

    oversubscription: PositiveFloat = 1.0
    """Oversubscription of a fat tree: what a leaf's ranks can send over what its trunk carries."""

    accelerator: str = "h100-sxm"
    """Device whose memory adds the numbers of a reduction: a name of the catalog."""

    @property
    def wire(self) -> Wire:
        """The link.

        Raises:
            UsageError: the link is not in the catalog, or its bandwidth is 0; or no link is given, and the catalog has
                no node with the accelerator.
        """
        known = link(self.link or self._link_in_node())
        alpha = parse(self.alpha, TIME, where="--alpha") if self.alpha else known.latency
        bandwidth = parse(self.bandwidth, BANDWIDTH, where="--bandwidth") if self.bandwidth else known.bandwidth
        if bandwidth == 0:
            raise UsageError(f"--bandwidth {self.bandwidth}: must be above 0")
        return Wire(alpha, bandwidth, "link" if self.alpha or self.bandwidth else known.name)

    def _link_in_node(self) -> str:
        node = find_node(accelerator(self.accelerator))
        if node is None:
            raise UsageError(
                f"--accelerator {self.accelerator}: the catalog has no node with it.\n  Name a link: --link pcie-4."
            )
        return node.inside

    def describe_wire(self) -> str:
        wire = self.wire
        return f"{wire.kind} with α = {show_seconds(wire.latency)}, 1/β = {show_bytes(wire.bandwidth)}/s"

    def ranks_per_node(self, ranks: int) -> int:
        """Return ``per_node`` or its default."""
        return self.per_node or max((d for d in range(1, min(8, ranks - 1) + 1) if ranks % d == 0), default=1)


def check_network(options: NetworkOptions, topologies: tuple[str, ...], more: dict[str, tuple[str, ...]]) -> None:
    """Reject an unknown topology, and options that it does not use by `READ_BY` and ``more``."""
    if options.topology not in topologies:
        raise UsageError(f"--topology {options.topology}: {did_you_mean(options.topology, topologies)}")
    for name, readers in {**READ_BY, **more}.items():
        if options.topology not in readers:
            reject_unused(options, [name], f"only for --topology {' or '.join(readers)}, not {options.topology}")


def build_network(options: NetworkOptions, ranks: int, shape: tuple[int, ...]) -> Topology:
    """Build the topology that the options name; ``shape`` is that of a torus."""
    wire, per_node = options.wire, options.ranks_per_node(ranks)
    gamma = 3 / accelerator(options.accelerator).memory_bandwidth  # reads two numbers and writes one
    match options.topology:
        case "full":
            return networks.fully_connected(ranks, wire, gamma)
        case "ring":
            return networks.ring(ranks, wire, gamma)
        case "fat-tree":
            return networks.fat_tree(ranks, per_node, wire, options.oversubscription, gamma)
        case "islands":
            known = link(INSIDE)
            inside = Wire(known.latency, known.bandwidth, known.name)
            return networks.islands(ranks, per_node, inside, wire, options.nics, gamma)
        case _:
            return networks.torus(shape, wire, gamma)
