"""Bandwidth and latency of links between devices, from their makers and from NCCL's own model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat

from shoal.base.errors import UsageError, did_you_mean
from shoal.spec.catalog.tables import entries, forgets


class Link(BaseModel):
    """One direction of a link."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str
    """The name in the catalog."""

    bandwidth: PositiveFloat
    """Bytes/s."""

    latency: NonNegativeFloat
    """Of a message, however short, s."""

    source: str
    """Where the numbers are from."""


@forgets
@cache
def _catalog() -> Mapping[str, Link]:
    return entries("links", Link)


def link_names() -> list[str]:
    """All names in the catalog."""
    return list(_catalog())


def link(name: str) -> Link:
    """A link by its name in the catalog.

    Raises:
        UsageError: the name is not in the catalog.
    """
    if name not in _catalog():
        raise UsageError(f"link '{name}' is not in the catalog; {did_you_mean(name, _catalog())}")
    return _catalog()[name]
