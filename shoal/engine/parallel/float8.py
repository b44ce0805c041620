"""Linear layers whose three matrix products use 8-bit operands.

    y = x W^T      x and W with rows along the input features
    dX = dY W      dY and W^T along the output features
    dW = dY^T X    dY^T and X^T along the tokens

Accumulation and all other operations use the compute dtype. Where a scaling block spans features split by tensor
parallelism, its absolute maximum is reduced over the axis, so scales equal the single-device ones. Blocks inside a
rank's part need no communication.

Weights are encoded at their first use after a change, and kept for all micro-batches of the step (not in ZeRO-3, where
the weights themselves are not kept). Inputs are encoded once for all layers that share them.

Codes are decoded before the product, in the compute dtype, except where the hardware multiplies them: then
`shoal.engine.kernels.quantise` encodes a matrix and its transpose together, and the product is `torch._scaled_mm`. The
public `torch.nn.functional.scaled_mm` has no e5m2 with scales of blocks.

For the compiler, encoding an input and the products of a layer are one operator each: their scales and the kept weights
are state that it does not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.kernels.quantise import maxima, quantise, quantise_blocks
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.linear import Linear
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.weight_grad import GradSink, add_gradient, find_owner, make_key
from shoal.engine.parallel.zero.bucket import Bucket
from shoal.engine.parallel.zero.gradients import Term
from shoal.engine.parallel.zero.zero_engine import ShardedParameters
from shoal.engine.precision.float8 import ROW, TENSOR, Codes, compute_scale, encode, largest
from shoal.engine.precision.policy import Policy
from shoal.engine.precision.recipe import (
    GRADIENT,
    INPUT,
    WEIGHT,
    AmaxHistory,
    Recipe,
    find_unfit,
    name_block,
    warn_of_tokens,
)
from shoal.spec.catalog import ModelShape
from shoal.spec.compatibility.sizes import float8_layers
from shoal.spec.config import Float8Config

TOKENS, IN, OUT = "tokens", "in", "out"
DIMS = {INPUT: (TOKENS, IN), WEIGHT: (OUT, IN), GRADIENT: (TOKENS, OUT)}
_ALIGN = 16  # bytes: of results that `torch._scaled_mm` writes in place

Encoded = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Codes and scales of a matrix, of its transpose, and its absolute maxima (of blocks or in total)."""


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
        return self.recipe.is_native(compute, device)

    def end_step(self, world: Group | None) -> None:
        """Finish a step: reduce the recorded absolute maxima over all ranks."""
        if self.history:
            all_reduce(self.history.now, world, dist.ReduceOp.MAX)
            self.history.end_step()


def apply_float8(
    model: Transformer, float8: Float8, placements: dict[str, ParamPlacement], parameters: ShardedParameters,
    sink: GradSink,
) -> None:  # fmt: skip
    """Replace products of linear layers, in place, by 8-bit ones; ``placements`` are by name of the weight."""
    mesh, recipe = parameters.mesh, float8.recipe
    layers = {name: module for name, module in model.named_modules() if name in float8.layers}
    unfit = {name_block(name) for name in layers}
    if recipe.is_native(parameters.buckets[0].policy.compute, mesh.device):
        unfit = find_unfit({name: layer.weight.shape for name, layer in layers.items()}, recipe, warn=mesh.rank == 0)
    for name, layer in layers.items():
        assert isinstance(layer, Linear)
        split = placements[f"{name}.weight"]
        along = next((dim for i, dim in enumerate((OUT, IN)) if split.box.shape[i] != split.global_shape[i]), "")
        if layer.at is None and mesh.layout.sequence_parallel:
            along = TOKENS  # outside of the tensor-parallel regions
        bucket = parameters.buckets[parameters.places[layer.weight][0]]
        native = name_block(name) not in unfit
        product = Float8Product(name, recipe, float8.history, bucket, along, mesh.group("tp"), sink, native=native)
        product.warns, product.waits = mesh.rank == 0, layer.at is not None
        product.weight, product.key, product.form = layer.weight, make_key(product, mesh.device), _register(product)
        layer.product = product


class Float8Product:
    """8-bit products of one linear layer.

    Args:
        bucket: the bucket of its weight; None to encode inputs alone.
        split: the dimension that tensor parallelism splits over ``group``: "in", "out" (of its weight), "tokens" or "".
        native: whether the device multiplies 8-bit codes, for a suitable number of tokens; else they are decoded first.

    Attributes:
        weight: its weight.
        key: by which operators find it.
        form: index in `_FORMS` of its recipe.
        warns: whether this rank warns of numbers of tokens that products on hardware do not take.
        waits: whether weight gradients may wait for the next `GradSink.flush`.
    """

    warns = waits = False
    weight: nn.Parameter
    key: Tensor
    form: int

    def __init__(
        self, name: str, recipe: Recipe, history: AmaxHistory | None, bucket: Bucket | None, split: str,
        group: Group | None, sink: GradSink, *, native: bool,
    ):  # fmt: skip
        self.name, self.recipe, self.history, self.bucket = name, recipe, history, bucket
        self.split, self.group, self.sink, self.native = split, group, sink, native

    def __call__(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, encoded: Encoded) -> Tensor:
        """Compute x W^T + bias: [.., in] -> [.., out]; ``encoded`` is x from `encode_input`."""
        if torch.compiler.is_compiling():
            y = multiply_input(x, weight, *encoded, self.key, torch.is_grad_enabled())
        else:
            if torch.is_grad_enabled():
                self.note(INPUT, encoded[-1])
            y = _Float8Linear.apply(self, x, weight, *encoded[:-1])
        return y if bias is None else y + bias

    def encode_input(self, x: Tensor) -> Encoded:
        """Encode an input [.., in], also for other layers that share it."""
        # Detached: encoding needs no autograd, because the product computes the gradient of x.
        if torch.compiler.is_compiling():
            return encode_input(x.detach(), self.key, self.form)
        return self.encode_tokens(x.detach().flatten(0, -2), INPUT)

    def on_hardware(self, tokens: int) -> bool:
        """Return whether the device multiplies the codes of a micro-batch with this many tokens."""
        fits = tokens % self.recipe.alignment == 0
        if self.native and not fits and self.warns:
            warn_of_tokens(tokens, self.recipe)
        return self.native and fits

    # ---- products ----------------------------------------------------------------------------------------------

    def forward(self, codes: Tensor, scale: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x W^T, [tokens, out]."""
        native = self.on_hardware(len(codes))
        x = Codes(codes, scale, self.recipe.grains[INPUT], native)
        return multiply(x, self.encode_weight(weight, turned=False, native=native), dtype, fast=True)

    def backward_input(self, gradient: Codes, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dY W, [tokens, in]."""
        return multiply(gradient, self.encode_weight(weight, turned=True, native=gradient.for_hardware), dtype)

    def encode_gradient(self, gradient: Tensor) -> tuple[Codes, Codes]:
        """Return the codes of dY by output feature and of dY^T by token."""
        gradient = gradient.flatten(0, -2)
        grain, native = self.recipe.grains[GRADIENT], self.on_hardware(len(gradient))
        codes, scale, turned, turned_scale, amax = self.encode_tokens(gradient, GRADIENT)
        self.note(GRADIENT, amax)
        return Codes(codes, scale, grain, native), Codes(turned, turned_scale, grain, native)

    def gradient_term(self, gradient: Codes, turned: Tensor, scale: Tensor, dtype: torch.dtype) -> Term:
        """Return the term dY^T X of the weight's gradient, given dY^T by token and the saved codes of X^T by token."""
        x = Codes(turned, scale, self.recipe.grains[INPUT], self.on_hardware(turned.shape[1]))
        return partial(_add_multiplied, gradient, x, dtype)

    # ---- encoding ----------------------------------------------------------------------------------------------

    def encode_tokens(self, x: Tensor, what: int) -> Encoded:
        """Encode a matrix whose rows are tokens, and its transpose."""
        return self.encode(x, what, native=self.on_hardware(len(x)))

    def encode(self, x: Tensor, what: int, *, native: bool) -> Encoded:
        """Encode a matrix and its transpose; if ``native``, as operands of products on hardware."""
        if native:
            return self._encode_for_hardware(x, what)
        codes, amax = self._encode(x, what, DIMS[what])
        turned = codes.t() if self.recipe.is_square(what) else self._encode(x.t(), what, DIMS[what][::-1])[0]
        return codes.codes, codes.scale, turned.codes, turned.scale, amax

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

    def _encode_for_hardware(self, x: Tensor, what: int) -> Encoded:
        kind, grain = self.recipe.kinds[what].name, self.recipe.grains[what]
        if grain.columns:
            codes, turned, inverse, turned_inverse = quantise_blocks(x, kind, *grain)
            return codes, inverse, turned, turned_inverse, inverse  # blocks have no history
        by_row = grain == ROW
        scale = self.history.scale(self.name, what) if self.history else None
        if scale is not None:
            codes, turned, inverse, _, amax = quantise(x, scale.view(1), kind, by_row, True)
            inverse = torch.add(inverse, amax, alpha=0)  # NaN if x is not finite, as in `_encode`
            return codes, inverse, turned, inverse, amax
        amax = maxima(x, by_row)
        if self.split in DIMS[what]:  # reduce the maxima over the split dimension
            rows, _ = DIMS[what]
            spanning = amax if not by_row else amax[len(x) :] if self.split == rows else amax[: len(x)]
            all_reduce(spanning, self.group, dist.ReduceOp.MAX)
        codes, turned, inverse, turned_inverse, _ = quantise(x, amax, kind, by_row, False)
        return codes, inverse, turned, turned_inverse, amax

    def encode_weight(self, weight: Tensor, *, turned: bool, native: bool) -> Codes:
        """Return the codes of W along the input features, or of W^T along the output features."""
        weight, grain, dims = weight.detach(), self.recipe.grains[WEIGHT], DIMS[WEIGHT]
        together = native or self.recipe.is_square(WEIGHT)

        def compute() -> tuple[Codes, Codes]:
            if together:
                codes, scale, across, across_scale, amax = self.encode(weight, WEIGHT, native=native)
                both = Codes(codes, scale, grain, native), Codes(across, across_scale, grain, native)
            else:
                one, amax = self._encode(weight.t() if turned else weight, WEIGHT, dims[::-1] if turned else dims)
                both = one, one
            self.note(WEIGHT, amax)
            return both

        assert self.bucket is not None
        key = self.name, native, turned and not together, self.history.changes if self.history else 0
        return self.bucket.derive(key, compute)[turned]

    def note(self, what: int, amax: Tensor) -> None:
        """Record absolute maxima in the history, if the recipe has one."""
        if self.history:
            self.history.note(self.name, what, amax)


def multiply(a: Codes, b: Codes, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Compute a b^T: [m, k], [n, k] -> [m, n].

    Args:
        fast: let hardware accumulate with fewer bits (14 on Hopper; DeepSeek-AI 2024, section 3.3.2), if it is faster.
    """
    if not a.for_hardware:
        return F.linear(a.values(dtype), b.values(dtype))
    scale_a, scale_b = _operand_scales(a, b)
    return torch._scaled_mm(
        a.codes, b.codes.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype,
        use_fast_accum=fast and a.grain in (TENSOR, ROW),
    )  # fmt: skip


def _operand_scales(a: Codes, b: Codes) -> tuple[Tensor, Tensor]:
    if a.grain == TENSOR:
        return a.scale.view(()), b.scale.view(())
    return a.scale, b.scale if a.grain.scale == "mx" else b.scale.t()


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, layer: Float8Product, x: Tensor, weight: nn.Parameter,
        codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.layer, ctx.weight, ctx.shape, ctx.dtype = layer, weight, x.shape, x.dtype
        ctx.save_for_backward(weight, turned, turned_scale)
        y = layer.forward(codes, scale, weight, x.dtype)
        return y.resize_(*x.shape[:-1], y.shape[-1])  # not a view: tensor-parallel ranks sum it in place

    @staticmethod
    def backward(ctx, gradient: Tensor):
        layer, (weight, turned, turned_scale) = ctx.layer, ctx.saved_tensors
        along, across = layer.encode_gradient(gradient)
        d_x = None
        if ctx.needs_input_grad[1]:
            d_x = layer.backward_input(along, weight, ctx.dtype).view(ctx.shape)
        if ctx.needs_input_grad[2]:  # else frozen
            term = layer.gradient_term(across, turned, turned_scale, ctx.dtype)
            (layer.sink.defer_or_add if d_x is not None and layer.waits else layer.sink.add)([ctx.weight], term)
        return None, d_x, None, None, None, None, None


def _add_multiplied(a: Codes, b: Codes, dtype: torch.dtype, total: Tensor, fresh: bool) -> None:
    aligned = total.storage_offset() * total.itemsize % _ALIGN == 0
    # With scales of rows, older devices have no results in float32.
    if fresh and aligned and a.for_hardware and a.grain != ROW:
        multiply_into(a.codes, b.codes, *_operand_scales(a, b), total)
        return
    # Rounded to bf16 as decoded products are: at most 2^-9 of an element, a small part of the error of 8-bit codes. The
    # sum stays in float32. A product in float32 would move 4 bytes more an element and take twice the memory.
    add_gradient(multiply(a, b, dtype), total, fresh)


@custom_op("shoal::float8_multiply_into", mutates_args=("total",))
def multiply_into(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, total: Tensor) -> None:
    """Compute a b^T into ``total``, as `multiply` does on hardware."""
    torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=total.dtype, out=total)


@multiply_into.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, total: Tensor) -> None:
    return None


# ---- operators for the compiler ----------------------------------------------------------------------------------

_FORMS: list[tuple[Recipe, bool]] = []


def _register(product: Float8Product) -> int:
    form = product.recipe, product.native
    if form not in _FORMS:
        _FORMS.append(form)
    return _FORMS.index(form)


@custom_op("shoal::float8_encode_input", mutates_args=())
def encode_input(x: Tensor, key: Tensor, form: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Encode an input [.., in] as the product with this key does."""
    return _separate(find_owner(key).encode_tokens(x.flatten(0, -2), INPUT))


@encode_input.register_fake
def _(x: Tensor, key: Tensor, form: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    recipe, native = _FORMS[form]
    product = Float8Product("", recipe, None, None, "", None, GradSink(), native=native)
    return _separate(product.encode_tokens(x.flatten(0, -2), INPUT))


def _separate(encoded: Encoded) -> Encoded:
    """Return tensors that share no memory: the compiler allows no results that do."""
    storages: set[int] = set()
    found = []
    for each in encoded:
        storage = each.untyped_storage()._cdata
        found.append(each.clone() if storage in storages else each)
        storages.add(storage)
    return tuple(found)  # type: ignore[return-value]


@custom_op("shoal::float8_multiply", mutates_args=())
def multiply_input(
    x: Tensor, weight: Tensor, codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, amax: Tensor,
    key: Tensor, trains: bool,
) -> Tensor:  # fmt: skip
    """Compute x W^T from the encoded x, as `Float8Product.__call__` does; ``trains`` if the history counts it."""
    layer = find_owner(key)
    if trains:
        layer.note(INPUT, amax)
    y = layer.forward(codes, scale, weight, x.dtype)
    return y.resize_(*x.shape[:-1], y.shape[-1])


@multiply_input.register_fake
def _(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@custom_op("shoal::float8_backward", mutates_args=())
def multiply_backward(gradient: Tensor, weight: Tensor, turned: Tensor, turned_scale: Tensor, key: Tensor) -> Tensor:
    """Accumulate the gradient of W, and return the gradient of x."""
    layer = find_owner(key)
    along, across = layer.encode_gradient(gradient)
    d_x = layer.backward_input(along, weight, gradient.dtype).view(*gradient.shape[:-1], weight.shape[1])
    layer.sink.add([layer.weight], layer.gradient_term(across, turned, turned_scale, gradient.dtype))
    return d_x


@multiply_backward.register_fake
def _(gradient: Tensor, weight: Tensor, turned: Tensor, turned_scale: Tensor, key: Tensor) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], weight.shape[1])


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    _, weight, _, _, turned, turned_scale, _, key, _ = inputs
    ctx.save_for_backward(weight, turned, turned_scale, key)


def _differentiate(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    assert ctx.needs_input_grad[0], "without a gradient of x the compiler would drop the gradient of the weight"
    return multiply_backward(gradient.contiguous(), *ctx.saved_tensors), *(None,) * 8


multiply_input.register_autograd(_differentiate, setup_context=_save)
