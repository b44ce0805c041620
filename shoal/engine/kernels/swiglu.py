"""SwiGLU activation, silu(gate) * up (Shazeer 2020, "GLU Variants", equation 6).

Gate and up are halves of one buffer, and then so are their gradients, which the product before them needs; or two
tensors, results of two grouped products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example
from shoal.engine.operators import custom_op


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up in plain PyTorch: [.., 2 f] -> [.., f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@custom_op("shoal::swiglu")
def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up in float32 (float64 for float64): [.., 2 f], gate before up -> [.., f]."""
    return swiglu_reference(gate_up)


swiglu.register_kernel("cuda")(launch("swiglu", "forward"))
swiglu.register_fake(lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@custom_op("shoal::swiglu_backward")
def swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of gate and up: [.., f], [.., 2 f] -> [.., 2 f]."""
    return torch.cat(swiglu_pair_backward(gradient, *gate_up.chunk(2, dim=-1)), dim=-1)


swiglu_backward.register_kernel("cuda")(launch("swiglu", "backward"))
swiglu_backward.register_fake(lambda gradient, gate_up: torch.empty_like(gate_up))


def _save(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


swiglu.register_autograd(
    lambda ctx, gradient: swiglu_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_save
)


# ---- gate and up in two tensors ----------------------------------------------------------------------------------


@custom_op("shoal::swiglu_pair")
def swiglu_pair(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `swiglu` of two tensors: [.., f], [.., f] -> [.., f]."""
    return F.silu(gate) * up


swiglu_pair.register_kernel("cuda")(launch("swiglu", "forward_pair"))
swiglu_pair.register_fake(lambda gate, up: gate.new_empty(gate.shape))


@custom_op("shoal::swiglu_pair_backward")
def swiglu_pair_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(gate)
    return gradient * up * s * (1 + gate * (1 - s)), gradient * gate * s


swiglu_pair_backward.register_kernel("cuda")(launch("swiglu", "backward_pair"))
swiglu_pair_backward.register_fake(lambda gradient, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))


swiglu_pair.register_autograd(
    lambda ctx, gradient: swiglu_pair_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_save
)


def examples() -> Iterator[Example]:
    """Yield calls with a row of an odd length, and with one of several blocks."""
    for f in (7, 1300):
        yield Example(f"swiglu, f = {f}", swiglu, swiglu_reference, (torch.randn(3, 2, 2 * f),))
        pair = torch.randn(2, 6, f)
        yield Example(f"swiglu of two tensors, f = {f}", swiglu_pair, lambda a, b: F.silu(a) * b, (pair[0], pair[1]))
