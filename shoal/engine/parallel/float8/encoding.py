"""Encoding of the matrices of a product in 8 or 4 bits: by the recipe's scales, the same on every layout.

Where a scaling block spans features split by tensor parallelism, its absolute maximum is reduced over the axis, so
scales equal the single-device ones. Blocks inside a rank's part need no communication.

Codes are decoded before the product, in the compute dtype, except where the hardware multiplies them: then
`shoal.engine.kernels.quantise` encodes a matrix and its transpose together, in 8 bits also the result of an operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.kernels.quantise import maxima, nvfp4_maxima, quantise, quantise_blocks, quantise_nvfp4
from shoal.engine.precision.float8 import ROW, Codes, compute_scale, encode, largest
from shoal.engine.precision.nvfp4 import RoundingDraws, draw_rounding, rotate
from shoal.engine.precision.recipe import GRADIENT, INPUT, WEIGHT, AmaxHistory, Recipe, warn_of_tokens

TOKENS, IN, OUT = "tokens", "in", "out"
DIMS = {INPUT: (TOKENS, IN), WEIGHT: (OUT, IN), GRADIENT: (TOKENS, OUT)}

Encoded = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Codes and scales of a matrix, of its transpose, and its absolute maxima (of blocks or in total)."""


class Encoder:
    """Encoding of the input, the weight and the output gradient of one product.

    Args:
        name: of the product, in the history.
        split: the dimension that tensor parallelism splits over ``group``: "in", "out" (of the weight), "tokens" or "".
        native: whether the device multiplies the codes, for a suitable number of tokens; else they are decoded first.

    Attributes:
        warns: whether this rank warns of numbers of tokens that products on hardware do not take.
        draws: random numbers that round gradients; None to round to the nearest.
        features: positions of the output features of this rank, if it has draws.
    """

    warns = False
    draws: RoundingDraws | None = None
    features: Tensor

    def __init__(
        self, name: str, recipe: Recipe, history: AmaxHistory | None, split: str, group: Group | None, *, native: bool
    ):
        self.name, self.recipe, self.history = name, recipe, history
        self.split, self.group, self.native = split, group, native

    def fits(self, tokens: int) -> bool:
        """Return whether the device multiplies the codes of a micro-batch with this many tokens."""
        return self.native and tokens % self.recipe.alignment == 0

    def on_hardware(self, tokens: int) -> bool:
        """Return `fits`, and warn once of tokens that do not."""
        fits = self.fits(tokens)
        if self.native and not fits and self.warns:
            warn_of_tokens(tokens, self.recipe)
        return fits

    def encode_tokens(self, x: Tensor, what: int, start: Tensor | int | None = None) -> Encoded:
        """Encode a matrix whose rows are tokens, and its transpose; see `encode`."""
        return self.encode(x, what, native=self.on_hardware(len(x)), start=start)

    def encode(self, x: Tensor, what: int, *, native: bool, start: Tensor | int | None = None) -> Encoded:
        """Encode a matrix and its transpose; if ``native``, as operands of products on hardware.

        Args:
            start: position of the first row, of a gradient that `draws` rounds.
        """
        if native and self.recipe.rotates:
            return self._encode_nvfp4(x, what, start)
        if native:
            return self.encode_result("plain", (x,), what)
        turned = rotate(x.t()) if self.recipe.rotates and not self.recipe.is_square(what) else x.t()
        along = across = None
        if self.draws is not None and start is not None:
            along, across = draw_rounding(self.draws.key(self.name), start, turned.shape[1], self.features)
            along, across = along[: len(x)], across.t()
        codes, amax = self.encode_alone(x, what, DIMS[what], along)
        if self.recipe.is_square(what):
            transpose = codes.t()
        else:
            transpose, _ = self.encode_alone(turned, what, DIMS[what][::-1], across)
        return codes.codes, codes.scale, transpose.codes, transpose.scale, amax

    def _encode_nvfp4(self, x: Tensor, what: int, start: Tensor | int | None) -> Encoded:
        square, key, features = self.recipe.is_square(what), 0, None
        most = maxima(x, False) if square else nvfp4_maxima(x)
        if self.split in DIMS[what]:
            all_reduce(most, self.group, dist.ReduceOp.MAX)
        if self.draws is not None and start is not None:
            key, features = self.draws.key(self.name), self.features
            start = start if isinstance(start, Tensor) else torch.full((), start, device=x.device)
        codes, turned, scale, turned_scale = quantise_nvfp4(x, most, square, key, start, features)
        return codes, scale, turned, turned_scale, most

    def encode_alone(
        self, x: Tensor, what: int, dims: tuple[str, str], draws: Tensor | None = None
    ) -> tuple[Codes, Tensor]:
        """Encode a matrix with these dimensions, but not its transpose; also return its absolute maxima.

        Args:
            draws: see `shoal.engine.precision.float8.encode`.
        """
        kind, grain = self.recipe.kinds[what], self.recipe.grains[what]
        own = amax = largest(x, grain)
        scale = self.history.scale(self.name, what) if self.history else None
        if scale is None:
            spanned = [dim for dim, size in zip(dims, (grain.rows, grain.columns), strict=True) if size == 0]
            if self.split in spanned:
                amax = all_reduce(amax.clone(), self.group, dist.ReduceOp.MAX)
            total = None
            if grain.scale == "nv" and self.split in dims:
                total = all_reduce(amax.max(), self.group, dist.ReduceOp.MAX)
            scale = compute_scale(amax, kind, grain, total)
        else:  # codes are finite for any x, but non-finite values must stay detectable
            scale = torch.where(own.isfinite().all(), scale, torch.nan)
        return encode(x, scale, kind, grain, draws), own

    def encode_result(
        self, source: str, inputs: Sequence[Tensor], what: int, amax: Tensor | None = None
    ) -> Encoded:
        """Encode the result of an operation and its transpose, as operands of products on hardware.

        Args:
            source, inputs: operation in `shoal.engine.kernels.quantise.SOURCES`, and what it reads.
            amax: largest magnitude of the result [1], if known.
        """
        x, a, b = (*inputs, None, None)[:3]
        assert x is not None
        kind, grain = self.recipe.kinds[what].name, self.recipe.grains[what]
        if grain.columns:
            codes, turned, inverse, turned_inverse = quantise_blocks(x, kind, *grain, a, b, source)
            return codes, inverse, turned, turned_inverse, inverse  # blocks have no history
        by_row = grain == ROW
        scale = self.history.scale(self.name, what) if self.history else None
        if scale is not None:
            codes, turned, inverse, _, amax = quantise(x, scale.view(1), kind, by_row, True, a, b, source)
            inverse = torch.add(inverse, amax, alpha=0)  # NaN if x is not finite, as in `encode_alone`
            return codes, inverse, turned, inverse, amax
        if amax is None or by_row:
            amax = maxima(x, by_row, a, b, source)
        if self.split in DIMS[what]:  # reduce the maxima over the split dimension
            rows, _ = DIMS[what]
            spanning = amax if not by_row else amax[len(x) :] if self.split == rows else amax[: len(x)]
            all_reduce(spanning, self.group, dist.ReduceOp.MAX)
        codes, turned, inverse, turned_inverse, _ = quantise(x, amax, kind, by_row, False, a, b, source)
        return codes, inverse, turned, turned_inverse, amax

    def note(self, what: int, amax: Tensor) -> None:
        """Record absolute maxima in the history, if the recipe has one."""
        if self.history:
            self.history.note(self.name, what, amax)
