"""Bandwidth and latency of links between devices, from their makers and from NCCL's own model."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from shoal.base.section import Section
from shoal.spec.catalog.tables import entries, find


class Link(Section):
    """One direction of a link."""

    name: str
    """The name in the catalog."""

    bandwidth: PositiveFloat
    """Bytes/s."""

    latency: NonNegativeFloat
    """Of a message, however short, s."""

    source: str
    """Where the numbers are from."""


def link(name: str) -> Link:
    """A link by its name in the catalog.

    Raises:
        UsageError: the name is not in the catalog.
    """
    return find(name, entries("links", Link), "link")
