"""Triton programs of `shoal.engine.kernels.swiglu`: one program per row and block of columns."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def forward_program(gate_up, out, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    gate = tl.load(gate_up + row * 2 * f + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * f + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_program(gradient, gate_up, out, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    d_y = tl.load(gradient + row * f + column, mask=inside, other=0).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * f + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + column, mask=inside, other=0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate, d_up = d_y * up * s * (1 + gate * (1 - s)), d_y * gate * s
    tl.store(out + row * 2 * f + column, d_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * f + f + column, d_up.to(out.dtype.element_ty), mask=inside)


def forward(gate_up: Tensor) -> Tensor:
    """Launch `forward_program`: [.., 2 f] -> [.., f]."""
    gate_up = gate_up.contiguous()
    f = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], f)
    forward_program[(out.numel() // f, triton.cdiv(f, BLOCK))](gate_up, out, f, BLOCK=BLOCK)
    return out


def backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Launch `backward_program`: [.., f], [.., 2 f] -> [.., 2 f]."""
    gate_up = gate_up.contiguous()
    f, out = gate_up.shape[-1] // 2, gate_up.new_empty(gate_up.shape)
    backward_program[(gradient.numel() // f, triton.cdiv(f, BLOCK))](gradient, gate_up, out, f, BLOCK=BLOCK)
    return out
