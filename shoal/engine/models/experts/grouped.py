"""Feed-forward blocks of all experts as grouped matrix products.

Tokens are sorted by expert, so the rows of an expert are contiguous: no padding and no dropping (Gale et al. 2023,
"MegaBlocks"). CUDA uses one grouped product in bf16, which reads on the device where each expert's rows end. The CPU,
and CUDA in other formats, use one product per expert, written into a shared result; the host then reads the ends.

torch's grouped products (`aten/src/ATen/native/cuda/GroupMM.cu`) need under 1024 groups, int32 ends and row strides of
a multiple of 16 bytes, but groups of any number of rows. They leave rows after the last end undefined, and gradients
of weights without rows as well. Devices of other compute capabilities than 9 and 10 have no such kernel: torch then
reads the ends on the host at every product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine import kernels
from shoal.engine.collectives.ops import to_host
from shoal.engine.kernels.group_gradients import add_group_gradients
from shoal.engine.kernels.swiglu import swiglu_pair
from shoal.engine.models.feedforward import ClampedSwiGLU
from shoal.engine.models.products import by_mkl
from shoal.spec.catalog import ModelShape

_ALIGN = 16  # bytes

Groups = Sequence[int] | Tensor
"""Rows of each expert: their number on the host, or their ends on the device, int32 [E]."""


class GroupedExperts(nn.Module):
    """E feed-forward blocks; SwiGLU for llama, plain or clamped, else GELU.

    Attributes:
        gate, up: [E, f, h] (gate: llama only).
        down: [E, h, f].
        gate_bias, up_bias: [E, f] or None; `MoE` adds the biases of ``down``.
        overlaps: whether rows travel to other devices while this one computes.
    """

    overlaps = False

    def __init__(self, shape: ModelShape):
        super().__init__()
        assert shape.experts is not None
        count, f, h = shape.experts.count, shape.experts.ffn, shape.hidden
        self.gate = nn.Parameter(torch.empty(count, f, h)) if shape.family == "llama" else None
        self.up = nn.Parameter(torch.empty(count, f, h))
        self.down = nn.Parameter(torch.empty(count, h, f))
        self.clamped, biases = shape.activation == "clamped", shape.experts.biases
        self.gate_bias = nn.Parameter(torch.empty(count, f)) if biases and self.gate is not None else None
        self.up_bias = nn.Parameter(torch.empty(count, f)) if biases else None

    def announce(self, ends: Tensor) -> Callable[[Tensor], Callable[[], Tensor]]:
        """Announce the end of each expert's rows, [E] int32, before the rows themselves are ready.

        Returns:
            A function that starts to send rows [m, h], sorted by expert, and returns a function that waits for them and
            returns the experts' outputs in the same order, [m, h].
        """
        def start(rows: Tensor) -> Callable[[], Tensor]:
            return lambda: self.blocks(rows, ends if self.on_device else count_rows(to_host(ends)))

        return start

    @property
    def on_device(self) -> bool:
        """Whether torch's grouped product takes these matrices: bf16 on CUDA, rows of a multiple of 16 bytes."""
        weight = self.up
        aligned = not any(n * weight.element_size() % _ALIGN for n in weight.shape[1:])
        return kernels.use_fused(weight) and weight.dtype == torch.bfloat16 and aligned

    def receiver(self, parameter: nn.Parameter) -> Callable[[Callable], object] | None:
        """Return what takes the gradient of a parameter as a term that adds it; None is autograd."""
        return None

    def product(self, x: Tensor, weight: nn.Parameter, groups: Groups, bias: nn.Parameter | None = None) -> Tensor:
        """Compute y[run e] = x[run e] weight[e]^T (+ bias[e]): [m, k], [E, n, k], [E, n] -> [m, n]."""
        y = GroupedFunction.apply(x, weight, groups, self.receiver(weight))
        return y if bias is None else GroupedBias.apply(y, bias, groups, self.receiver(bias))

    def blocks(self, x: Tensor, groups: Groups) -> Tensor:
        """Apply the feed-forward blocks to rows that are on this rank."""
        up = self.product(x, self.up, groups, self.up_bias)
        if self.gate is None:
            return self.product(F.gelu(up, approximate="tanh"), self.down, groups)
        # Results without a name are freed as soon as they are used.
        if self.clamped or kernels.use_fused(x):
            gated = ClampedSwiGLU.apply if self.clamped else swiglu_pair
            return self.product(gated(self.product(x, self.gate, groups, self.gate_bias), up), self.down, groups)
        return self.product(F.silu(self.product(x, self.gate, groups, self.gate_bias)) * up, self.down, groups)


class GroupedFunction(torch.autograd.Function):
    """Products of row ranges with one matrix each; backward passes the weight gradient to ``add``, or to autograd."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, groups: Groups, add: Callable[[Callable], object] | None
    ) -> Tensor:
        ctx.counts, ctx.add = groups, add
        on_device = isinstance(groups, Tensor)
        if on_device:
            ctx.counts = None
        ctx.save_for_backward(x, weight, *((groups,) if on_device else ()))
        return rows_product(x, weight.mT, groups)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight, *ends = ctx.saved_tensors
        groups = ends[0] if ends else ctx.counts
        d_x = rows_product(gradient, weight, groups) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1]:
            term = partial(weight_product, gradient, x.detach(), groups)
            if ctx.add is None:
                d_weight = torch.empty_like(weight)
                term(d_weight, True)
            else:
                ctx.add(term)
        return d_x, d_weight, None, None


class GroupedBias(torch.autograd.Function):
    """Rows plus the bias of their expert, in place; backward passes the bias's gradient to ``add``, or to autograd."""

    @staticmethod
    def forward(
        ctx, y: Tensor, bias: Tensor, groups: Groups, add: Callable[[Callable], object] | None
    ) -> Tensor:
        ctx.mark_dirty(y)
        ctx.groups, ctx.add, ctx.shape = groups, add, bias.shape
        if isinstance(groups, Tensor):
            rows = torch.arange(len(y), device=y.device, dtype=groups.dtype)
            return y.add_(bias[torch.searchsorted(groups, rows, right=True).clamp_(max=len(bias) - 1)])
        for run, row in zip(runs(groups), bias, strict=True):
            y[run] += row
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if not ctx.needs_input_grad[1]:
            return gradient, None, None, None
        d_bias, term = None, partial(bias_sum, gradient, ctx.groups)
        if ctx.add is None:
            d_bias = gradient.new_empty(ctx.shape)
            term(d_bias, True)
        else:
            ctx.add(term)
        return gradient, d_bias, None, None


def bias_sum(d_y: Tensor, groups: Groups, total: Tensor, fresh: bool) -> None:
    """Compute total[e] (+)= sum of d_y[run e] in place, or overwrite if ``fresh``: [m, n] -> [E, n].

    By products with ones, whose sums have a fixed order on CUDA too.
    """
    ones = d_y.new_ones(len(d_y), _ALIGN // 2)
    sums = d_y.new_empty(*total.shape, _ALIGN // 2)
    weight_product(d_y, ones, groups, sums, True)
    (total.copy_ if fresh else total.add_)(sums[..., 0])


def rows_product(x: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Compute y[run e] = x[run e] matrices[e]: [m, k], [E, k, n] -> [m, n]."""
    if isinstance(groups, Tensor):
        if len(x) == 0:  # the kernel takes no operand without rows
            return x.new_empty(0, matrices.shape[-1])
        return F.grouped_mm(x.contiguous(), matrices, offs=groups)
    y = x.new_empty(len(x), matrices.shape[-1])
    with by_mkl():
        for run, matrix in zip(runs(groups), matrices.unbind(), strict=True):
            if run.start < run.stop:
                torch.mm(x[run], matrix, out=y[run])
    return y


def weight_product(d_y: Tensor, x: Tensor, groups: Groups, total: Tensor, fresh: bool) -> None:
    """Compute total[e] (+)= d_y[run e]^T x[run e] in place, or overwrite if ``fresh``: [m, n], [m, k] -> [E, n, k]."""
    if isinstance(groups, Tensor):
        if len(x):
            product = F.grouped_mm(d_y.contiguous().mT, x.contiguous(), offs=groups)
            add_group_gradients(total, product, groups, fresh)
        elif fresh:
            total.zero_()
        return
    with by_mkl():
        for run, part in zip(runs(groups), total.unbind(), strict=True):
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


def count_rows(ends: Sequence[int]) -> list[int]:
    """Return the number of rows of each expert from their ends.

    >>> count_rows([2, 2, 5])
    [2, 0, 3]
    """
    return [end - start for start, end in pairwise([0, *ends])]
