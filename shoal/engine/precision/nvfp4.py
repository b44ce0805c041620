"""What NVFP4 adds to scales of blocks: rotated inputs of weight gradients, and stochastic rounding of gradients.

Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4. The number format and
its scales are in `shoal.engine.precision.float8`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.initial import stream_key, uniform

ROTATED = 16  # elements of a row that one Hadamard transform mixes
NEGATIVE = 0xD7E8  # which of 16 signs are negative: drawn once, for all layers and runs (section 4.2)


def rotate(x: Tensor) -> Tensor:
    """Multiply each 16 elements of a row of x [m, k] by signs and an orthogonal Hadamard matrix, at least in float32.

    Outliers spread over 16 elements, and a product of two rotated matrices along k stays the same.

    Returns:
        [m, k rounded up to a multiple of 16].
    """
    x = F.pad(x.detach().to(torch.promote_types(x.dtype, torch.float32)), (0, -x.shape[1] % ROTATED))
    # Sylvester's construction: the sign of row i and column j is the parity of i & j. From numbers on the device, as a
    # matrix of the host's would be copied to it.
    i = torch.arange(ROTATED, device=x.device)
    negative = i.unsqueeze(1) & i
    negative = negative ^ (negative >> 2)
    negative = (negative ^ (negative >> 1) ^ torch.bitwise_right_shift(NEGATIVE, i).unsqueeze(1)) & 1
    matrix = (1 - 2 * negative).to(x.dtype) / ROTATED**0.5
    return (x.reshape(-1, ROTATED) @ matrix).view(x.shape)


class RoundingDraws:
    """Random numbers that round the gradients of a step's micro-batches.

    They depend on (seed, layer, position of the token in the run's data, feature) alone, and so not on the layout. No
    token of a run has the position of another, so each step has its own.

    Attributes:
        start: position of the first token of the micro-batch whose forward runs.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.start: Tensor | int = 0

    def follow(self, model: nn.Module) -> None:
        """Take the position from each forward of a `Transformer`."""
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        samples = options["samples"] if "samples" in options else args[5] if len(args) > 5 else None
        self.start = 0 if samples is None else samples[0] * args[0].shape[1]

    def draw(self, name: str, start: Tensor | int, tokens: int, features: Tensor, width: int) -> Tensor:
        """Draw float64 numbers in (0, 1) for a gradient, [tokens, features].

        Args:
            name: of the layer and its product.
            start: position of the first token.
            features: positions of the features [f] in all ``width``.
        """
        rows = start + torch.arange(tokens, device=features.device)
        return uniform(stream_key(self.seed, name), rows.unsqueeze(1) * width + features)
