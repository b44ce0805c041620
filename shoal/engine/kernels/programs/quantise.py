"""Triton programs of `shoal.engine.kernels.quantise`: one program per tile of 128 x 128 elements.

The matrix is read, or computed from what its operation reads, and then never written: a normalised sum, SwiGLU, or the
gradient of gate and up (`SOURCES` of the operators). Values are rounded to the format of what is read, as by the
separate operators.

Maxima are compared as the integers of their bits, which have the order of the non-negative numbers with NaN above
infinity. So a NaN is never lost, and the order of the atomic operations does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from shoal.engine.kernels.programs.swiglu import activate, differentiate

WARPS = 8  # 64 elements per thread
MOST: tl.constexpr = tl.constexpr(2.0**126)  # a scale's maximum: its inverse is a normal number
BIAS: tl.constexpr = tl.constexpr(127)  # of the exponents of float32 and E8M0


@triton.jit
def load(x, place, inside):
    return tl.load(x + place, mask=inside, other=0).to(tl.float32)


@triton.jit
def load_tile(x, a, b, m, k, SOURCE: tl.constexpr, TILE: tl.constexpr):
    """Return a tile of the matrix, its rows and columns, which elements are inside, and the tile's number in a row."""
    number = tl.program_id(1)
    if SOURCE == "swiglu_backward":  # after a tile of gate's gradient comes up's, which reads the same values
        half = tl.num_programs(1) // 2
        number = tl.where(k % (2 * TILE) == 0, number % 2 * half + number // 2, number)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = number.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < m)[:, None] & (column < k)[None, :]
    if SOURCE == "swiglu":  # x: gate and up [m, 2 k]
        place = row[:, None] * 2 * k + column[None, :]
        values = activate(load(x, place, inside), load(x, place + k, inside))
    elif SOURCE == "swiglu_backward":  # x: gradient [m, k / 2], a: gate and up [m, k]
        f = k // 2
        of_up = column >= f
        along = tl.where(of_up, column - f, column)
        gradient = load(x, row[:, None] * f + along[None, :], inside)
        place = row[:, None] * k + along[None, :]
        d_gate, d_up = differentiate(gradient, load(a, place, inside), load(a, place + f, inside))
        values = tl.where(of_up[None, :], d_up, d_gate)
    else:
        values = load(x, row[:, None] * k + column[None, :], inside)
        if SOURCE == "norm":  # x: the sum [m, k], a: 1/rms [m], b: weight [k]
            values = values * load(a, row, row < m)[:, None] * load(b, column, column < k)[None, :]
    return values.to(x.dtype.element_ty).to(tl.float32), row, column, inside, number


@triton.jit
def magnitude_bits(values):
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def invert(x):
    return tl.div_rn(tl.full(x.shape, 1, tl.float32), x)


@triton.jit
def exact_scale(most, LARGEST: tl.constexpr):
    scale = tl.minimum(invert(most) * LARGEST, MOST)  # as torch divides a number by a tensor
    return tl.where(most == 0, 1.0, tl.where(most < float("inf"), scale, float("nan")))


@triton.jit
def to_codes(values, scale, kind, LARGEST: tl.constexpr):
    scaled = tl.clamp(values * scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(kind)


@triton.jit
def store_codes(along, across, codes, turned, row, column, inside, m, k):
    tl.store(codes + row[:, None] * k + column[None, :], along, mask=inside)
    tl.store(turned + column[:, None] * m + row[None, :], tl.trans(across), mask=tl.trans(inside))


@triton.jit
def maxima_program(x, a, b, maxima, m, k, SOURCE: tl.constexpr, BY_ROW: tl.constexpr, TILE: tl.constexpr):
    values, row, column, _, _ = load_tile(x, a, b, m, k, SOURCE, TILE)
    bits = magnitude_bits(values)
    if BY_ROW:
        tl.atomic_max(maxima + row, tl.max(bits, 1), mask=row < m)
        tl.atomic_max(maxima + m + column, tl.max(bits, 0), mask=column < k)
    else:
        tl.atomic_max(maxima, tl.max(tl.max(bits, 1), 0))


@triton.jit
def quantise_program(
    x, a, b, scales, codes, turned, inverse, turned_inverse, most, m, k,
    LARGEST: tl.constexpr, SOURCE: tl.constexpr, BY_ROW: tl.constexpr, GIVEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    values, row, column, inside, _ = load_tile(x, a, b, m, k, SOURCE, TILE)
    kind = codes.dtype.element_ty
    if BY_ROW:
        scale = exact_scale(tl.load(scales + row, mask=row < m, other=0), LARGEST)
        across = exact_scale(tl.load(scales + m + column, mask=column < k, other=0), LARGEST)
        store_codes(
            to_codes(values, scale[:, None], kind, LARGEST), to_codes(values, across[None, :], kind, LARGEST),
            codes, turned, row, column, inside, m, k,
        )  # fmt: skip
        tl.store(inverse + row, invert(scale), mask=(row < m) & (tl.program_id(1) == 0))
        tl.store(turned_inverse + column, invert(across), mask=(column < k) & (tl.program_id(0) == 0))
    else:
        first = tl.arange(0, 1)
        scale = tl.load(scales + first)
        if not GIVEN:
            scale = exact_scale(scale, LARGEST)
        along = to_codes(values, scale[:, None], kind, LARGEST)
        store_codes(along, along, codes, turned, row, column, inside, m, k)
        begins = (first + tl.program_id(0) + tl.program_id(1)) == 0
        tl.store(inverse + first, invert(scale), mask=begins)
        tl.store(turned_inverse + first, invert(scale), mask=begins)
        if GIVEN:
            tl.atomic_max(most, tl.max(tl.max(magnitude_bits(values), 1), 0))


@triton.jit
def block_scale(bits, LARGEST: tl.constexpr, OCTAVE: tl.constexpr, MX: tl.constexpr):
    """Return the scales of blocks with these largest magnitudes, and the exponents of their inverses."""
    if MX:  # the exponent of the octave; subnormal numbers have lower ones, which are all clamped
        exponent = tl.maximum((bits >> 23) - BIAS - OCTAVE, -BIAS)
        exponent = tl.where(bits == 0, 0, exponent)
    else:  # the exponent of the exact scale, rounded down
        scale = exact_scale(bits.to(tl.float32, bitcast=True), LARGEST)
        exponent = -(scale.to(tl.int32, bitcast=True) >> 23) + BIAS
    scale = ((-exponent + BIAS) << 23).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, scale, float("nan")), exponent


@triton.jit
def place_scale(row, block, blocks):
    """Return where MX and NVFP4 have the scale of each row and block: tiles of 128 rows and 4 blocks, [32, 4, 4]."""
    tile = (row // 128)[:, None] * tl.cdiv(blocks, 4) + (block // 4)[None, :]
    return tile * 512 + (row % 32 * 16 + row % 128 // 32 * 4)[:, None] + (block % 4)[None, :]


@triton.jit
def store_scale(out, scale, exponent, row, block, m, blocks, MX: tl.constexpr):
    """Store the inverses as products on hardware need them: [blocks, m], or E8M0 in tiles of 32 x 4 x 4."""
    inside = (row < m)[:, None] & (block < blocks)[None, :]
    if MX:
        code = tl.where(scale == scale, exponent + BIAS, 255).to(tl.uint8)  # 255 is NaN
        tl.store(out + place_scale(row, block, blocks), code, mask=inside)
    else:
        inverse = tl.where(scale == scale, ((exponent + BIAS) << 23).to(tl.float32, bitcast=True), float("nan"))
        tl.store(out + block[None, :] * m + row[:, None], inverse, mask=inside)


@triton.jit
def quantise_blocks_program(
    x, a, b, codes, turned, inverse, turned_inverse, m, k,
    LARGEST: tl.constexpr, OCTAVE: tl.constexpr, SOURCE: tl.constexpr,
    BLOCK: tl.constexpr, MX: tl.constexpr, SQUARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    values, row, column, inside, number = load_tile(x, a, b, m, k, SOURCE, TILE)
    kind = codes.dtype.element_ty
    bits = magnitude_bits(values)
    if SQUARE:  # the tile is the block
        scale, exponent = block_scale(tl.max(tl.max(bits, 1), 0) + tl.zeros((1, 1), tl.int32), LARGEST, OCTAVE, MX)
        along = to_codes(values, scale, kind, LARGEST)
        store_codes(along, along, codes, turned, row, column, inside, m, k)
        factor = tl.where(scale == scale, ((exponent + BIAS) << 23).to(tl.float32, bitcast=True), float("nan"))
        one = tl.zeros((1, 1), tl.int64)
        tl.store(inverse + one + tl.program_id(0) * tl.cdiv(k, TILE) + number, factor)
        tl.store(turned_inverse + one + number * tl.cdiv(m, TILE) + tl.program_id(0), factor)
    else:
        N: tl.constexpr = TILE // BLOCK
        most = tl.max(tl.reshape(bits, (TILE, N, BLOCK)), 2)
        scale, exponent = block_scale(most, LARGEST, OCTAVE, MX)  # [TILE, N]
        spread = tl.reshape(tl.broadcast_to(scale[:, :, None], (TILE, N, BLOCK)), (TILE, TILE))
        blocks = number.to(tl.int64) * N + tl.arange(0, N)
        store_scale(inverse, scale, exponent, row, blocks, m, tl.cdiv(k, BLOCK), MX)
        most = tl.max(tl.reshape(bits, (N, BLOCK, TILE)), 1)
        across, exponent = block_scale(tl.trans(most), LARGEST, OCTAVE, MX)
        turned_spread = tl.reshape(tl.broadcast_to(tl.trans(across)[:, None, :], (N, BLOCK, TILE)), (TILE, TILE))
        blocks = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
        store_scale(turned_inverse, across, exponent, column, blocks, k, tl.cdiv(m, BLOCK), MX)
        store_codes(
            to_codes(values, spread, kind, LARGEST), to_codes(values, turned_spread, kind, LARGEST),
            codes, turned, row, column, inside, m, k,
        )  # fmt: skip


Source = tuple[Tensor, Tensor, Tensor, str, int, int]
"""Pointers x, a and b of `load_tile`, its ``SOURCE``, and the rows and columns of the matrix."""


def maxima(source: Source, found: Tensor, *, by_row: bool, tile: int) -> None:
    """Launch `maxima_program`: of a matrix [m, k], found [1] or [m + k], int32 zeros."""
    x, a, b, name, m, k = source
    maxima_program[_tiles(m, k, tile)](x, a, b, found, m, k, SOURCE=name, BY_ROW=by_row, TILE=tile, num_warps=WARPS)


def quantise(
    source: Source, scales: Tensor, out: Sequence[Tensor], *, largest: float, by_row: bool, given: bool, tile: int
) -> None:
    """Launch `quantise_program`; ``out`` are its results, the last one int32 zeros."""
    x, a, b, name, m, k = source
    quantise_program[_tiles(m, k, tile)](
        x, a, b, scales, *out, m, k, LARGEST=largest, SOURCE=name, BY_ROW=by_row, GIVEN=given, TILE=tile,
        num_warps=WARPS,
    )  # fmt: skip


def quantise_blocks(
    source: Source, out: Sequence[Tensor], *, largest: float, octave: int, block: int, mx: bool, square: bool, tile: int
) -> None:
    """Launch `quantise_blocks_program`; ``out`` are its results. Blocks have at most ``tile`` elements."""
    (x, a, b, name, m, k), tile = source, block if square else tile
    quantise_blocks_program[_tiles(m, k, tile)](
        x, a, b, *out, m, k, LARGEST=largest, OCTAVE=octave, SOURCE=name, BLOCK=block, MX=mx, SQUARE=square, TILE=tile,
        num_warps=WARPS,
    )  # fmt: skip


def _tiles(m: int, k: int, tile: int) -> tuple[int, int]:
    return triton.cdiv(m, tile), triton.cdiv(k, tile)
