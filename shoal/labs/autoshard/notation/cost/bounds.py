"""When a parallelism waits for its network: the rules of How to Scale Your Model, chapter 5 (Austin et al. 2025).

A layer is `In[B, D] * Win[D, F] * Wout[F, D] -> Out[B, D]` in bf16; its collectives take bytes / bandwidth (`Rings`)
and can overlap with its products. With

    alpha = C / W    FLOP/s of a device over bytes/s of both directions of a link along one mesh axis
    n                mesh axes that a parallelism is spread over: n times the bandwidth

a layer is compute-bound while its products take longer than its collectives:

    data, FSDP    4 B D F / (X C) > 4 D F / (W n)              B / X > alpha / n
    tensor        4 B D F / (Y C) > 4 B D / (W n)              Y < n F / alpha
    mixed         4 B D F / (X Y C) > 4 D F / (Y W nx) and     B / (X Y) > alpha^2 / (nx ny F)  at the best X
                                    > 4 B D / (X W ny)

docs/sharding.md derives them.
"""

from __future__ import annotations

import math


def intensity(peak_flops: float, bandwidth: float) -> float:
    """alpha: FLOPs that a device does while a byte crosses a link that carries ``bandwidth`` in both directions."""
    return peak_flops / bandwidth


def least_batch(alpha: float, axes: int = 1) -> float:
    """B / X, tokens per device, above which data parallelism and FSDP are compute-bound."""
    return alpha / axes


def most_tensor(alpha: float, hidden: float, axes: int = 1) -> float:
    """Y, the devices up to which tensor parallelism is compute-bound, whatever the batch.

    Args:
        hidden: F, the width of the feed-forward layer.
    """
    return axes * hidden / alpha


def best_fsdp(batch: float, hidden: float, devices: float, fsdp_axes: int = 1, tensor_axes: int = 1) -> float:
    """X, the devices for FSDP of ``devices`` = X Y that mixed FSDP and tensor parallelism communicates least with.

    Weights take D F X / (devices nx) and activations B D / (X ny), the one rising and the other falling with X, so both
    their sum and the larger of them are least where they are equal.
    """
    return math.sqrt(batch / hidden * fsdp_axes / tensor_axes * devices)


def least_mixed_batch(
    alpha: float, hidden: float, fsdp_axes: int = 1, tensor_axes: int = 1, *, overlapped: bool = True
) -> float:
    """Tokens per device above which FSDP mixed with tensor parallelism, at the best X, is compute-bound.

    Args:
        overlapped: whether the collectives of the two go on at the same time; one after the other they take twice as
            long, and the batch is four times as large (the first edition's 4 alpha^2 / (nx ny F)).
    """
    return (1 if overlapped else 4) * alpha**2 / (fsdp_axes * tensor_axes * hidden)
