"""Feed-forward blocks of all experts as grouped matrix products.

Tokens are sorted by expert, so the rows of an expert are contiguous: no padding and no dropping (Gale et al. 2023,
"MegaBlocks"). CUDA uses one grouped product. The CPU uses one product per expert, written into a shared result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.products import by_mkl
from shoal.spec.catalog import ModelShape

_ALIGN = 16  # bytes: torch's grouped products need rows that are a multiple of it


class GroupedExperts(nn.Module):
    """E feed-forward blocks without biases; SwiGLU for llama, else GELU.

    Attributes:
        gate, up: [E, f, h] (gate: llama only).
        down: [E, h, f].
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        assert shape.experts is not None
        count, f, h = shape.experts.count, shape.experts.ffn, shape.hidden
        self.gate = nn.Parameter(torch.empty(count, f, h)) if shape.family == "llama" else None
        self.up = nn.Parameter(torch.empty(count, f, h))
        self.down = nn.Parameter(torch.empty(count, h, f))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows, given [E] rows per expert: [m, h], sorted by expert -> [m, h]."""
        return self.blocks(rows, counts.tolist())

    def product(self, x: Tensor, weight: nn.Parameter, counts: Sequence[int]) -> Tensor:
        """Compute y[run e] = x[run e] weight[e]^T: [m, k], [E, n, k] -> [m, n]."""
        return GroupedFunction.apply(x, weight, counts, None)

    def blocks(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Apply the feed-forward blocks to rows that are on this rank."""
        up = self.product(x, self.up, counts)
        if self.gate is None:
            return self.product(F.gelu(up, approximate="tanh"), self.down, counts)
        return self.product(F.silu(self.product(x, self.gate, counts)) * up, self.down, counts)


class GroupedFunction(torch.autograd.Function):
    """Products of row ranges with one matrix each; backward passes the weight gradient to ``add``, or to autograd."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, counts: Sequence[int], add: Callable[[Callable], object] | None
    ) -> Tensor:
        ctx.counts, ctx.add = counts, add
        ctx.save_for_backward(x, weight)
        return rows_product(x, weight.mT, counts)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        d_x = rows_product(gradient, weight, ctx.counts) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1]:
            term = partial(weight_product, gradient, x.detach(), ctx.counts)
            if ctx.add is None:
                d_weight = torch.empty_like(weight)
                term(d_weight, True)
            else:
                ctx.add(term)
        return d_x, d_weight, None, None


def rows_product(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute y[run e] = x[run e] matrices[e]: [m, k], [E, k, n] -> [m, n]."""
    if _one_kernel(x, matrices):
        return F.grouped_mm(x.contiguous(), matrices, offs=_ends(counts, x.device))
    y = x.new_empty(len(x), matrices.shape[-1])
    with by_mkl():
        for run, matrix in zip(runs(counts), matrices.unbind(), strict=True):
            if run.start < run.stop:
                torch.mm(x[run], matrix, out=y[run])
    return y


def weight_product(d_y: Tensor, x: Tensor, counts: Sequence[int], total: Tensor, fresh: bool) -> None:
    """Compute total[e] (+)= d_y[run e]^T x[run e] in place, or overwrite if ``fresh``: [m, n], [m, k] -> [E, n, k]."""
    if _one_kernel(x, d_y):
        product = F.grouped_mm(d_y.contiguous().mT, x.contiguous(), offs=_ends(counts, x.device))
        if 0 in counts:  # the kernel leaves the output of empty groups undefined
            product[[e for e, count in enumerate(counts) if count == 0]] = 0
        (total.copy_ if fresh else total.add_)(product)
        return
    with by_mkl():
        for run, part in zip(runs(counts), total.unbind(), strict=True):
            if run.start == run.stop:
                if fresh:
                    part.zero_()
            elif total.dtype != x.dtype:  # bf16 products are accumulated in float32
                (part.copy_ if fresh else part.add_)(d_y[run].t() @ x[run])
            elif fresh:
                torch.mm(d_y[run].t(), x[run], out=part)
            else:
                part.addmm_(d_y[run].t(), x[run])


def runs(counts: Sequence[int]) -> list[slice]:
    """Return the row range of each expert.

    >>> runs([2, 0, 3])
    [slice(0, 2, None), slice(2, 2, None), slice(2, 5, None)]
    """
    ends = list(accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def _one_kernel(*operands: Tensor) -> bool:
    """Return whether torch's grouped product takes these: bf16 on CUDA, rows and columns multiples of 16 bytes."""
    return all(
        x.is_cuda and x.dtype == torch.bfloat16 and not any(n * x.element_size() % _ALIGN for n in x.shape[1:])
        for x in operands
    )
