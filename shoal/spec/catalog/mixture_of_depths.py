"""What decides which layers only some tokens pass through, and how many of a sequence do."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section
from shoal.spec.catalog.experts import last_of_every


class Depths(Section):
    """Layers that only the tokens which their router scores highest pass through, the others going by on the residual
    stream (Raposo et al. 2024, "Mixture-of-Depths")."""

    capacity: PositiveFloat = Field(le=1)
    """The part of each sequence's tokens that pass through such a layer, rounded up."""

    first: NonNegativeInt = 0
    """The first so many layers take all tokens."""

    every: PositiveInt = 2
    """Behind those, the last of every so many layers takes some: 2 is every other layer."""

    weight: Literal["score", "sigmoid"] = "score"
    """What multiplies that which the layer adds to a token: the router's score, as in the paper, or its sigmoid."""

    predictor: int = Field(default=32, gt=0, le=2**24)
    """Width of the network that learns to foresee, from a token alone, whether it will be among the highest: by it a
    token is decided where those after it are not known."""

    def skips(self, layer: int) -> bool:
        """Whether only some tokens pass through a layer.

        >>> [Depths(capacity=0.5).skips(layer) for layer in range(4)]
        [False, True, False, True]
        """
        return last_of_every(layer, self.first, self.every)

    def layers(self, total: int) -> list[int]:
        """Those of so many layers."""
        return [layer for layer in range(total) if self.skips(layer)]

    def taken(self, s: int) -> int:
        """Tokens that pass, of a sequence of s.

        >>> Depths(capacity=0.3).taken(10), Depths(capacity=0.125).taken(20)
        (3, 3)
        """
        return math.ceil(round(self.capacity * s, 6))  # 0.3 x 10 is a little more than 3
