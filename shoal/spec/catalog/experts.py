"""Layers with experts, and layers that process only part of the tokens (mixture of depths)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section

Gate = Literal["top-k", "switch", "gshard", "noisy-top-k", "expert-choice"]
Score = Literal["softmax", "sigmoid"]


class LayerPattern(Section):
    """Selection of a model's layers: after the first few, every n-th."""

    first: NonNegativeInt = 0
    """Number of plain layers at the start of the model."""

    every: PositiveInt = 1
    """After the first `first` layers, every `every`-th layer is of this kind; 2 selects every other layer."""

    def has(self, layer: int) -> bool:
        """Return whether a layer is of this kind.

        >>> [LayerPattern(first=1, every=2).has(layer) for layer in range(5)]
        [False, False, True, False, True]
        """
        return layer >= self.first and (layer - self.first) % self.every == self.every - 1

    def layers(self, total: int) -> list[int]:
        """Return the indices of layers of this kind, of ``total`` layers."""
        return [layer for layer in range(total) if self.has(layer)]


class Experts(LayerPattern):
    """Experts that replace the feed-forward blocks of some layers."""

    count: int = Field(gt=0, le=2**16)
    """E, routed experts per layer."""

    per_token: PositiveInt = 1
    """k, experts per token (expert-choice: on average, with capacity_factor 1)."""

    ffn: int = Field(gt=0, le=2**24)
    """Width inside each expert."""

    shared: int = Field(default=0, ge=0, le=2**10)
    """Additional experts that process every token (Dai et al. 2024, "DeepSeekMoE"), computed as one block of their
    total width."""

    gate: Gate = "top-k"
    """top-k (Jiang et al. 2024; Gale et al. 2023), switch (Fedus et al. 2022), gshard (Lepikhin et al. 2020),
    noisy-top-k (Shazeer et al. 2017), expert-choice (Zhou et al. 2022)."""

    groups: int = Field(default=1, gt=0, le=2**16)
    """top-k: consecutive groups of equally many experts, such as the experts of a node (DeepSeek-AI 2024, DeepSeek-V2,
    section 2.2.2)."""

    groups_per_token: PositiveInt = 1
    """top-k: groups that the experts of a token are chosen from: those with the highest score, which for softmax is the
    highest of an expert, and for sigmoid the sum of the two highest (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2)."""

    score: Score = "softmax"
    """top-k: function from the router's logits to scores."""

    normalise: bool = True
    """top-k: divide the weights of a token by their sum."""

    scale: PositiveFloat = 1.0
    """top-k: factor on the weights."""

    scales_input: bool = False
    """top-k with one expert per token: its weight multiplies the expert's input instead of its output (Llama 4)."""

    biases: bool = False
    """top-k: the router's logits and the matrices of the experts have biases (gpt-oss)."""

    capacity_factor: NonNegativeFloat = 0.0
    """Maximum tokens per expert, as a multiple of its even share of the tokens of a sequence; tokens above it are
    dropped. 0 drops none. expert-choice: tokens that each expert chooses, in the same unit (0 means 1)."""

    balance_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss, which is minimal when all experts get the same number of tokens."""

    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-sum-exp of the router's logits (Zoph et al. 2022, equation 5)."""

    bias_update: NonNegativeFloat = Field(default=0.0, lt=1)
    """Step of the selection bias, added for experts below their share and subtracted for the others in every step. The
    bias only affects selection (Wang et al. 2024, "Loss-free balancing"). 0 uses no bias."""


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
