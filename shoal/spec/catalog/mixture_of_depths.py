"""Mixture of depths: layers that process only part of the tokens of a sequence."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from shoal.spec.catalog.experts import LayerPattern


class Depths(LayerPattern):
    """Layers that process only the tokens with the highest router scores. Other tokens skip the layer on the residual
    stream (Raposo et al. 2024, "Mixture-of-Depths")."""

    capacity: PositiveFloat = Field(le=1)
    """Fraction of each sequence's tokens that such a layer processes, rounded up."""

    every: PositiveInt = 2
    """After the first `first` layers, every `every`-th layer processes only some tokens; 2 selects every other one."""

    weight: Literal["score", "sigmoid"] = "score"
    """Factor on the output that the layer adds to a token: the router's score, as in the paper, or its sigmoid."""

    predictor: int = Field(default=32, gt=0, le=2**24)
    """Width of the network that predicts from a token alone whether its score will be among the highest. It decides
    where later tokens are unknown."""

    def taken(self, s: int) -> int:
        """Return the number of tokens of a sequence of s that the layer processes.

        >>> Depths(capacity=0.3).taken(10), Depths(capacity=0.125).taken(20)
        (3, 3)
        """
        return math.ceil(round(self.capacity * s, 6))  # 0.3 x 10 is slightly more than 3
