"""What products in 8 bits keep of their input for backward: codes of its transpose, of one byte, and their scales.

As `shoal.engine.parallel.float8` and `shoal.engine.precision.recipe` have it, which need torch.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from shoal.spec.config import Float8Config
from shoal.spec.number_formats import MX_BLOCK, Formats


class EightBits(NamedTuple):
    """Which products of the layers are made in 8 bits, and how.

    Attributes:
        whole: all numbers of an input share a scale; else each feature has its own.
        block: tokens that share a feature's scale; 0 is all of them.
        keep: patterns of the linear layers that are not in 8 bits.
    """

    whole: bool
    block: int
    keep: tuple[str, ...] = ()

    @staticmethod
    def of(formats: Formats, config: Float8Config) -> EightBits | None:
        """Of a precision; None where products are in the compute format."""
        if formats.products == "compute":
            return None
        if formats.products == "mxfp8":
            return EightBits(False, MX_BLOCK, config.keep)
        return EightBits(config.scales == "tensor", config.block if config.scales == "block" else 0, config.keep)

    def takes(self, name: str) -> bool:
        """Whether a linear layer of the model's blocks is in 8 bits."""
        return not any(fnmatchcase(name, pattern) for pattern in self.keep)

    def scales(self, tokens: int, width: int) -> int:
        """Of an input, how many there are.

        >>> EightBits(True, 0).scales(100, 8), EightBits(False, 0).scales(100, 8), EightBits(False, 32).scales(100, 8)
        (1, 8, 32)
        """
        return 1 if self.whole else width * -(-tokens // (self.block or tokens))
