"""Gradients of weights written straight into their buffer, at once or later.

The backward of a linear layer is two products: dX = dY W, which the layer before waits for, and dW = dY^T X, which
nobody does. Autograd makes both together, and adds a fresh dW to what it has. Here the layer's backward makes dX and
hands (dY, X) to its `ShardedParameters`, which adds the product to the gradient buffer in place. Where a schedule
splits the backward (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2), it does so when it is told to:
no pass is run twice, and dX and dW take together exactly the FLOPs of a whole backward.

Without a schedule that does so, a region of tensor parallelism still puts its dW off for a moment: until the sum of
dX over its ranks is on its way (`Postponed`), as Megatron-LM's linear layers do.

The gradients of embeddings wait in the same way. Those of norms, and of biases that are added by themselves, are made
in the first half, by autograd; they are sums over tokens, without a matrix product, and only their addition waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.experts.grouped import Experts, rows_product, weight_product
from shoal.parallel.data import ShardedParameters
from shoal.parallel.gradients import Term


class Postponed:
    """Gradients of weights that backward makes while a collective is on its way."""

    def __init__(self):
        self._waiting: list[tuple[ShardedParameters, nn.Parameter, Term]] = []

    def add(self, parameters: ShardedParameters, parameter: nn.Parameter, term: Term) -> None:
        """Put one off."""
        self._waiting.append((parameters, parameter, term))

    def make(self) -> None:
        """Make all that were put off."""
        waiting, self._waiting = self._waiting, []
        for parameters, parameter, term in waiting:
            parameters.add(parameter, term)


def apply_weight_gradients(model: nn.Module, parameters: ShardedParameters, postponed: Postponed | None = None) -> None:
    """Have a model, in place, hand over what the gradients of its linear layers and embeddings are made of.

    Args:
        postponed: takes those of matrices, if all linear layers lie in regions that make what it has.
    """
    given: Counter[nn.Parameter] = Counter()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.product = partial(_Linear.apply, parameters, postponed)
            if "forward" not in vars(module):  # else its own forward uses `product`
                module.forward = partial(_linear, module)
        elif isinstance(module, nn.Embedding):
            module.look_up = partial(_Embedding.apply, parameters)
            if "forward" not in vars(module):
                module.forward = partial(_embedding, module)
        elif isinstance(module, Experts):
            module.product = partial(_GroupedLinear.apply, parameters)
            given.update(module.parameters())
            continue
        else:
            continue
        given[module.weight] += 1
    parameters.expect(given)


def product(module: nn.Linear, x: Tensor) -> Tensor:
    """x W^T, without the bias: [.., in] -> [.., out]."""
    return module.product(x, module.weight, None) if hasattr(module, "product") else F.linear(x, module.weight)


def look_up(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows of the table: [..] -> [.., h]."""
    return module.look_up(ids, module.weight) if hasattr(module, "look_up") else F.embedding(ids, module.weight)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return module.product(x, module.weight, module.bias)


def _embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    return module.look_up(ids, module.weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, parameters: ShardedParameters, postponed: Postponed | None,
        x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None,
    ) -> Tensor:
        ctx.parameters, ctx.postponed, ctx.weight, ctx.bias = parameters, postponed, weight, bias
        ctx.save_for_backward(x, weight)  # which recomputation replaces by a new x, and by another view of the weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        d_x = gradient @ weight if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[3]:  # else it is frozen
            term = partial(_add_product, gradient, x.detach())  # without what made x
            give(ctx.parameters, ctx.postponed if d_x is not None else None, ctx.weight, term)
        if ctx.needs_input_grad[4]:
            ctx.parameters.add(ctx.bias, partial(add_rows, gradient))
        return None, None, d_x, None, None


class _GroupedLinear(torch.autograd.Function):
    """As `_Linear`, for runs of rows with a matrix each."""

    @staticmethod
    def forward(ctx, parameters: ShardedParameters, x: Tensor, weight: nn.Parameter, counts: Sequence[int]) -> Tensor:
        ctx.parameters, ctx.weight, ctx.counts = parameters, weight, counts
        ctx.save_for_backward(x, weight)
        return rows_product(x, weight.mT, counts)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        d_x = rows_product(gradient, weight, ctx.counts) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[2]:
            ctx.parameters.add(ctx.weight, partial(_add_grouped, gradient, x.detach(), ctx.counts))
        return None, d_x, None, None


def give(parameters: ShardedParameters, postponed: Postponed | None, weight: nn.Parameter, term: Term) -> None:
    """Hand over a term of a matrix's gradient; to ``postponed``, where the entry of a region waits for dX."""
    if postponed is not None:
        postponed.add(parameters, weight, term)
    else:
        parameters.add(weight, term)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameters: ShardedParameters, ids: Tensor, weight: nn.Parameter):
        ctx.parameters, ctx.weight = parameters, weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.parameters.add(ctx.weight, partial(_add_looked_up, gradient, *ctx.saved_tensors))
        return None, None, None


# What is handed over: from (the sum so far, whether nothing is in it yet) to the new sum, in place.


def _add_product(gradient: Tensor, x: Tensor, total: Tensor, fresh: bool) -> None:
    d_y, x = gradient.flatten(0, -2).t(), x.flatten(0, -2)
    if total.dtype != x.dtype:  # in bf16: sums are kept in float32
        add_gradient(d_y @ x, total, fresh)
    elif fresh:
        torch.mm(d_y, x, out=total)
    else:
        torch.addmm(total, d_y, x, out=total)


def _add_grouped(gradient: Tensor, x: Tensor, counts: Sequence[int], total: Tensor, fresh: bool) -> None:
    weight_product(gradient, x, counts, total, fresh=fresh)


def add_rows(gradient: Tensor, total: Tensor, fresh: bool) -> None:
    add_gradient(gradient.flatten(0, -2).sum(0), total, fresh)


def _add_looked_up(gradient: Tensor, ids: Tensor, total: Tensor, fresh: bool) -> None:
    if total.dtype != gradient.dtype or total.device.type != "cpu":  # elsewhere `index_add_` adds in any order
        add_gradient(torch.ops.aten.embedding_dense_backward(gradient, ids, len(total), -1, False), total, fresh)
        return
    (total.zero_() if fresh else total).index_add_(0, ids.flatten(), gradient.flatten(0, -2))


def add_gradient(gradient: Tensor, total: Tensor, fresh: bool) -> None:
    """Add a gradient as autograd makes it."""
    (total.copy_ if fresh else total.add_)(gradient)
