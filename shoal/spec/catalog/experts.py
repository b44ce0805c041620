"""What decides the experts of a mixture: how many, how wide, in which layers, and how tokens are given to them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section

Gate = Literal["top-k", "switch", "gshard", "noisy-top-k", "expert-choice"]
Score = Literal["softmax", "sigmoid"]


class LayerPattern(Section):
    """The layers of a model that are of some kind: after the first few, every n-th."""

    first: NonNegativeInt = 0
    """Layers at the start of the model that are plain."""

    every: PositiveInt = 1
    """After the first `first` layers, every `every`-th layer is of this kind: 2 is every other layer."""

    def has(self, layer: int) -> bool:
        """Whether a layer is of this kind.

        >>> [LayerPattern(first=1, every=2).has(layer) for layer in range(5)]
        [False, False, True, False, True]
        """
        return layer >= self.first and (layer - self.first) % self.every == self.every - 1

    def layers(self, total: int) -> list[int]:
        """The layers of this kind, of ``total`` layers."""
        return [layer for layer in range(total) if self.has(layer)]


class Experts(LayerPattern):
    """The experts that stand in place of some layers' feed-forward blocks."""

    count: int = Field(gt=0, le=2**16)
    """E, experts of a layer that tokens are routed to."""

    per_token: PositiveInt = 1
    """k, experts that a token is given to (expert-choice: on average, with capacity_factor 1)."""

    ffn: int = Field(gt=0, le=2**24)
    """Width inside one expert."""

    shared: int = Field(default=0, ge=0, le=2**10)
    """Experts besides these that every token passes through (Dai et al. 2024, "DeepSeekMoE"), as one block of their
    width together."""

    gate: Gate = "top-k"
    """top-k (Jiang et al. 2024; Gale et al. 2023), switch (Fedus et al. 2022), gshard (Lepikhin et al. 2020),
    noisy-top-k (Shazeer et al. 2017), expert-choice (Zhou et al. 2022)."""

    score: Score = "softmax"
    """top-k: what makes scores of the router's logits."""

    normalise: bool = True
    """top-k: a token's weights are divided by their sum."""

    scale: PositiveFloat = 1.0
    """top-k: factor on the weights."""

    capacity_factor: NonNegativeFloat = 0.0
    """An expert takes at most this many times its even share of the tokens of a sequence, the rest is dropped; 0 drops
    nothing. expert-choice: how many it chooses (0 is 1)."""

    balance_loss: NonNegativeFloat = 0.0
    """Weight of the loss that is least where all experts get the same."""

    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-sum-exp of the router's logits (Zoph et al. 2022, equation 5)."""

    bias_update: NonNegativeFloat = Field(default=0.0, lt=1)
    """What is added in every step to the bias of experts that got less than their share, and taken from that of the
    others; the bias counts in choosing alone (Wang et al. 2024, "Loss-free balancing"). 0 has no bias."""
