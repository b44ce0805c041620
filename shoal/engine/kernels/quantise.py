"""Quantisation of matrices in the layouts of hardware products: codes, transposed codes, inverse scales.

`shoal.engine.precision.float8` defines the numbers. Here one pass over the matrix computes them (and one before it,
where a scale depends on more than a block), with the operands of `torch._scaled_mm` as results:

    codes     [m, k], and of the transpose [k, m], both contiguous
    inverse   1 / scale: [1, 1]; [m, 1]; for 128 of a row [m, k/128] with stride (1, m); for squares [m/128, k/128];
              for MX E8M0, swizzled in tiles of 128 rows and 4 blocks (cuBLAS, "1D block scaling factors layout")

In NVFP4 codes have 4 bits, two in a byte, the even element of a row in the low half: [m, k / 2]. Inverse scales are
e4m3 in the tiles of MX, followed by the 4 bytes of 1 / the tensor's factor. The transpose of an input or gradient is
rotated before it is quantised (`shoal.engine.precision.nvfp4`).

In 8 bits the matrix may also be the result of an operation (`SOURCES`), computed in the same pass from that operation's
inputs x, a and b, and never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example
from shoal.engine.kernels.swiglu import swiglu_backward, swiglu_reference
from shoal.engine.precision.float8 import (
    ROW,
    TENSOR,
    Grain,
    compute_factor,
    compute_scale,
    encode,
    invert_scale,
    largest,
    octave,
)
from shoal.engine.precision.nvfp4 import ROTATED, draw_rounding, rotate
from shoal.spec.number_formats import E2M1, E4M3, E5M2, NV_BLOCK

FORMAT = {kind.name: kind for kind in (E4M3, E5M2)}
TILE = 128  # rows and columns that one program works on; also the rows of a tile of MX scales


SOURCES: dict[str, Callable[..., Tensor]] = {
    "plain": lambda x: x,  # [m, k]
    "norm": lambda total, inverse, weight: total * inverse[:, None] * weight,  # [m, k], [m], [k]: of `rms_statistics`
    "swiglu": swiglu_reference,  # gate and up [m, 2 k]
    "swiglu_backward": swiglu_backward,  # gradient [m, k / 2], gate and up [m, k]
}
"""Operations whose result is quantised, in plain PyTorch, by name."""


def compute(x: Tensor, a: Tensor | None, b: Tensor | None, source: str) -> Tensor:
    """Compute the matrix [m, k] that is quantised, in at least float32, rounded to the format of x."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return SOURCES[source](*(each.to(exact) for each in (x, a, b) if each is not None)).to(x.dtype)


def _size(x: Tensor, a: Tensor | None = None, b: Tensor | None = None, source: str = "plain") -> tuple[int, int]:
    m, k = x.shape if source != "swiglu_backward" or a is None else a.shape
    return (m, k // 2) if source == "swiglu" else (m, k)


def _locate(x: Tensor, a: Tensor | None = None, b: Tensor | None = None, source: str = "plain"):
    """Return a matrix as the Triton programs take it."""
    x = x.contiguous()
    a, b = (x if each is None else each.contiguous() for each in (a, b))
    return x, a, b, source, *_size(x, a, b, source)


@custom_op("shoal::maxima", mutates_args=())
def maxima(x: Tensor, by_row: bool, a: Tensor | None = None, b: Tensor | None = None, source: str = "plain") -> Tensor:
    """Return the largest magnitude of a matrix [m, k], [1], or of each row and each column, [m + k]."""
    x = compute(x, a, b, source)
    return torch.cat((largest(x, ROW), largest(x.t(), ROW))).flatten() if by_row else largest(x, TENSOR).flatten()


@maxima.register_kernel("cuda")
def _(x: Tensor, by_row: bool, *source: Any) -> Tensor:
    found = x.new_zeros(sum(_size(x, *source)) if by_row else 1, dtype=torch.int32)
    launch("quantise", "maxima")(_locate(x, *source), found, by_row=by_row, tile=TILE)
    return found.view(torch.float32)


@maxima.register_fake
def _(x: Tensor, by_row: bool, *source: Any) -> Tensor:
    return x.new_empty(sum(_size(x, *source)) if by_row else 1, dtype=torch.float32)


@custom_op("shoal::quantise", mutates_args=())
def quantise(
    x: Tensor, values: Tensor, kind: str, by_row: bool, given: bool,
    a: Tensor | None = None, b: Tensor | None = None, source: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantise a matrix [m, k] with one scale, or by rows of it and of its transpose.

    Args:
        values: result of `maxima`; or, if ``given``, the scale [1] itself.

    Returns:
        (codes, codes of the transpose, inverse, inverse of the transpose, largest magnitude if ``given``: [1], else
        [0]).
    """
    x = compute(x, a, b, source)
    format, grain = FORMAT[kind], ROW if by_row else TENSOR
    most = (values[: len(x)], values[len(x) :]) if by_row else (values, values)
    found = []
    for matrix, along in zip((x, x.t()), most, strict=True):
        scale = along.view(-1, 1) if given else compute_scale(along.view(-1, 1), format, grain)
        found.append((encode(matrix, scale, format, grain).codes.contiguous(), scale.reciprocal()))
    (codes, inverse), (turned, turned_inverse) = found
    return codes, turned, inverse, turned_inverse, maxima(x, False) if given else x.new_empty(0, dtype=torch.float32)


@quantise.register_kernel("cuda")
def _(x: Tensor, values: Tensor, kind: str, by_row: bool, given: bool, *source: Any) -> tuple[Tensor, ...]:
    out, most = _empty(x, _size(x, *source), kind, by_row), x.new_zeros(int(given), dtype=torch.int32)
    launch("quantise", "quantise")(
        _locate(x, *source), values, (*out, most), largest=FORMAT[kind].largest, by_row=by_row, given=given, tile=TILE
    )
    return *out, most.view(torch.float32)


@quantise.register_fake
def _(x: Tensor, values: Tensor, kind: str, by_row: bool, given: bool, *source: Any) -> tuple[Tensor, ...]:
    return *_empty(x, _size(x, *source), kind, by_row), x.new_empty(int(given), dtype=torch.float32)


@custom_op("shoal::quantise_blocks", mutates_args=())
def quantise_blocks(
    x: Tensor, kind: str, rows: int, columns: int, scale: str,
    a: Tensor | None = None, b: Tensor | None = None, source: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantise a matrix [m, k] by blocks of it, and of its transpose; arguments as in `Grain`.

    Returns:
        (codes, codes of the transpose, inverse, inverse of the transpose).
    """
    x = compute(x, a, b, source)
    format, grain = FORMAT[kind], Grain(rows, columns, scale)
    found = []
    for matrix in (x, x.t()):
        scales = compute_scale(largest(matrix, grain), format, grain)
        found.append((encode(matrix, scales, format, grain).codes.contiguous(), _lay_out(scales.reciprocal(), grain)))
    (codes, inverse), (turned, turned_inverse) = found
    return codes, turned, inverse, turned_inverse


@quantise_blocks.register_kernel("cuda")
def _(x: Tensor, kind: str, rows: int, columns: int, scale: str, *source: Any) -> tuple[Tensor, ...]:
    grain, format = Grain(rows, columns, scale), FORMAT[kind]
    out = _empty_blocks(x, _size(x, *source), kind, grain)
    as_bytes = [each.view(torch.uint8) if each.dtype == torch.float8_e8m0fnu else each for each in out]
    launch("quantise", "quantise_blocks")(
        _locate(x, *source), as_bytes, largest=format.largest, octave=octave(format), block=columns,
        mx=scale == "mx", square=rows == columns, tile=TILE,
    )  # fmt: skip
    return out


@quantise_blocks.register_fake
def _(x: Tensor, kind: str, rows: int, columns: int, scale: str, *source: Any) -> tuple[Tensor, ...]:
    return _empty_blocks(x, _size(x, *source), kind, Grain(rows, columns, scale))


def _lay_out(inverse: Tensor, grain: Grain) -> Tensor:
    """Return inverse scales [m / rows, k / columns] in the layout of the module's docstring."""
    if grain.scale != "mx":
        return inverse if grain.rows > 1 else inverse.t().contiguous().t()
    return _swizzle(inverse).to(torch.float8_e8m0fnu)


def _swizzle(inverse: Tensor) -> Tensor:
    """Return inverse scales [m, blocks] in tiles of 128 x 4; 0 where these have more rows or blocks."""
    m, blocks = inverse.shape
    padded = inverse.new_zeros(-(-m // TILE) * TILE, -(-blocks // 4) * 4)
    padded[:m, :blocks] = inverse
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)  # [row / 128, row / 32 % 4, row % 32, block / 4, block % 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten()


@custom_op("shoal::nvfp4_maxima", mutates_args=())
def nvfp4_maxima(x: Tensor) -> Tensor:
    """Return the largest magnitudes of a matrix [m, k] and of its rotated transpose, [2]."""
    return torch.cat((largest(x, TENSOR), largest(rotate(x.t()), TENSOR))).flatten()


@nvfp4_maxima.register_kernel("cuda")
def _(x: Tensor) -> Tensor:
    found = x.new_zeros(2, dtype=torch.int32)
    launch("nvfp4", "maxima")(x.contiguous(), found)
    return found.view(torch.float32)


@nvfp4_maxima.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2, dtype=torch.float32)


@custom_op("shoal::quantise_nvfp4", mutates_args=())
def quantise_nvfp4(
    x: Tensor, most: Tensor, square: bool, key: int, start: Tensor | None, features: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise a matrix [m, k] and its transpose to NVFP4; the latter rotated, unless blocks are squares.

    Args:
        most: largest magnitude of both, [2]; if ``square``, [1].
        key, start, features: of a gradient, which is rounded stochastically, as in `draw_rounding`.

    Returns:
        (codes, codes of the transpose, inverse, inverse of the transpose).
    """
    grain = Grain(NV_BLOCK if square else 1, NV_BLOCK, "nv")
    turned, along, across = x.t() if square else rotate(x.t()), None, None
    if start is not None and features is not None:
        along, across = draw_rounding(key, start, turned.shape[1], features)
        along, across = along[: len(x)], across.t()
    found = []
    for matrix, total, draws in ((x, most[0], along), (turned, most[-1], across)):
        blocks, factor = largest(matrix, grain), compute_factor(total)
        codes = encode(matrix, compute_scale(blocks, E2M1, grain, total), E2M1, grain, draws).codes
        inverse = invert_scale(blocks, factor).repeat_interleave(grain.rows, 0)[: len(matrix)]
        factor = torch.where(total.isfinite(), 1 / factor, torch.nan)
        both = _swizzle(inverse).to(torch.float8_e4m3fn).view(torch.uint8), factor.view(1).view(torch.uint8)
        found.append((_pack(codes), torch.cat(both).view(torch.float8_e4m3fn)))
    (codes, inverse), (turned, turned_inverse) = found
    return codes, turned, inverse, turned_inverse


@quantise_nvfp4.register_kernel("cuda")
def _(
    x: Tensor, most: Tensor, square: bool, key: int, start: Tensor | None, features: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = _empty_nvfp4(x, square)
    launch("nvfp4", "quantise")(x.contiguous(), most, key, start, features, _parts(out), square=square)
    return out


@quantise_nvfp4.register_fake
def _(x: Tensor, most: Tensor, square: bool, key: int, start: Tensor | None, features: Tensor | None):
    return _empty_nvfp4(x, square)


def _parts(out: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of `quantise_nvfp4` as its program takes them: codes, scales of blocks, and both factors."""
    codes, turned, *inverse = out
    both = [each[-4:].view(torch.float32) for each in inverse]
    return [codes.view(torch.int32), turned.view(torch.int32), *(each.view(torch.uint8) for each in inverse), *both]


def _pack(codes: Tensor) -> Tensor:
    """Return numbers of e2m1 [m, k] as bytes of two codes [m, k / 2]."""
    numbers = codes.float()
    size = numbers.abs()
    index = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.uint8)
    index = index | numbers.signbit().to(torch.uint8) << 3
    return (index[:, ::2] | index[:, 1::2] << 4).contiguous()


def _empty_nvfp4(x: Tensor, square: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    tokens = m if square else -(-m // ROTATED) * ROTATED
    codes, inverse = [], []
    for rows, columns in ((m, k), (k, tokens)):
        codes.append(x.new_empty(rows, columns // 2, dtype=torch.uint8))
        tiles = -(-rows // TILE) * -(-columns // (4 * NV_BLOCK))
        inverse.append(x.new_empty(4 * TILE * tiles + 4, dtype=torch.float8_e4m3fn))
    return codes[0], codes[1], inverse[0], inverse[1]


def _empty(x: Tensor, size: tuple[int, int], kind: str, by_row: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (m, k), dtype = size, getattr(torch, kind)
    inverse = [x.new_empty(rows if by_row else 1, 1, dtype=torch.float32) for rows in (m, k)]
    return x.new_empty(m, k, dtype=dtype), x.new_empty(k, m, dtype=dtype), inverse[0], inverse[1]


def _empty_blocks(x: Tensor, size: tuple[int, int], kind: str, grain: Grain) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (m, k), dtype = size, getattr(torch, kind)
    return (
        x.new_empty(m, k, dtype=dtype), x.new_empty(k, m, dtype=dtype),
        _empty_scales(x, m, k, grain), _empty_scales(x, k, m, grain),
    )  # fmt: skip


def _empty_scales(x: Tensor, m: int, k: int, grain: Grain) -> Tensor:
    if grain.scale == "mx":  # 0: rows that fill a tile have a scale, which no product uses
        tiles = -(-m // TILE) * -(-k // (4 * grain.columns))
        return x.new_zeros(4 * TILE * tiles, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    blocks = -(-k // grain.columns)
    if grain.rows > 1:
        return x.new_empty(-(-m // grain.rows), blocks, dtype=torch.float32)
    return x.new_empty(blocks, m, dtype=torch.float32).t()


def examples() -> Iterator[Example]:
    """Yield calls whose codes and scales equal the reference's bit for bit, with rows of very different size."""
    x = torch.randn(384, 512) * 10.0 ** torch.randint(-12, 12, (384, 1))

    def by_scale(x: Tensor, *, by_row: bool) -> list[Tensor]:
        return [each.float() for each in quantise(x, maxima(x, by_row), E4M3.name, by_row, False)[:4]]

    def by_block(x: Tensor, *, block: tuple[int, int, str]) -> list[Tensor]:
        return [each.float() for each in quantise_blocks(x, E5M2.name, *block)]

    calls = {f"quantise, by row {by_row}": partial(by_scale, by_row=by_row) for by_row in (False, True)}
    calls |= {f"quantise, blocks {block}": partial(by_block, block=block) for block in _BLOCKS}
    calls |= {f"quantise, nvfp4, squares {square}": partial(_in_4_bits, square=square) for square in (False, True)}
    for name, call in calls.items():
        yield Example(
            name, call, lambda x, call=call: call(x.bfloat16()), (x,), (torch.bfloat16,), gradients=(), tolerance=1e-12
        )
    sources = {
        "norm": (x, x[:, 0].abs().reciprocal(), torch.randn(512)), "swiglu": (torch.randn(384, 512),),
        "swiglu_backward": (torch.randn(384, 512), torch.randn(384, 1024)),
    }  # fmt: skip
    for source, inputs in sources.items():
        yield Example(
            f"quantise, {source}", partial(_decode_blocks, source), SOURCES[source], inputs, (torch.bfloat16,),
            gradients=(), tolerance=2**-4 + 2**-7,
        )


def _in_4_bits(x: Tensor, *, square: bool) -> list[Tensor]:
    """Return maxima, codes and scales, as numbers that are equal if their bytes are."""
    most = maxima(x, False) if square else nvfp4_maxima(x)
    start = None if square else torch.full((), 2**40, device=x.device)
    features = None if square else torch.arange(x.shape[1], device=x.device)
    found = quantise_nvfp4(x, most, square, 1 << 50 | 12345, start, features)
    return [most, *(each.view(torch.uint8).float() for each in found)]


def _decode_blocks(source: str, x: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """Return the values of the codes, whose rounding is up to 2^-4 of the largest of a block."""
    codes, _, inverse, _ = quantise_blocks(x, E4M3.name, 1, 128, "power", a, b, source)
    return codes.float() * inverse.repeat_interleave(128, 1)


_BLOCKS = [(1, 128, "power"), (128, 128, "power"), (1, 32, "mx")]
