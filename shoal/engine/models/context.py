"""What every layer of one forward pass shares."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shoal.engine.models.cache import Slice
from shoal.engine.models.experts.router import RoutingContext


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    rotary: tuple[Tensor, Tensor] | None  # cos, sin: [s, d/2], or [b, 1, s, d/2] where each sequence has its own places
    mask: Tensor | None  # [b or 1, 1, s, t] bool, True where attention is allowed; None is causal
    part: Slice | None = None  # keys and values of the tokens before, where the sequence comes in slices: t = start + s
    routing: RoutingContext = RoutingContext()
    documents: Tensor | None = None  # [b, s], whose tokens the mask keeps apart
