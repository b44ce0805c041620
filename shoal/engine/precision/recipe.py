"""Recipes of products in 8 or 4 bits: the format and scales of each tensor of a linear layer, and delayed scaling."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.precision.float8 import ROW, TENSOR, Grain, compute_scale
from shoal.spec.config import Float8Config
from shoal.spec.number_formats import E2M1, E4M3, E5M2, MX_BLOCK, NV_BLOCK, Format, Products

HARDWARE_BLOCK = 128  # elements of a row that share a scale in products on hardware
_TILE_ROWS = 128  # rows whose scales MX and NVFP4 keep together
INPUT, WEIGHT, GRADIENT = range(3)
"""Tensors of a linear layer: x, W, and the gradient of its output."""


@dataclass(frozen=True)
class Recipe:
    """Formats and scales of the products in 8 or 4 bits of a linear layer.

    Attributes:
        grains: blocks that share a scale in each tensor, as [rows, contraction dim].
        history: number of steps whose maxima determine the scales; 0 uses the tensor's current values.
        margin: octaves of headroom above the maxima.
    """

    kinds: tuple[Format, Format, Format]
    grains: tuple[Grain, Grain, Grain]
    history: int = 0
    margin: int = 0

    @staticmethod
    def from_config(products: Products, config: Float8Config) -> Recipe:
        """Build the recipe of a precision with products in 8 or 4 bits."""
        if products == "nvfp4":
            row, square = Grain(1, NV_BLOCK, "nv"), Grain(NV_BLOCK, NV_BLOCK, "nv")
            return Recipe((E2M1, E2M1, E2M1), (row, square, row))
        kinds = (E4M3, E4M3, {"e4m3": E4M3, "e5m2": E5M2}[config.gradient])
        if products == "mxfp8":
            return Recipe(kinds, (Grain(1, MX_BLOCK, "mx"),) * 3)
        if config.scales == "block":
            row, square = Grain(1, config.block, "power"), Grain(config.block, config.block, "power")
            return Recipe(kinds, (row, square, row))
        grain = TENSOR if config.scales == "tensor" else ROW
        history = config.history if config.amax == "delayed" else 0
        return Recipe(kinds, (grain,) * 3, history, config.margin)

    @property
    def scales(self) -> str:
        """Name of the scales, as in `hardware_scales`."""
        grain = self.grains[INPUT]
        return {"exact": "row" if grain.rows else "tensor", "power": "block", "mx": "mx", "nv": "nv"}[grain.scale]

    @property
    def rotates(self) -> bool:
        """Whether inputs of weight gradients are rotated, and gradients rounded stochastically; see `nvfp4`."""
        return self.scales == "nv"

    def is_native(self, compute: torch.dtype, device: torch.device) -> bool:
        """Return whether the device multiplies the codes; otherwise they are decoded first."""
        formats = (torch.bfloat16, torch.float32) if self.scales == "tensor" else (torch.bfloat16,)
        cut = self.scales == "block" and self.grains[INPUT].columns != HARDWARE_BLOCK
        return self.scales in hardware_scales(device) and compute in formats and not cut

    @property
    def alignment(self) -> int:
        """Number that the sides of matrices must be multiples of for products on hardware.

        `torch._scaled_mm` needs 16. cuBLAS reads the scales of 4 blocks of a row together, with MX and NVFP4 of 128
        rows, and torch pads none.
        """
        return {"block": 4 * HARDWARE_BLOCK, "mx": 4 * MX_BLOCK, "nv": _TILE_ROWS}.get(self.scales, 16)

    def is_square(self, what: int) -> bool:
        """Return whether the codes of a tensor are also valid for its transpose."""
        return self.grains[what].rows == self.grains[what].columns


def hardware_scales(device: torch.device) -> frozenset[str]:
    """Return the kinds of scales with which the device multiplies matrices in 8 or 4 bits (`torch._scaled_mm`).

    One per tensor or row needs CUDA with compute capability 8.9 (Ada, Hopper). cuBLAS has blocks of 128 on Hopper
    alone, from CUDA 12.9 on, and MX (blocks of 32) and NVFP4 (blocks of 16) on data-centre Blackwell, the latter from
    CUDA 12.8 on. ROCm reports itself as CUDA, and its first devices with 8-bit units use other 8-bit formats.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return frozenset()
    capability = torch.cuda.get_device_capability(device)
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
    found = {"tensor", "row"} if capability >= (8, 9) else set()
    if capability[0] == 9 and cuda >= (12, 9):
        found.add("block")
    if capability[0] == 10:
        found.add("mx")
        if cuda >= (12, 8):
            found.add("nv")
    return frozenset(found)


def name_block(layer: str) -> str:
    """Return the name of the attention or feed-forward block of a layer; its layers share the codes of an input."""
    return layer.rpartition(".")[0]


def find_unfit(shapes: dict[str, torch.Size], recipe: Recipe, *, warn: bool) -> set[str]:
    """Return the blocks with a matrix whose sides products on hardware do not take.

    Args:
        shapes: of the matrices on this rank, by name of the layer.
        warn: whether to warn of the first such layer of each kind of block.
    """
    unfit = {name: shape for name, shape in shapes.items() if any(side % recipe.alignment for side in shape)}
    first = {name_block(name).split(".")[-1]: name for name in reversed(unfit)} if warn else {}
    for kind, name in sorted(first.items()):
        layer, (rows, columns) = name.split(".")[-1], unfit[name]  # no number: stages of a rank warn once together
        warnings.warn(
            f"{kind}.{layer} has {rows} x {columns} weights on a rank, but this device multiplies matrices with scales "
            f"'{recipe.scales}' only if all sides are multiples of {recipe.alignment}: products of {kind} are "
            "computed from decoded values, which is slower than in bf16", stacklevel=3,
        )  # fmt: skip
    return {name_block(name) for name in unfit}


@cache
def warn_of_tokens(tokens: int, recipe: Recipe) -> None:
    """Warn once that products on hardware do not take a micro-batch of this many tokens."""
    warnings.warn(
        f"a micro-batch has {tokens} tokens on a rank, but this device multiplies matrices with scales "
        f"'{recipe.scales}' only if their number is a multiple of {recipe.alignment}: products are of decoded "
        "values, which is slower than in bf16", stacklevel=4,
    )  # fmt: skip


class AmaxHistory:
    """Maxima of the last steps for every linear layer of the model (Micikevicius et al. 2022, section 3; called
    delayed scaling in NVIDIA's Transformer Engine).

    Scales only change between steps and come from the maximum over all ranks, so they do not depend on the layout. The
    first step has no history and takes scales from the tensor itself.
    """

    def __init__(self, recipe: Recipe, layers: list[str], dtype: torch.dtype, device: torch.device):
        self.recipe, self.index = recipe, {name: i for i, name in enumerate(layers)}
        wide = torch.promote_types(dtype, torch.float32)
        self.steps = torch.zeros(len(layers), recipe.history, 3, dtype=wide, device=device)  # newest first
        self.now = torch.zeros(len(layers), 3, dtype=wide, device=device)
        self._scales = torch.zeros_like(self.now)
        self.known = [False] * len(layers)  # whether each has a history yet
        self.changes = 0  # of the scales

    def note(self, layer: str, what: int, most: Tensor) -> None:
        """Record the maximum of one tensor in this step."""
        place = self.now[self.index[layer], what]
        torch.maximum(place, most.max() if most.numel() > 1 else most.view(()), out=place)

    def scale(self, layer: str, what: int) -> Tensor | None:
        """Return the scale, [1, 1]; None in the first step."""
        i = self.index[layer]
        return self._scales[i, what].view(1, 1) if self.known[i] else None

    def end_step(self) -> None:
        """Add a step's maxima over all ranks, from `now`; non-finite ones (skipped step) repeat the previous ones."""
        newest = self.now.where(self.now.isfinite(), self.steps[:, 0])
        self.steps.copy_(torch.cat((newest.unsqueeze(1), self.steps[:, :-1]), dim=1))
        self.now.zero_()
        self._update_scales(all(self.known))  # from then on, without reading the device

    def restored(self) -> None:
        """Compute the scales from a history that was loaded or is empty."""
        self._update_scales(False)

    def _update_scales(self, known: bool) -> None:
        self.changes += 1
        if not known:
            self.known = (self.steps[:, 0] > 0).any(1).tolist()
        most = self.steps.amax(1)
        for what, (kind, grain) in enumerate(zip(self.recipe.kinds, self.recipe.grains, strict=True)):
            self._scales[:, what] = compute_scale(most[:, what], kind, grain) * 2.0**-self.recipe.margin

    def state(self, *, primary: bool) -> dict[str, list[Piece]]:
        """Return the state for a checkpoint: equal on every rank; one rank saves it."""
        return {f"precision.amax.{layer}": [Piece.full(self.steps[i], primary)] for layer, i in self.index.items()}
