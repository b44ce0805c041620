"""RMSNorm, with a hand-written backward for the CPU and one kernel on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.engine import kernels
from shoal.engine.kernels.rms_norm import rms_norm
from shoal.engine.models.products import by_mkl


def add_and_normalise(norm: nn.Module, x: Tensor, update: Tensor | None, block: nn.Module) -> tuple[Tensor, Any]:
    """Return x + update (x itself without one) and norm(x + update), [.., h] each; with RMSNorm on CUDA in one kernel.

    If the first products of ``block``, which takes the normalised sum, have 8-bit inputs, it may be an encoded one.
    """
    if isinstance(norm, RMSNorm) and kernels.use_fused(x):
        first: tuple[nn.Module, ...] = getattr(block, "first_layers", tuple)()
        normalise = getattr(first[0], "normalise", None) if first else None
        if normalise is not None and not (block._forward_hooks or block._forward_pre_hooks):
            found = normalise(norm, x, update, first, norm.smallest(x))
            if found is not None:
                return found
        return (x, norm(x)) if update is None else norm(x, update)
    x = x if update is None else x + update
    return x, norm(x)


class RMSNorm(nn.RMSNorm):
    """RMS normalisation, x / rms(x) * weight (Zhang & Sennrich 2019, equation 4).

    On the CPU torch's backward makes about twenty passes over x and spends a fifth of its time in one division; this
    one makes five. The compiler fuses torch's version, whose kernels keep more digits than bf16, so it is used there.
    On CUDA one operator is used, compiled or not.
    """

    def forward(self, x: Tensor, update: Tensor | None = None):
        """Normalise the last dimension of x, [.., h]; or (on CUDA) return x + update, and that normalised."""
        eps = self.smallest(x)
        weight = x.new_ones(self.normalized_shape) if self.weight is None else self.weight
        if kernels.use_fused(x):
            total, y, _ = rms_norm(x, update, weight, eps)
            return y if update is None else (total, y)
        plain = x.dtype in (torch.float32, torch.float64)
        if torch.compiler.is_compiling() or not plain or x.device.type != "cpu":
            return super().forward(x)
        return RMSNormFunction.apply(x, weight, eps)

    def smallest(self, x: Tensor) -> float:
        """Return the number added to the mean square."""
        return torch.finfo(x.dtype).eps if self.eps is None else self.eps


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm by row: y = w r x with r = (x.x / h + eps)^(-1/2)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean.add_(eps).rsqrt_()  # r: [.., 1]
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """Compute dx = r w dy - x r^3 / h ((dy x).w) and dw = sum over rows of r dy x."""
        x, weight, inverse = ctx.saved_tensors
        h = x.shape[-1]
        products = (gradient * x).reshape(-1, h)  # dy x: [rows, h]
        with by_mkl():  # oneDNN takes five times as long for a vector
            d_weight = products.t() @ inverse.reshape(-1)
            along = (products @ weight).view_as(inverse).mul_(inverse.pow(3)).div_(-h)
        d_x = (gradient * weight).mul_(inverse).addcmul_(x, along)
        return d_x, d_weight, None
