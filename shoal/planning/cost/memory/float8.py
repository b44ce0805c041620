"""Saved inputs of 8-bit products: one-byte codes of the transpose, and their scales.

Mirrors `shoal.engine.parallel.float8` and `shoal.engine.precision.recipe`, which need torch.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from shoal.spec.config import Float8Config
from shoal.spec.number_formats import MX_BLOCK, Formats


class EightBits(NamedTuple):
    """Which products of the layers are in 8 bits, and their scaling.

    Attributes:
        whole: one scale per input tensor; otherwise one per feature.
        block: tokens that share a feature's scale; 0 for all tokens.
        keep: patterns of the linear layers that stay in higher precision.
    """

    whole: bool
    block: int
    keep: tuple[str, ...] = ()

    @staticmethod
    def of(formats: Formats, config: Float8Config) -> EightBits | None:
        """Build from a precision; None if products are in the compute format."""
        if formats.products == "compute":
            return None
        if formats.products == "mxfp8":
            return EightBits(False, MX_BLOCK, config.keep)
        return EightBits(config.scales == "tensor", config.block if config.scales == "block" else 0, config.keep)

    def takes(self, name: str) -> bool:
        """Return whether a linear layer of the model's blocks is in 8 bits."""
        return not any(fnmatchcase(name, pattern) for pattern in self.keep)

    def scales(self, tokens: int, width: int) -> int:
        """Return the number of scales of an input.

        >>> EightBits(True, 0).scales(100, 8), EightBits(False, 0).scales(100, 8), EightBits(False, 32).scales(100, 8)
        (1, 8, 32)
        """
        return 1 if self.whole else width * -(-tokens // (self.block or tokens))
