"""Triton programs of `shoal.engine.kernels.swiglu`: one program per row and block of columns.

Gate and up are two pointers with one distance between rows: halves of one buffer, or two tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def activate(gate, up):
    s = 1 / (1 + tl.exp(-gate))  # `tl.sigmoid` has no float64
    return gate * s * up


@triton.jit
def differentiate(gradient, gate, up):
    s = 1 / (1 + tl.exp(-gate))
    return gradient * up * s * (1 + gate * (1 - s)), gradient * gate * s


@triton.jit
def forward_program(gate, up, out, stride, f, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    a = tl.load(gate + row * stride + column, mask=inside, other=0).to(EXACT)
    b = tl.load(up + row * stride + column, mask=inside, other=0).to(EXACT)
    tl.store(out + row * f + column, activate(a, b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_program(gradient, gate, up, d_gate, d_up, stride, f, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    d_y = tl.load(gradient + row * f + column, mask=inside, other=0).to(EXACT)
    a = tl.load(gate + row * stride + column, mask=inside, other=0).to(EXACT)
    b = tl.load(up + row * stride + column, mask=inside, other=0).to(EXACT)
    d_a, d_b = differentiate(d_y, a, b)
    tl.store(d_gate + row * stride + column, d_a.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + row * stride + column, d_b.to(d_up.dtype.element_ty), mask=inside)


def forward(gate_up: Tensor) -> Tensor:
    """Launch `forward_program` on the halves of one buffer: [.., 2 f] -> [.., f]."""
    return _forward(*gate_up.contiguous().chunk(2, -1))


def forward_pair(gate: Tensor, up: Tensor) -> Tensor:
    """Launch `forward_program` on two tensors: [.., f] each -> [.., f]."""
    return _forward(gate.contiguous(), up.contiguous())


def backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Launch `backward_program` on the halves of one buffer: [.., f], [.., 2 f] -> [.., 2 f]."""
    gate_up = gate_up.contiguous()
    out = torch.empty_like(gate_up)
    _backward(gradient, *gate_up.chunk(2, -1), *out.chunk(2, -1))
    return out


def backward_pair(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Launch `backward_program` on two tensors: [.., f] each -> [.., f] each."""
    gate, up = gate.contiguous(), up.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    _backward(gradient, gate, up, d_gate, d_up)
    return d_gate, d_up


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    out, rows = gate.new_empty(gate.shape), gate.flatten(0, -2)
    m, f = rows.shape
    if m:
        forward_program[(m, triton.cdiv(f, BLOCK))](gate, up, out, rows.stride(0), f, EXACT=_exact(gate), BLOCK=BLOCK)
    return out


def _backward(gradient: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    """Write the gradients, which have the distance between rows of gate and up."""
    assert gradient.is_contiguous()
    rows = gate.flatten(0, -2)
    m, f = rows.shape
    if m:
        backward_program[(m, triton.cdiv(f, BLOCK))](
            gradient, gate, up, d_gate, d_up, rows.stride(0), f, EXACT=_exact(gate), BLOCK=BLOCK
        )


def _exact(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
