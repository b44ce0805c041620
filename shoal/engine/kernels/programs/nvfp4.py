"""Triton programs of NVFP4 in `shoal.engine.kernels.quantise`: one program per tile of 128 x 128 elements.

The tile is read twice, the second time from a cache: once with blocks of 16 along its rows, and once in 16 parts, of
which part i has row i of each group of 16 rows. In these the groups are rotated, scaled and packed without an exchange
between threads. Sides are multiples of 128, as products need.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from shoal.engine.kernels.programs.quantise import WARPS, invert, magnitude_bits, place_scale
from shoal.engine.kernels.programs.rounding import draw_bits
from shoal.engine.precision.nvfp4 import NEGATIVE

TILE: tl.constexpr = tl.constexpr(128)
GROUPS: tl.constexpr = tl.constexpr(8)  # of 16 rows or columns in a tile
WORDS: tl.constexpr = tl.constexpr(16)  # of 8 codes in a row of a tile
SIGNS: tl.constexpr = tl.constexpr(NEGATIVE)
LARGEST: tl.constexpr = tl.constexpr(6.0)  # number of e2m1
BOTH: tl.constexpr = tl.constexpr(6.0 * 448.0)  # times the largest number of e4m3
LEAST: tl.constexpr = tl.constexpr(2.0**-9)  # number of e4m3
MOST: tl.constexpr = tl.constexpr(2.0**117)  # of a factor, whose quotient by the least scale has a normal inverse
INTEGERS_FROM: tl.constexpr = tl.constexpr(2.0**23)  # numbers of float32 have no fraction from here on


@triton.jit
def load_parts(x, k, ROTATES: tl.constexpr):
    """Return 16 parts [GROUPS, TILE] of a tile of x [m, k], the groups rotated as by `rotate` of x^T."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, GROUPS) * 16
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    x += row[:, None] * k + column[None, :]
    parts = ()  # grows, as all loops are unrolled
    for i in tl.static_range(16):
        part = tl.load(x + i * k).to(tl.float32)
        if ROTATES and (SIGNS >> i) % 2 == 1:
            part = -part
        parts += (part,)  # type: ignore[assignment]
    if ROTATES:
        for bit in tl.static_range(4):
            found = ()
            for i in tl.static_range(16):
                if (i >> bit) % 2 == 0:
                    found += (parts[i] + parts[i + (1 << bit)],)  # type: ignore[assignment]
                else:
                    found += (parts[i - (1 << bit)] - parts[i],)  # type: ignore[assignment]
            parts = found
        found = ()
        for i in tl.static_range(16):
            found += (parts[i] * 0.25,)  # type: ignore[assignment]
        parts = found
    return parts


@triton.jit
def load_tile(x, k):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    return tl.load(x + row[:, None] * k + column[None, :]).to(tl.float32)


@triton.jit
def largest_bits(parts):
    bits = magnitude_bits(parts[0])
    for i in tl.static_range(1, 16):
        bits = tl.maximum(bits, magnitude_bits(parts[i]))
    return bits


@triton.jit
def maxima_program(x, found, k):
    tl.atomic_max(found, tl.max(tl.max(magnitude_bits(load_tile(x, k)), 1), 0))
    tl.atomic_max(found + 1, tl.max(tl.max(largest_bits(load_parts(x, k, True)), 1), 0))


@triton.jit
def load_factor(most):
    """Return the largest magnitude of a tensor and its factor, [1, 1]."""
    total = tl.load(most + tl.zeros((1, 1), tl.int32))
    return total, tl.minimum(invert(total) * BOTH, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def compute_scales(bits, factor):
    """Return the inverse scales of blocks with these largest magnitudes, in e4m3, and their scales."""
    most = bits.to(tl.float32, bitcast=True)
    inner = tl.div_rn(most, tl.full(most.shape, LARGEST, tl.float32)) * factor
    inner = tl.maximum(inner, LEAST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    number = inner.to(tl.float32)
    return inner, tl.div_rn(tl.broadcast_to(factor, number.shape), number)


@triton.jit
def to_codes(values, scale, drawn):
    """Return codes of e2m1, rounded by 16 random bits if there are any."""
    scaled = values * scale
    size = tl.minimum(tl.abs(scaled), LARGEST)
    units = tl.where(size < 2, size * 2, tl.where(size < 4, size, size * 0.5))
    if drawn is not None:
        low = tl.floor(units)
        units = low + tl.where((drawn.to(tl.float32) + 0.5) * 2.0**-16 < units - low, 1.0, 0.0)
    else:
        units = (units + INTEGERS_FROM) - INTEGERS_FROM  # to the nearest, ties to even
    code = units.to(tl.int32) + tl.where(size < 2, 0, tl.where(size < 4, 2, 4))
    return code | (scaled.to(tl.int32, bitcast=True) >> 28 & 8)


@triton.jit
def store_factor(out, total, factor):
    inverse = tl.where(total < float("inf"), invert(factor), float("nan"))
    at = tl.zeros((1, 1), tl.int32)
    tl.store(out + at, inverse, mask=at + tl.program_id(0) + tl.program_id(1) == 0)


@triton.jit
def row_keys(key, start, row):
    position = tl.load(start) + row
    return draw_bits(position, draw_bits(position >> 32, key))


@triton.jit
def store_words(out, words, row, tile, columns):
    """Store the codes of a tile, eight in a word."""
    word = tile.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    tl.store(out + row[:, None] * (columns // 8) + word[None, :], words)


@triton.jit(do_not_specialize=["key"])  # one of each layer
def quantise_program(
    x, most, key, start, features, codes, turned, inverse, turned_inverse, factor, turned_factor, m, k,
    SQUARE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    across = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)  # numbers of the groups of rows
    along = tl.program_id(1).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)  # and of columns

    total, outer = load_factor(most)
    store_factor(factor, total, outer)
    values = load_tile(x, k)
    bits = tl.max(tl.reshape(magnitude_bits(values), (TILE, GROUPS, 16)), 2)
    if SQUARE:
        largest = tl.max(tl.reshape(bits, (GROUPS, 16, GROUPS)), 1)
        bits = tl.reshape(tl.broadcast_to(largest[:, None, :], (GROUPS, 16, GROUPS)), (TILE, GROUPS))
    inner, scale = compute_scales(bits, outer)  # [TILE, GROUPS]
    tl.store(inverse + place_scale(row, along, k // 16), inner.to(tl.uint8, bitcast=True))
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (TILE, GROUPS, 16)), (TILE, TILE))
    drawn = None
    if start is not None:
        feature = tl.load(features + column)
        drawn = draw_bits(feature[None, :], row_keys(key, start, row)[:, None]) & 0xFFFF
    code = to_codes(values, scale, drawn) << (tl.arange(0, TILE) % 8 * 4)[None, :]
    words = tl.sum(tl.reshape(code, (TILE, WORDS, 8)), 2)  # no two have a bit in common
    store_words(codes, words, row, tl.program_id(1), k)

    if not SQUARE:
        total, outer = load_factor(most + 1)
    store_factor(turned_factor, total, outer)
    parts = load_parts(x, k, not SQUARE)
    bits = largest_bits(parts)  # [GROUPS, TILE]
    if SQUARE:
        largest = tl.max(tl.reshape(bits, (GROUPS, GROUPS, 16)), 2)
        bits = tl.reshape(tl.broadcast_to(largest[:, :, None], (GROUPS, GROUPS, 16)), (GROUPS, TILE))
    inner, scale = compute_scales(bits, outer)
    tl.store(turned_inverse + tl.trans(place_scale(column, across, m // 16)), inner.to(tl.uint8, bitcast=True))
    words = ()
    for half in tl.static_range(2):
        packed = tl.zeros((GROUPS, TILE), tl.int32)
        for i in tl.static_range(8):
            if start is not None:
                keys = row_keys(key, start, across * 16 + 8 * half + i)
                drawn = draw_bits(feature[None, :], keys[:, None]) >> 16
            packed += to_codes(parts[8 * half + i], scale, drawn) << 4 * i
        words += (packed,)
    both = tl.permute(tl.join(words[0], words[1]), (1, 0, 2))
    store_words(turned, tl.reshape(both, (TILE, WORDS)), column, tl.program_id(0), m)


def maxima(x: Tensor, found: Tensor) -> None:
    """Launch `maxima_program`: of a matrix [m, k], found [2], int32 zeros."""
    maxima_program[_tiles(x)](x, found, x.shape[1], num_warps=WARPS)


def quantise(
    x: Tensor, most: Tensor, key: int, start: Tensor | None, features: Tensor | None, out: Sequence[Tensor], *,
    square: bool,
) -> None:  # fmt: skip
    """Launch `quantise_program`; ``out`` are its results, codes as int32 and inverse scales as bytes."""
    quantise_program[_tiles(x)](x, most, key, start, features, *out, *x.shape, SQUARE=square, num_warps=WARPS)


def _tiles(x: Tensor) -> tuple[int, int]:
    return x.shape[0] // TILE.value, x.shape[1] // TILE.value
