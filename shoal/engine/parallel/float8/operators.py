"""Operators of products in 8 or 4 bits: for the compiler, and with the operations around them on hardware.

For the compiler, encoding an input and the products of a layer are one operator each: their scales and the kept weights
are state that it does not see. Operators find their `Float8Product` by its key.

On hardware, in 8 bits, the normalised input of a layer, SwiGLU, and the gradient of gate and up exist as codes only:
one pass computes and encodes them. In their place autograd sees a tensor of their shape without values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import custom_op

from shoal.engine.kernels import rms_norm
from shoal.engine.operators import DirectCall
from shoal.engine.parallel.float8.encoding import Encoded, Encoder
from shoal.engine.parallel.weight_grad import find_owner
from shoal.engine.precision.recipe import GRADIENT, INPUT, Recipe

_FORMS: dict[str, tuple[Recipe, bool, int]] = {}
"""Recipe, whether products are native, and the ranks that keep rows of the codes of X^T."""


def register_form(recipe: Recipe, native: bool, parts: int) -> str:
    """Return a text for what shapes an operator's results: compiled code is kept on disk by its arguments."""
    form = repr((recipe, native, parts))
    _FORMS[form] = recipe, native, parts
    return form


def keep_part(encoded: Encoded, parts: int, part: int) -> Encoded:
    """Keep one of ``parts`` equal ranges of the rows of the codes of X^T, as a copy if it is not all of them."""
    if parts == 1:
        return encoded
    codes, scale, turned, turned_scale, amax = encoded
    return codes, scale, turned.chunk(parts)[part].clone(memory_format=torch.contiguous_format), turned_scale, amax


@custom_op("shoal::float8_encode_input", mutates_args=())
def encode_input(x: Tensor, key: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Encode an input [.., in] as the product with this key does."""
    return _separate(find_owner(key).encode_input(x))


@encode_input.register_fake
def _(x: Tensor, key: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    encoded = _stand_in(form).encode_tokens(x.flatten(0, -2), INPUT)
    return _separate(keep_part(encoded, _FORMS[form][2], 0))


def _stand_in(form: str) -> Encoder:
    """Return an encoder for fake tensors."""
    recipe, native, _ = _FORMS[form]
    return Encoder("", recipe, None, "", None, native=native)


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
    x: Tensor, codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, amax: Tensor,
    key: Tensor, rows: int, trains: bool,
) -> Tensor:  # fmt: skip
    """Compute x W^T from the encoded x, as `Float8Product.__call__` does; ``trains`` if the history counts it.

    Args:
        rows: of all weights together.
    """
    product = find_owner(key)
    if trains:
        product.note(INPUT, amax)
    y = product.forward(codes, scale, product.weights, x.dtype)
    return y.resize_(*x.shape[:-1], rows)


@multiply_input.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, amax: Tensor,
    key: Tensor, rows: int, trains: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(*x.shape[:-1], rows)


@custom_op("shoal::float8_backward", mutates_args=())
def multiply_backward(gradient: Tensor, turned: Tensor, turned_scale: Tensor, key: Tensor, width: int) -> Tensor:
    """Accumulate the gradient of W, and return the gradient of x, [.., width]."""
    product = find_owner(key)
    d_x = product.take_gradient(product.encode_gradient(gradient), turned, turned_scale, gradient.dtype)
    return d_x.view(*gradient.shape[:-1], width)


@multiply_backward.register_fake
def _(gradient: Tensor, turned: Tensor, turned_scale: Tensor, key: Tensor, width: int) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], width)


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    x, _, _, turned, turned_scale, _, key, *_ = inputs
    ctx.width = x.shape[-1]
    ctx.save_for_backward(turned, turned_scale, key)


def _differentiate(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    assert ctx.needs_input_grad[0], "without a gradient of x the compiler would drop the gradient of the weight"
    return multiply_backward(gradient.contiguous(), *ctx.saved_tensors, width=ctx.width), *(None,) * 8


multiply_input.register_autograd(_differentiate, setup_context=_save)


# ---- with the operations around products, on hardware ------------------------------------------------------------


def _normalise(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float, key: Tensor, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `Float8Product.normalise`: x + update, the hollow normalised sum, 1/rms, and what `encode_input` returns.
    """
    return _encode_sum(find_owner(key), x, update, weight, eps)


def _encode_sum(encoder: Encoder, x: Tensor, update: Tensor | None, weight: Tensor, eps: float):
    total, inverse, most = rms_norm.rms_statistics(x, update, weight, eps)
    rows = (x if update is None else total).flatten(0, -2)
    encoded = encoder.encode_result("norm", (rows, inverse.flatten(), weight), INPUT, most)
    return total, _make_hollow(x, x.shape), inverse, *_separate(encoded)


normalise = custom_op("shoal::float8_normalise", mutates_args=())(_normalise)


@normalise.register_fake
def _(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, key: Tensor, form: str):
    return _encode_sum(_stand_in(form), x, update, weight, eps)


def _differentiate_sum(ctx, *gradients: Tensor | None):
    return *rms_norm.differentiate(ctx, *gradients), None, None


normalise.register_autograd(_differentiate_sum, setup_context=rms_norm.save)


def call_normalise(*inputs: Any) -> tuple[Tensor, Tensor, Encoded]:
    """Call `normalise`, if nothing compiles without its dispatch; return the sum, the hollow result and its codes."""
    if torch.compiler.is_compiling():
        total, y, _, *encoded = normalise(*inputs)
    else:
        total, y, _, *encoded = DirectCall.apply(_normalise, _differentiate_sum, rms_norm.save, *inputs)
    return total, y, tuple(encoded)


def _activate(
    x: Tensor, codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, amax: Tensor,
    key: Tensor, following: Tensor, form: str, rows: int, trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `Float8Product.activate`: the hollow result, gate and up, and the encoded result.

    Args:
        following, form: of the product that takes the result.
    """
    product = find_owner(key)
    if trains:
        product.note(INPUT, amax)
    gate_up = product.forward(codes, scale, product.weights, x.dtype)
    return _encode_activation(find_owner(following), x, gate_up)


def _encode_activation(encoder: Encoder, x: Tensor, gate_up: Tensor):
    hollow = _make_hollow(x, (*x.shape[:-1], gate_up.shape[1] // 2))
    return hollow, gate_up, *_separate(encoder.encode_result("swiglu", (gate_up,), INPUT))


activate = custom_op("shoal::float8_activate", mutates_args=())(_activate)


@activate.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, amax: Tensor,
    key: Tensor, following: Tensor, form: str, rows: int, trains: bool,
):  # fmt: skip
    return _encode_activation(_stand_in(form), x, x.new_empty(x.shape[:-1].numel(), rows))


def _save_activation(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, _, _, turned, turned_scale, _, key, *_ = inputs
    _, gate_up, *encoded = output
    ctx.width = x.shape[-1]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gate_up, *encoded)
    ctx.save_for_backward(gate_up, turned, turned_scale, key)


def _differentiate_activation(ctx, gradient: Tensor, *_: None):
    # torch 2.11 does not say that it compiles while it traces a backward for the compiler.
    traced = torch.compiler.is_compiling() or isinstance(gradient, FunctionalTensor)
    backward = activate_backward if traced else _activate_backward
    gate_up, turned, turned_scale, key = ctx.saved_tensors
    return backward(gradient.contiguous(), gate_up, turned, turned_scale, key, ctx.width), *(None,) * 10


activate.register_autograd(_differentiate_activation, setup_context=_save_activation)


def call_activate(*inputs: Any) -> tuple[Tensor, Encoded]:
    """Call `activate`, if nothing compiles without its dispatch; return the hollow result and its codes."""
    if torch.compiler.is_compiling():
        y, _, *encoded = activate(*inputs)
    else:
        y, _, *encoded = DirectCall.apply(_activate, _differentiate_activation, _save_activation, *inputs)
    return y, tuple(encoded)


def _activate_backward(
    gradient: Tensor, gate_up: Tensor, turned: Tensor, turned_scale: Tensor, key: Tensor, width: int
) -> Tensor:
    """Accumulate the gradient of W, and return the gradient of x, given that of SwiGLU's result."""
    product = find_owner(key)
    inputs = gradient.flatten(0, -2), gate_up
    codes = product.take_codes(product.encode_result("swiglu_backward", inputs, GRADIENT), native=True)
    d_x = product.take_gradient(codes, turned, turned_scale, gradient.dtype)
    return d_x.view(*gradient.shape[:-1], width)


activate_backward = custom_op("shoal::float8_activate_backward", mutates_args=())(_activate_backward)


@activate_backward.register_fake
def _(gradient: Tensor, gate_up: Tensor, turned: Tensor, turned_scale: Tensor, key: Tensor, width: int) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], width)


def _make_hollow(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of this shape, for autograd, that stores one element; no one may read it."""
    return x.new_empty(1).expand(shape)
