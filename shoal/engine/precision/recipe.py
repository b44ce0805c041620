"""Which tensors of a product are rounded to which 8 bits, with scales of which parts, taken from what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.precision.float8 import ROW, TENSOR, Grain, scale_of
from shoal.spec.config import Float8Config
from shoal.spec.number_formats import E4M3, E5M2, MX_BLOCK, Format, Products

INPUT, WEIGHT, GRADIENT = range(3)
"""The tensors of a linear layer: x, W, and the gradient of its output."""


@dataclass(frozen=True)
class Recipe:
    """How the products of a linear layer are made in 8 bits.

    Attributes:
        kinds: the format of each tensor.
        grains: what shares a scale in each, where it is [rows, what a product sums over].
        history: steps whose largest numbers decide the scales; 0 takes those of the tensor itself.
        margin: octaves left free above them.
        keep: patterns of the layers that are not in 8 bits.
    """

    kinds: tuple[Format, Format, Format]
    grains: tuple[Grain, Grain, Grain]
    history: int = 0
    margin: int = 0
    keep: tuple[str, ...] = ()

    @staticmethod
    def of(products: Products, config: Float8Config) -> Recipe:
        """Of a precision that has one."""
        kinds = (E4M3, E4M3, {"e4m3": E4M3, "e5m2": E5M2}[config.gradient])
        if products == "mxfp8":
            return Recipe(kinds, (Grain(1, MX_BLOCK, "mx"),) * 3, keep=config.keep)
        if config.scales == "block":
            row, square = Grain(1, config.block, "power"), Grain(config.block, config.block, "power")
            return Recipe(kinds, (row, square, row), keep=config.keep)
        grain = TENSOR if config.scales == "tensor" else ROW
        history = config.history if config.amax == "delayed" else 0
        return Recipe(kinds, (grain,) * 3, history, config.margin, config.keep)

    def turns(self, what: int) -> bool:
        """Whether the codes of a tensor are also those of its transpose."""
        return self.grains[what].rows == self.grains[what].columns


class AmaxHistory:
    """The largest numbers of the last steps, for every linear layer of the whole model (Micikevicius et al. 2022,
    section 3; NVIDIA's Transformer Engine calls it delayed scaling).

    Scales change between steps alone and come from the maximum over all ranks, so no layout changes them. The first
    step has nothing to go by: there scales come from the tensor itself.

    Args:
        layers: names.
        dtype, device: of the numbers.

    Attributes:
        known: for each layer, whether there are any yet.
    """

    def __init__(self, recipe: Recipe, layers: list[str], dtype: torch.dtype, device: torch.device):
        self.recipe, self.index = recipe, {name: i for i, name in enumerate(layers)}
        wide = torch.promote_types(dtype, torch.float32)
        self.steps = torch.zeros(len(layers), recipe.history, 3, dtype=wide, device=device)  # the newest first
        self.now = torch.zeros(len(layers), 3, dtype=wide, device=device)
        self._scales = torch.zeros_like(self.now)
        self.known = [False] * len(layers)

    def note(self, layer: str, what: int, most: Tensor) -> None:
        """What one tensor of this step has at most."""
        place = self.now[self.index[layer], what]
        torch.maximum(place, most.max(), out=place)

    def scale(self, layer: str, what: int) -> Tensor | None:
        """[1, 1]; None in the first step."""
        i = self.index[layer]
        return self._scales[i, what].view(1, 1) if self.known[i] else None

    def end_step(self) -> None:
        """A step is over, and `now` has the maximum over all ranks; what is not finite was skipped with its step."""
        newest = self.now.where(self.now.isfinite(), self.steps[:, 0])
        self.steps.copy_(torch.cat((newest.unsqueeze(1), self.steps[:, :-1]), dim=1))
        self.now.zero_()
        self.restored()

    def restored(self) -> None:
        """The history was overwritten, or begins: make scales of it."""
        self.known = (self.steps[:, 0] > 0).any(1).tolist()
        most = self.steps.amax(1)
        for what, (kind, grain) in enumerate(zip(self.recipe.kinds, self.recipe.grains, strict=True)):
            self._scales[:, what] = scale_of(most[:, what], kind, grain) * 2.0**-self.recipe.margin

    def state(self, *, primary: bool) -> dict[str, list[Piece]]:
        """For a checkpoint: the same on every rank, of which one saves it."""
        shape = tuple(self.steps.shape[1:])
        return {
            f"precision.amax.{layer}": [Piece(shape, Box.whole(shape), self.steps[i], primary)]
            for layer, i in self.index.items()
        }
