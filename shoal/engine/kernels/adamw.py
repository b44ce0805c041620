"""Adam and AdamW on flat shards in float32 or bfloat16, with stochastic rounding and clipping in one pass.

A shard is described by tiles of consecutive elements, int64 rows [start, stop, base, column, width, stride, part]:
element start + i of the shard has position base + (column + i) // width * stride + (column + i) % width in its
parameter, of whose random streams row ``part`` of the keys has the low 32 bits. An element outside of all tiles is
padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example
from shoal.engine.kernels.rounding import draw_bits, round_stochastically


def adamw_reference(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, rate: float, decay: float, beta1: float,
    beta2: float, eps: float, count: int, decoupled: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return weights and moments after update ``count`` (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019)."""
    if decoupled:
        weights = weights * (1 - rate * decay)
    else:
        gradient = gradient + weights * decay
    mean = mean.lerp(gradient, 1 - beta1)
    square = square * beta2 + gradient * gradient * (1 - beta2)
    root = (square / (1 - beta2**count)).sqrt() + eps
    return weights - rate / (1 - beta1**count) * mean / root, mean, square


@custom_op("shoal::adamw_", mutates_args=("weights", "mean", "square"))
def adamw_(
    weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, tiles: Tensor, keys: Tensor, scale: Tensor,
    skip: Tensor, rate: float, decay: float, beta1: float, beta2: float, eps: float, count: int, decoupled: bool,
    aligned: bool,
) -> None:  # fmt: skip
    """Apply one update in place.

    Args:
        weights, gradient, mean, square: [n], float32 or bfloat16; bfloat16 is rounded stochastically.
        tiles: [t, 7] int64, see above.
        keys: [parts, 3] int32, of the weights, the mean and the square.
        scale: factor on the gradient, float32 [].
        skip: float32 []; if not 0, nothing changes.
        decay: weight decay per unit of ``rate``; with ``decoupled`` false, added to the gradient.
        count: number of the update, from 1.
        aligned: whether every tile starts and stops at a multiple of 16.
    """
    if skip:
        return
    for start, stop, base, column, width, stride, part in tiles.tolist():
        i = column + torch.arange(stop - start, device=weights.device)
        narrow = [x[start:stop] for x in (weights, mean, square)]
        w, m, v = (x.float() for x in narrow)
        exact = adamw_reference(
            w, gradient[start:stop].float() * scale, m, v, rate=rate, decay=decay, beta1=beta1, beta2=beta2, eps=eps,
            count=count, decoupled=decoupled,
        )
        for out, x, key in zip(narrow, exact, keys[part].tolist(), strict=True):
            if out.dtype == torch.bfloat16:
                round_stochastically(out, x, draw_bits(key, base + i // width * stride + i % width))
            else:
                out.copy_(x)


adamw_.register_kernel("cuda", launch("adamw", "update"))


def examples() -> Iterator[Example]:
    """Yield examples of the operator: rows of a sharded matrix, and a gradient that is clipped."""
    n, generator = 3000, torch.Generator().manual_seed(0)
    inputs = torch.randn(4, n, generator=generator)
    numbers = {"rate": 0.1, "decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "count": 3}
    for decoupled in (True, False):

        def update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, decoupled: bool) -> tuple[Tensor, ...]:
            tiles = torch.tensor([[0, 1600, 40, 0, 100, 250, 0], [1600, n, 0, 0, n, 0, 1]], device=w.device)
            keys = torch.arange(6, dtype=torch.int32, device=w.device).view(2, 3)
            w, m, v = w.clone(), m.clone(), v.clone()
            scale, skip = torch.full((), 0.5, device=w.device), torch.zeros((), device=w.device)
            adamw_(w, g, m, v, tiles, keys, scale, skip, *numbers.values(), decoupled, False)
            return w, m, v

        def exact(w: Tensor, g: Tensor, m: Tensor, v: Tensor, decoupled: bool) -> tuple[Tensor, ...]:
            return adamw_reference(w, g * 0.5, m, v, **numbers, decoupled=decoupled)  # type: ignore[arg-type]

        yield Example(
            f"adamw, decoupled {decoupled}", partial(update, decoupled=decoupled), partial(exact, decoupled=decoupled),
            (*inputs[:3], inputs[3].square()), gradients=(),
        )
