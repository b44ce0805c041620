"""Bandwidth and latency of links between devices, from the manufacturers and from NCCL's own model."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from shoal.base.section import Section
from shoal.spec.catalog.tables import entries, find


class Link(Section):
    """One direction of a link."""

    name: str
    """Name in the catalog."""

    bandwidth: PositiveFloat
    """Bandwidth in bytes/s."""

    latency: NonNegativeFloat
    """Latency of a message of any size, in seconds."""

    source: str
    """Source of the numbers."""


def link(name: str) -> Link:
    """Return a link by its name in the catalog.

    Raises:
        UsageError: the name is not in the catalog.
    """
    return find(name, entries("links", Link), "link")
