"""What NVFP4 adds to scales of blocks: rotated inputs of weight gradients, and stochastic rounding of gradients.

Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4. The number format and
its scales are in `shoal.engine.precision.float8`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.kernels.rounding import draw_bits
from shoal.engine.models.initial import shift_right, stream_key

ROTATED = 16  # elements of a row that one Hadamard transform mixes
NEGATIVE = 0xD7E8  # which of 16 signs are negative: drawn once, for all layers and runs (section 4.2)


def rotate(x: Tensor) -> Tensor:
    """Multiply each 16 elements of a row of x [m, k] by signs and an orthogonal Hadamard matrix, at least in float32.

    Outliers spread over 16 elements, and a product of two rotated matrices along k stays the same.

    Returns:
        [m, k rounded up to a multiple of 16].
    """
    x = F.pad(x.detach().to(torch.promote_types(x.dtype, torch.float32)), (0, -x.shape[1] % ROTATED))
    shape = x.shape
    # numbers on the device, as the host's would be copied to it
    negative = torch.bitwise_right_shift(NEGATIVE, torch.arange(ROTATED, device=x.device)) & 1
    x = x.reshape(-1, ROTATED) * (1 - 2 * negative)
    # Sylvester's matrix in four steps, each of one bit of the index: its fast transform, in the order of the program
    # that rotates on hardware, as sums of rounded numbers depend on the order
    for _ in range(4):
        even, odd = x[:, ::2], x[:, 1::2]
        x = torch.cat((even + odd, even - odd), 1)
    return (x / ROTATED**0.5).view(shape)


def draw_rounding(key: int, start: Tensor | int, tokens: int, features: Tensor) -> tuple[Tensor, Tensor]:
    """Draw numbers in (0, 1), multiples of 2^-17, for a gradient and for its transpose: both [tokens, features].

    The key of a token has 32 bits: of a million pairs of tokens about four, at a width of 16,384, draw the same numbers
    in another order.

    Args:
        key: a `stream_key`.
        start: position of the first token.
        features: their positions [f].
    """
    rows = start + torch.arange(tokens, device=features.device)
    rows = draw_bits(draw_bits(key, rows >> 32), rows)
    bits = draw_bits(rows.unsqueeze(1), features)
    along, across = ((half + 0.5) * 2.0**-16 for half in (bits & 0xFFFF, shift_right(bits, 16)))
    return along, across


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

    def key(self, name: str) -> int:
        """Return the key of the gradient of a layer, for `draw_rounding`."""
        return stream_key(self.seed, name)
