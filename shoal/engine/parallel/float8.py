"""Linear layers whose three matrix products use 8-bit operands.

    y = x W^T      x and W with rows along the input features
    dX = dY W      dY and W^T along the output features
    dW = dY^T X    dY^T and X^T along the tokens

Accumulation and all other operations use the compute dtype. Where a scaling block spans features split by tensor
parallelism, its absolute maximum is reduced over the axis, so scales equal the single-device ones. Blocks inside a
rank's part need no communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.device import has_float8_products
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.linear import Linear
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.weight_grad import GradSink, add_gradient
from shoal.engine.precision.float8 import ROW, TENSOR, Codes, Grain, compute_scale, encode, largest
from shoal.engine.precision.policy import Policy
from shoal.engine.precision.recipe import GRADIENT, INPUT, WEIGHT, AmaxHistory, Recipe
from shoal.spec.catalog import ModelShape
from shoal.spec.compatibility.sizes import float8_layers
from shoal.spec.config import Float8Config
from shoal.spec.number_formats import E5M2

TOKENS, IN, OUT = "tokens", "in", "out"
DIMS = {INPUT: (TOKENS, IN), WEIGHT: (OUT, IN), GRADIENT: (TOKENS, OUT)}
_ALIGN = 16  # elements: `torch._scaled_mm` requires matrix sides that are a multiple of it


@dataclass(frozen=True)
class Float8:
    """8-bit settings of a model.

    Attributes:
        layers: names of the linear layers that use 8-bit products.
        recipe: the scaling recipe.
        history: history of absolute maxima, for delayed scaling.
    """

    layers: tuple[str, ...]
    recipe: Recipe
    history: AmaxHistory | None

    @staticmethod
    def from_policy(policy: Policy, config: Float8Config, shape: ModelShape, device: torch.device) -> Float8 | None:
        """Return the 8-bit settings of a run; None if its products use the compute dtype."""
        products = policy.formats.products
        if products == "compute":
            return None
        recipe, layers = Recipe.from_config(products, config), float8_layers(shape, config.keep)
        history = AmaxHistory(recipe, layers, policy.compute, device) if recipe.history else None
        return Float8(tuple(layers), recipe, history)

    def native(self, compute: torch.dtype, device: torch.device) -> bool:
        """Return whether the device multiplies the 8-bit codes directly, without decoding them first."""
        return has_float8_products(device) and all(_is_native(grain, compute) for grain in self.recipe.grains)

    def end_step(self, world: Group | None) -> None:
        """Finish a step: reduce the recorded absolute maxima over all ranks."""
        if self.history:
            all_reduce(self.history.now, world, dist.ReduceOp.MAX)
            self.history.end_step()


def apply_float8(
    model: Transformer, float8: Float8, placements: dict[str, ParamPlacement], mesh: Mesh, sink: GradSink
) -> None:
    """Replace linear layers, in place, by ones with 8-bit products; ``placements`` are by name of the weight."""
    cache = _InputCache()
    for name, module in model.named_modules():
        if name in float8.layers:
            assert isinstance(module, Linear)
            split = placements[f"{name}.weight"]
            along = next((dim for i, dim in enumerate((OUT, IN)) if split.box.shape[i] != split.global_shape[i]), "")
            module.product = Float8Product(
                name, float8.recipe, float8.history, cache, along, mesh.group("tp"), sink,
                native=has_float8_products(mesh.device),
            )


class _InputCache:
    """The last input of a model's layers and its encoding: q, k and v have the same input, as have gate and up."""

    tensor: Callable[[], Tensor | None] = staticmethod(lambda: None)  # weak reference to the input
    encoding: tuple[tuple[Codes, Codes], Tensor]


class Float8Product:
    """8-bit products of one linear layer.

    Args:
        split: the dimension of its weight that tensor parallelism splits over ``group``: "in", "out" or "".
        native: whether the device multiplies 8-bit codes; otherwise they are decoded first.
    """

    def __init__(
        self, name: str, recipe: Recipe, history: AmaxHistory | None, cache: _InputCache, split: str,
        group: Group | None, sink: GradSink, *, native: bool,
    ):
        self.name, self.recipe, self.history, self.cache = name, recipe, history, cache
        self.split, self.group = split, group
        self.sink, self.native = sink, native

    def __call__(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Compute x W^T + bias: [.., in] -> [.., out]."""
        along, turned = self._encode_input(x)
        y = _Float8Linear.apply(self, x, weight, along.codes, along.scale, turned.codes, turned.scale)
        return y if bias is None else y + bias

    def _encode_input(self, x: Tensor) -> tuple[Codes, Codes]:
        if self.cache.tensor() is not x:
            # Detached: encoding needs no autograd, because the product computes the gradient of x.
            self.cache.encoding = self.encode(x.detach().flatten(0, -2), INPUT)
            self.cache.tensor = weakref.ref(x)
        codes, amax = self.cache.encoding
        if torch.is_grad_enabled():
            self.note(INPUT, amax)
        return codes

    def encode(self, x: Tensor, what: int) -> tuple[tuple[Codes, Codes], Tensor]:
        """Return the codes of a matrix and of its transpose, and the absolute maxima of its blocks."""
        codes, amax = self._encode(x, what, DIMS[what])
        turned = codes.t() if self.recipe.is_square(what) else self._encode(x.t(), what, DIMS[what][::-1])[0]
        return (codes, turned), amax

    def _encode(self, x: Tensor, what: int, dims: tuple[str, str]) -> tuple[Codes, Tensor]:
        kind, grain = self.recipe.kinds[what], self.recipe.grains[what]
        own = amax = largest(x, grain)
        scale = self.history.scale(self.name, what) if self.history else None
        if scale is None:
            spanned = [dim for dim, size in zip(dims, (grain.rows, grain.columns), strict=True) if size == 0]
            if self.split in spanned:
                amax = all_reduce(amax.clone(), self.group, dist.ReduceOp.MAX)
            scale = compute_scale(amax, kind, grain)
        else:  # codes are finite for any x, but non-finite values must stay detectable
            scale = torch.where(own.isfinite().all(), scale, torch.nan)
        return encode(x, scale, kind, grain), own

    def note(self, what: int, amax: Tensor) -> None:
        """Record absolute maxima in the history, if the recipe has one."""
        if self.history:
            self.history.note(self.name, what, amax)

    def encode_weight(self, weight: Tensor, *, turned: bool) -> Codes:
        """Encode W along the input features, or W^T along the output features."""
        across = turned and not self.recipe.is_square(WEIGHT)
        dims = DIMS[WEIGHT]
        codes, amax = self._encode(weight.t() if across else weight, WEIGHT, dims[::-1] if across else dims)
        self.note(WEIGHT, amax)
        return codes.t() if turned and not across else codes


def multiply(a: Codes, b: Codes, dtype: torch.dtype, *, native: bool) -> Tensor:
    """Compute a b^T: [m, k], [n, k] -> [m, n].

    Args:
        native: use `torch._scaled_mm` if it supports the codes: one scale per tensor or row, not e5m2 on both sides,
            and sides that are multiples of 16.
    """
    both_e5m2 = a.codes.dtype == b.codes.dtype == getattr(torch, E5M2.name)
    supported = a.grain == b.grain and _is_native(a.grain, dtype)
    fits = all(side % _ALIGN == 0 for side in (*a.codes.shape, *b.codes.shape))
    if not (native and supported and fits and not both_e5m2):
        return F.linear(a.values(dtype), b.values(dtype))
    scale_a, scale_b = a.scale.reciprocal(), b.scale.reciprocal().t()
    if a.grain == TENSOR:
        scale_a, scale_b = scale_a.view(()), scale_b.view(())
    return torch._scaled_mm(
        a.codes.contiguous(), b.codes.contiguous().t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype
    )


def _is_native(grain: Grain, dtype: torch.dtype) -> bool:
    """Return whether `torch._scaled_mm` supports the scales and the result dtype."""
    return (grain == TENSOR and dtype != torch.float64) or (grain == ROW and dtype == torch.bfloat16)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, layer: Float8Product, x: Tensor, weight: nn.Parameter,
        codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.weight, ctx.shape, ctx.dtype = layer, weight, x.shape, x.dtype
        ctx.save_for_backward(weight, turned, turned_scale)
        grain = layer.recipe.grains[INPUT]
        x_codes, w_codes = Codes(codes, scale, grain), layer.encode_weight(weight, turned=False)
        y = multiply(x_codes, w_codes, x.dtype, native=layer.native)
        return y.resize_(*x.shape[:-1], y.shape[-1])  # not a view: tensor-parallel ranks sum it in place

    @staticmethod
    def backward(ctx, gradient: Tensor):
        layer, (weight, turned, turned_scale) = ctx.layer, ctx.saved_tensors
        (along, across), amax = layer.encode(gradient.flatten(0, -2), GRADIENT)  # dY by output feature, dY^T by token
        layer.note(GRADIENT, amax)
        d_x = None
        if ctx.needs_input_grad[1]:
            w_codes = layer.encode_weight(weight, turned=True)
            d_x = multiply(along, w_codes, ctx.dtype, native=layer.native).view(ctx.shape)
        if ctx.needs_input_grad[2]:  # else frozen
            x = Codes(turned, turned_scale, layer.recipe.grains[INPUT])
            term = partial(_add_multiplied, layer, across, x, ctx.dtype)
            (layer.sink.add if d_x is None else layer.sink.defer_or_add)([ctx.weight], term)
        return None, d_x, None, None, None, None, None


def _add_multiplied(
    layer: Float8Product, a: Codes, b: Codes, dtype: torch.dtype, total: Tensor, fresh: bool
) -> None:
    add_gradient(multiply(a, b, dtype, native=layer.native), total, fresh)
