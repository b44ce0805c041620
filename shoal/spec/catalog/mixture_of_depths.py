"""What decides which layers only some tokens pass through, and how many of a sequence do."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from shoal.spec.catalog.experts import LayerPattern


class Depths(LayerPattern):
    """Layers that only the tokens which their router scores highest pass through, the others going by on the residual
    stream (Raposo et al. 2024, "Mixture-of-Depths")."""

    capacity: PositiveFloat = Field(le=1)
    """The part of each sequence's tokens that pass through such a layer, rounded up."""

    every: PositiveInt = 2
    """After the first `first` layers, every `every`-th layer takes only some tokens: 2 is every other layer."""

    weight: Literal["score", "sigmoid"] = "score"
    """What multiplies that which the layer adds to a token: the router's score, as in the paper, or its sigmoid."""

    predictor: int = Field(default=32, gt=0, le=2**24)
    """Width of the network that learns to foresee, from a token alone, whether it will be among the highest: by it a
    token is decided where those after it are not known."""

    def taken(self, s: int) -> int:
        """Tokens that pass, of a sequence of s.

        >>> Depths(capacity=0.3).taken(10), Depths(capacity=0.125).taken(20)
        (3, 3)
        """
        return math.ceil(round(self.capacity * s, 6))  # 0.3 x 10 is a little more than 3
