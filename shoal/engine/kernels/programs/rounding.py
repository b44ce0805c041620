"""Triton functions of stochastic rounding: the bits of `shoal.engine.kernels.rounding`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def draw_bits(position, key):
    """Return 32 random bits of each position (its low 32 bits, like the key's), uint32: lowbias32."""
    x = position.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def store_rounded(pointers, x, position, key, inside):
    """Store float32 ``x``: rounded stochastically to bfloat16, or as it is to float32."""
    if pointers.dtype.element_ty == tl.bfloat16:
        bits = tl.where(x == x, x.to(tl.uint32, bitcast=True), 0x7FC00000)  # adding bits keeps this NaN one
        rounded = (bits + (draw_bits(position, key) & 0xFFFF)) >> 16
        tl.store(pointers, rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(pointers, x, mask=inside)
