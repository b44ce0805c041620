"""SwiGLU activation, silu(gate) * up, with gate and up in one buffer (Shazeer 2020, "GLU Variants", equation 6).

Backward writes the gradients of gate and up into one buffer, the layout that the product before them needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels.example import Example


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up in plain PyTorch: [.., 2 f] -> [.., f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@custom_op("shoal::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up in float32: [.., 2 f], gate before up -> [.., f]."""
    return swiglu_reference(gate_up)


@swiglu.register_kernel("cuda")
def _(gate_up: Tensor) -> Tensor:
    from shoal.engine.kernels.programs import swiglu as programs

    return programs.forward(gate_up)


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@custom_op("shoal::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of gate and up: [.., f], [.., 2 f] -> [.., 2 f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    return torch.cat((gradient * up * s * (1 + gate * (1 - s)), gradient * gate * s), dim=-1)


@swiglu_backward.register_kernel("cuda")
def _(gradient: Tensor, gate_up: Tensor) -> Tensor:
    from shoal.engine.kernels.programs import swiglu as programs

    return programs.backward(gradient, gate_up)


@swiglu_backward.register_fake
def _(gradient: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def _save(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, gradient: Tensor) -> Tensor:
    return swiglu_backward(gradient.contiguous(), *ctx.saved_tensors)


swiglu.register_autograd(_differentiate, setup_context=_save)


def examples() -> Iterator[Example]:
    """Yield calls with a row of an odd length, and with one of several blocks."""
    for f in (7, 1300):
        yield Example(f"swiglu, f = {f}", swiglu, swiglu_reference, (torch.randn(3, 2, 2 * f),))
