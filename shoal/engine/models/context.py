"""Inputs shared by all layers of one forward pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shoal.engine.models.cache import Slice
from shoal.engine.models.experts.router import RoutingContext


class Context(NamedTuple):
    """Inputs shared by all layers of one forward pass."""

    rotary: tuple[Tensor, Tensor] | None  # cos, sin: [s, d/2], or [b, 1, s, d/2] if positions differ between sequences
    mask: Tensor | None  # [b or 1, 1, s, t] bool, True where attention is allowed; None is causal
    part: Slice | None = None  # cache of earlier tokens if the sequence comes in slices: t = start + s
    routing: RoutingContext = RoutingContext()
    documents: Tensor | None = None  # [b, s] document numbers, separated by the mask
