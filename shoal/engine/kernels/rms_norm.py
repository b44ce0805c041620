"""Residual addition and RMS normalisation in one pass: x + update, and it divided by its rms and scaled.

(Zhang & Sennrich 2019, "Root mean square layer normalization", equation 4.) Backward adds the gradient of the residual
stream in the same pass, and sums the gradient of the weight in two stages of fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example
from shoal.engine.operators import custom_op


def rms_norm_reference(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + update, normalised) in plain PyTorch: [.., h] each."""
    total = x if update is None else x + update
    return total, total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@custom_op("shoal::rms_norm")
def rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``update`` to x, and normalise the sum.

    Args:
        x, update: [.., h]; without an update x itself is normalised.
        weight: [h].

    Returns:
        x + update [.., h], or [0] without an update; normalised [.., h]; 1/rms [..], in at least float32.
    """
    total, y = rms_norm_reference(x, update, weight, eps)
    exact = total.to(torch.promote_types(x.dtype, torch.float32))
    inverse = (exact.square().mean(-1) + eps).rsqrt()
    return x.new_empty(0) if update is None else total, y, inverse


rms_norm.register_kernel("cuda")(launch("rms_norm", "forward"))


@rms_norm.register_fake
def _(x: Tensor, update: Tensor | None, weight: Tensor, eps: float):
    exact = torch.promote_types(x.dtype, torch.float32)
    total = x.new_empty(0 if update is None else x.shape)
    return total, x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=exact)


@custom_op("shoal::rms_statistics")
def rms_statistics(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `rms_norm` does except the normalised sum itself, which a later operator computes again.

    Returns:
        x + update [.., h], or [0] without an update; 1/rms [..]; largest magnitude of the normalised sum [1].
    """
    total, y, inverse = rms_norm(x, update, weight, eps)
    return total, inverse, y.abs().amax().to(inverse.dtype).view(1)


rms_statistics.register_kernel("cuda")(launch("rms_norm", "statistics"))


@rms_statistics.register_fake
def _(x: Tensor, update: Tensor | None, weight: Tensor, eps: float):
    exact = torch.promote_types(x.dtype, torch.float32)
    total = x.new_empty(0 if update is None else x.shape)
    return total, x.new_empty(x.shape[:-1], dtype=exact), x.new_empty(1, dtype=exact)


@custom_op("shoal::rms_norm_backward")
def rms_norm_backward(
    d_y: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of the sum, which x and ``update`` share, and of the weight.

    dx = r w dy - x r^3 / h ((w dy).x) + d_total with r = 1/rms, and dw = sum over rows of r dy x.

    Args:
        d_y, d_total: [.., h] gradients of the normalised sum and of the sum itself, the latter None if it is not used.
        total, inverse: [.., h] the sum, and [..] 1/rms.
    """
    r = inverse.unsqueeze(-1)
    scaled = d_y * weight
    along = (scaled * total).sum(-1, keepdim=True) * r**3 / total.shape[-1]
    d_x = scaled * r - total * along
    d_weight = (d_y * total * r).flatten(0, -2).sum(0)
    return (d_x if d_total is None else d_x + d_total).to(total.dtype), d_weight.to(weight.dtype)


rms_norm_backward.register_kernel("cuda")(launch("rms_norm", "backward"))
rms_norm_backward.register_fake(
    lambda d_y, d_total, total, weight, inverse: (total.new_empty(total.shape), torch.empty_like(weight))
)


def save(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    """Save what `differentiate` needs; ``output`` may have further tensors without gradients."""
    x, update, weight, *_ = inputs
    total, _, inverse, *others = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(inverse, *others)
    ctx.added = update is not None
    ctx.save_for_backward(total if ctx.added else x, weight, inverse)


def differentiate(ctx, d_total: Tensor | None, d_y: Tensor | None, *_: Tensor | None):
    """Return the gradients of x, update, weight and eps."""
    if d_y is None:  # only the sum is used
        return d_total, d_total if ctx.added else None, None, None
    d_total = d_total.contiguous() if ctx.added and d_total is not None else None
    d_x, d_weight = rms_norm_backward(d_y.contiguous(), d_total, *ctx.saved_tensors)
    return d_x, d_x if ctx.added else None, d_weight, None


rms_norm.register_autograd(differentiate, setup_context=save)


def examples() -> Iterator[Example]:
    """Yield calls with and without an update, with odd rows, and with more rows than a backward has programs."""
    for rows, h in ((3, 7), (600, 1300)):
        x, weight = torch.randn(2, rows, h), 1 + torch.randn(h) / 8
        yield Example(
            f"rms_norm, h = {h}", lambda x, w: rms_norm(x, None, w, 1e-5)[1],
            lambda x, w: rms_norm_reference(x, None, w, 1e-5)[1], (x, weight),
        )
        yield Example(
            f"rms_norm of a sum, h = {h}", lambda x, update, w: rms_norm(x, update, w, 1e-5)[:2],
            lambda x, update, w: rms_norm_reference(x, update, w, 1e-5), (x, torch.randn_like(x), weight),
        )
        yield Example(
            f"rms_norm's statistics, h = {h}", lambda x, update, w: rms_statistics(x, update, w, 1e-5),
            _statistics_reference, (x, torch.randn_like(x), weight), gradients=(),
        )


def _statistics_reference(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total, y = rms_norm_reference(x, update, weight, 1e-5)
    return total, (total.square().mean(-1) + 1e-5).rsqrt(), y.abs().amax().view(1)
