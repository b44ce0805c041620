"""AdamW on a matrix of weights whose moments have 8-bit codes (Dettmers et al. 2022, "8-bit Optimizers").

Rows consist of complete blocks of `WIDTH` elements, or of one block of at most as many. A block has one scale, its
largest absolute value, for each moment (section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example
from shoal.engine.kernels.rounding import draw_bits, round_stochastically

WIDTH = 256  # consecutive elements in a row of the unsharded parameter
_RAISED = 2.0**15  # scale that keeps values far below the smallest code normal in float16


def update_moments(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, rate: float, decay: float, beta1: float,
    beta2: float, eps: float, count: int,
) -> None:  # fmt: skip
    """Apply update ``count`` of AdamW in place (Loshchilov & Hutter 2019, algorithm 2)."""
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / (1 - beta2**count)).sqrt_().add_(eps)
    weights.mul_(1 - rate * decay).addcdiv_(mean, root, value=-rate / (1 - beta1**count))


def adam8bit_reference(
    weights: Tensor, gradient: Tensor, mean_codes: Tensor, square_codes: Tensor, mean_scales: Tensor,
    square_scales: Tensor, levels: Tensor, nearest: Tensor, starts: Tensor, moments: Tensor, key: int,
    rate: float, decay: float, beta1: float, beta2: float, eps: float, count: int,
) -> None:  # fmt: skip
    """Apply one update in plain PyTorch, in at least float32; see `adam8bit_`."""
    w, g = (x.to(levels.dtype) for x in (weights, gradient))
    m, v = dequantise(mean_codes, mean_scales, levels[0]), dequantise(square_codes, square_scales, levels[1])
    update_moments(w, g, m, v, rate=rate, decay=decay, beta1=beta1, beta2=beta2, eps=eps, count=count)
    if weights.dtype == torch.bfloat16:
        place = starts.unsqueeze(1) + torch.arange(weights.size(1), device=weights.device)
        round_stochastically(weights, w, draw_bits(key, place))
    else:
        weights.copy_(w)
    if moments.numel():
        torch.stack((m, v), out=moments)
        return
    kinds = (mean_codes, mean_scales, m, nearest[0]), (square_codes, square_scales, v, nearest[1])
    for codes, scales, x, table in kinds:
        scales.copy_(largest(x))
        codes.copy_(quantise(x, scales, table))


@custom_op(
    "shoal::adam8bit_",
    mutates_args=("weights", "mean_codes", "square_codes", "mean_scales", "square_scales", "moments"),
)
def adam8bit_(
    weights: Tensor, gradient: Tensor, mean_codes: Tensor, square_codes: Tensor, mean_scales: Tensor,
    square_scales: Tensor, levels: Tensor, nearest: Tensor, starts: Tensor, moments: Tensor, scale: Tensor,
    skip: Tensor, key: int, rate: float, decay: float, beta1: float, beta2: float, eps: float, count: int,
) -> None:  # fmt: skip
    """Apply one update in place.

    Args:
        weights, gradient: [rows, columns], float32 or bfloat16; bfloat16 weights are rounded stochastically.
        mean_codes, square_codes: [rows, columns] uint8; these four have the same strides, 1 along columns.
        mean_scales, square_scales: [rows, blocks] float32.
        levels, nearest: `dynamic_map` and `nearest_codes`, signed before unsigned: [2, 256] float32, [2, 65536] uint8.
        starts: [rows] int64, position of each row's first element in the parameter, for bfloat16.
        moments: [2, rows, columns] float32, or empty. If rows have one block whose scale other ranks share, it
            receives both moments, and codes and scales stay as they are.
        scale: factor on the gradient, float32 [].
        skip: float32 []; if not 0, nothing changes.
        key: of the weights' random bits.
    """
    if not skip:
        adam8bit_reference(
            weights, gradient.float() * scale, mean_codes, square_codes, mean_scales, square_scales, levels, nearest,
            starts, moments, key, rate=rate, decay=decay, beta1=beta1, beta2=beta2, eps=eps, count=count,
        )


adam8bit_.register_kernel("cuda", lambda *inputs: launch("adam8bit", "update")(*inputs, width=WIDTH))


# ---- codes -----------------------------------------------------------------------------------------------------


@cache
def dynamic_map(signed: bool) -> Tensor:
    """Return the [256] values of the codes, ascending: dynamic tree quantisation (Dettmers 2016; section 1.3 of the
    paper).

    Each decade from 1e-7 to 1 has twice as many values as the one below; the unsigned map has twice as many in each.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1, dtype=torch.float64)
        middles = ((borders[:-1] + borders[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


@cache
def nearest_codes(signed: bool) -> Tensor:
    """Return a lookup table [65536] from the bits of a float16 to the code nearest to its value divided by `_RAISED`.
    Values within a relative 2^-11 of the midpoint between two codes may get the other code."""
    raised = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).double().nan_to_num(0.0)
    levels = dynamic_map(signed)
    borders = (levels[1:] + levels[:-1]) / 2 - 1e-12  # ties go up, whatever the rounding of the midpoint
    return torch.bucketize(raised / _RAISED, borders).to(torch.uint8)


def zero_code(signed: bool) -> int:
    return int((dynamic_map(signed) == 0).nonzero())


def split_blocks(x: Tensor) -> Tensor:
    """View x as [rows, blocks, WIDTH], or [rows, 1, columns] for less than a block."""
    return x.unflatten(1, (-1, WIDTH)) if x.size(1) % WIDTH == 0 else x.unsqueeze(1)


def largest(x: Tensor) -> Tensor:
    """Return the scales [rows, blocks] of ``x``."""
    return split_blocks(x).abs().amax(-1)


def quantise(x: Tensor, scales: Tensor, nearest: Tensor) -> Tensor:
    """Return the codes [rows, columns] of ``x`` with block ``scales`` [rows, blocks]; ``nearest`` is from
    `nearest_codes`."""
    scales = (scales / _RAISED).clamp(min=torch.finfo(x.dtype).tiny)
    bits = (split_blocks(x) / scales.unsqueeze(-1)).to(torch.float16).view(torch.int16).int() & 0xFFFF
    return nearest.index_select(0, bits.reshape(-1)).view(x.shape)  # on the CPU ten times faster than [bits]


def dequantise(codes: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """Return the values [rows, columns] of codes; ``levels`` is from `dynamic_map`."""
    values = levels.index_select(0, codes.int().reshape(-1)).view(codes.shape)
    return split_blocks(values).mul_(scales.unsqueeze(-1)).view(codes.shape)


def examples() -> Iterator[Example]:
    """Yield an example of the operator, whose moments come back decoded."""
    rows, columns, generator = 5, 2 * WIDTH, torch.Generator().manual_seed(0)
    weights, gradient = torch.randn(2, rows, columns, generator=generator)
    codes = torch.randint(0, 256, (2, rows, columns), generator=generator, dtype=torch.uint8)
    numbers = {"rate": 0.1, "decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-2, "count": 3}

    def update(w: Tensor, g: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        levels = torch.stack([dynamic_map(signed) for signed in (True, False)]).to(w.device, torch.float32)
        nearest = torch.stack([nearest_codes(signed) for signed in (True, False)]).to(w.device)
        scales = torch.ones(2, rows, columns // WIDTH, device=w.device)
        starts = torch.arange(0, rows * columns, columns, device=w.device)
        scale, skip = torch.full((), 0.5, device=w.device), torch.zeros((), device=w.device)
        w, codes, none = w.clone(), codes.clone(), scales.new_empty(0)
        adam8bit_(w, g, *codes, *scales, levels, nearest, starts, none, scale, skip, 7, *numbers.values())
        return w, torch.stack([dequantise(*each) for each in zip(codes, scales, levels, strict=True)])

    def exact(w: Tensor, g: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        moments = [dynamic_map(signed)[code.int()] for signed, code in zip((True, False), codes, strict=True)]
        w = w.clone()
        update_moments(w, g * 0.5, *moments, **numbers)  # type: ignore[arg-type]
        return w, torch.stack(moments)

    yield Example("adam8bit", update, exact, (weights, gradient, codes), gradients=(), tolerance=2e-2)
