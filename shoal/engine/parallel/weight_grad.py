"""Gradients of weights written straight into their buffer, at once or later.

The backward of a linear layer is two products: dX = dY W, which the layer before waits for, and dW = dY^T X, which
nobody does. Autograd makes both together, and adds a fresh dW to what it has. Here the layer's backward makes dX and
hands (dY, X) to its `ShardedParameters`, which adds the product to the gradient buffer in place. Where a schedule
splits the backward (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2), it does so when it is told to:
no pass is run twice, and dX and dW take together exactly the FLOPs of a whole backward.

Without a schedule that does so, a region of tensor parallelism still puts its dW off for a moment: until the sum of
dX over its ranks is on its way (`Postponed`), as Megatron-LM's linear layers do.

Matrices that multiply the same input (queries, keys and values; gate and up) lie end to end in their buffer, so that
they are one matrix without a copy: one larger product instead of several for dX and for dW. Forward makes several,
whose results each lie end to end for what comes next.

The gradients of embeddings wait in the same way. Those of norms are made in the first half, by autograd; they are sums
over tokens, without a matrix product, and only their addition waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.experts.grouped import GroupedExperts, rows_product, weight_product
from shoal.engine.models.projections import JointProjections
from shoal.engine.parallel.replace import replace_forward
from shoal.engine.parallel.zero.bucket import end_to_end
from shoal.engine.parallel.zero.gradients import Term
from shoal.engine.parallel.zero.zero_engine import ShardedParameters


class Postponed:
    """Gradients of weights that backward makes while a collective is on its way."""

    def __init__(self) -> None:
        self._waiting: list[tuple[ShardedParameters, nn.Parameter | Sequence[nn.Parameter], Term]] = []

    def add(
        self, parameters: ShardedParameters, weights: nn.Parameter | Sequence[nn.Parameter], term: Term
    ) -> None:
        """Put one off."""
        self._waiting.append((parameters, weights, term))

    def make(self) -> None:
        """Make all that were put off."""
        waiting, self._waiting = self._waiting, []
        for parameters, weights, term in waiting:
            parameters.add(weights, term)


class Passage(Protocol):
    """How the input of some products comes from the ranks that split a layer, or their result goes to them."""

    def forward(self, x: Tensor, factors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """From x and factors [in, out] to (the products' whole input, which their dW needs, and their results)."""

    def backward(
        self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Callable[[list[Tensor]], object], wanted: bool
    ) -> Tensor | None:
        """From the results' gradients and factors [out, in] to x's, if it is wanted.

        ``meanwhile`` makes the weights' gradients: it is called once, with the whole gradients of the results.
        """


class Here:
    """All that the products need is on this rank."""

    def forward(self, x: Tensor, factors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return x, [x @ factor for factor in factors]

    def backward(
        self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Callable[[list[Tensor]], object], wanted: bool
    ) -> Tensor | None:
        d_x = sum_of_products(gradients, factors) if wanted else None
        meanwhile(gradients)
        return d_x


HERE = Here()

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From x, W and a bias or None to x W^T + bias. A linear layer that has one of its own has it as ``product``."""


def sum_of_products(xs: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """The sum over i of x_i F_i: [.., K_i], [K_i, n] -> [.., n]."""
    total = xs[0] @ factors[0]
    for x, factor in zip(xs[1:], factors[1:], strict=True):
        total.flatten(0, -2).addmm_(x.flatten(0, -2), factor)
    return total


@dataclass(frozen=True)
class Hand:
    """Where the backward of linear layers leaves their weights' gradients.

    Attributes:
        parameters: whose buffers take them; None leaves it to autograd.
        postponed: takes them for the moment.
    """

    parameters: ShardedParameters | None = None
    postponed: Postponed | None = None

    def runs(self, weights: Sequence[nn.Parameter]) -> list[slice]:
        """Cut weights into runs that are one matrix each."""
        alike = len({w.requires_grad for w in weights}) == 1
        if self.parameters is not None and alike and self.parameters.lie_end_to_end(weights):
            return [slice(0, len(weights))]
        return [slice(i, i + 1) for i in range(len(weights))]


def apply_weight_gradients(model: nn.Module, parameters: ShardedParameters, postponed: Postponed | None = None) -> None:
    """Have a model, in place, hand over what the gradients of its linear layers and embeddings are made of.

    Args:
        postponed: takes those of matrices, if all linear layers lie in regions that make what it has.
    """
    given: Counter[Tensor] = Counter()
    hand = Hand(parameters, postponed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if "forward" not in vars(module):
                replace_forward(module, partial(_linear, module))
            vars(module)["hand"] = hand
        elif isinstance(module, nn.Embedding):
            if "forward" not in vars(module):
                replace_forward(module, partial(look_up, module))
            vars(module)["look_up"] = partial(_Embedding.apply, parameters)
        elif isinstance(module, GroupedExperts):
            module.product = partial(_GroupedLinear.apply, parameters)
            given.update(module.parameters())
            continue
        else:
            if isinstance(module, JointProjections) and "project" not in vars(module):
                module.project = partial(project, module)
            continue
        given[module.weight] += 1
    parameters.expect(given)


def project(module: JointProjections, x: Tensor, passage: Passage = HERE, *, biased: bool = True) -> tuple[Tensor, ...]:
    """What `projections` of a module make of one input; without ``biased`` their products alone."""
    linears = [getattr(module, name) for name in module.projections]
    if any(hasattr(linear, "product") for linear in linears):  # each in its own way
        return tuple(linear(x) for linear in linears)
    return products(linears, x, passage, biased=biased)


def products(
    linears: Sequence[nn.Linear], x: Tensor, passage: Passage = HERE, *, biased: bool = True
) -> tuple[Tensor, ...]:
    """x W^T + b of each of some linear layers: [.., in] -> [.., out]."""
    hand, biases = getattr(linears[0], "hand", Hand()), (m.bias if biased else None for m in linears)
    return _Products.apply(hand, passage, len(linears), x, *(m.weight for m in linears), *biases)


def product(module: nn.Linear, x: Tensor, passage: Passage = HERE) -> Tensor:
    """x W^T, without the bias: [.., in] -> [.., out]. A module's own ``product``, where it has one, makes it."""
    own: Product | None = getattr(module, "product", None)
    if own is not None:
        return own(x, module.weight, None)
    if passage is HERE and not hasattr(module, "hand"):
        return F.linear(x, module.weight)
    return _Products.apply(getattr(module, "hand", Hand()), passage, 1, x, module.weight, None)[0]


def look_up(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows of the table: [..] -> [.., h]."""
    own: Callable[[Tensor, Tensor], Tensor] | None = getattr(module, "look_up", None)
    return F.embedding(ids, module.weight) if own is None else own(ids, module.weight)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    own: Product | None = getattr(module, "product", None)
    return products([module], x)[0] if own is None else own(x, module.weight, module.bias)


class _Products(torch.autograd.Function):
    """Products of one input with several matrices."""

    @staticmethod
    def forward(ctx, hand: Hand, passage: Passage, n: int, x: Tensor, *parameters: nn.Parameter | None):
        weights: tuple[nn.Parameter, ...] = parameters[:n]  # type: ignore[assignment]  # of which only biases are None
        biases = parameters[n:]
        ctx.hand, ctx.passage, ctx.weights, ctx.biases, ctx.runs = hand, passage, weights, biases, hand.runs(weights)
        x, results = passage.forward(x, [weight.t() for weight in weights])
        ctx.save_for_backward(x, *weights)  # which recomputation replaces by a new x, and by other views of the weights
        for y, bias in zip(results, biases, strict=True):
            if bias is not None:
                y += bias
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, *weights = ctx.saved_tensors
        hand, n = ctx.hand, len(weights)
        _, _, _, x_wanted, *wanted = ctx.needs_input_grad
        direct: list[Tensor | None] = [None] * (2 * n)  # for autograd

        def make(gradients: list[Tensor]) -> None:
            for run, gradient in zip(ctx.runs, gradients, strict=True):
                if not wanted[run.start]:
                    continue  # frozen
                term = partial(_add_product, gradient, x.detach())  # without what made x
                if hand.parameters is None:
                    direct[run.start] = torch.empty_like(weights[run.start])
                    term(direct[run.start], True)
                elif x_wanted:  # which a region's entry waits for
                    give(hand.parameters, hand.postponed, ctx.weights[run], term)
                else:
                    hand.parameters.add(ctx.weights[run], term)

        for i, (gradient, bias) in enumerate(zip(gradients, ctx.biases, strict=True)):
            if bias is None or not wanted[n + i]:
                continue
            if hand.parameters is None:
                direct[n + i] = gradient.flatten(0, -2).sum(0)
            else:
                hand.parameters.add(bias, partial(add_rows, gradient))
        joined = [torch.cat(gradients[run], -1) if run.stop - run.start > 1 else gradients[run][0] for run in ctx.runs]
        d_x = ctx.passage.backward(joined, [end_to_end(weights[run]) for run in ctx.runs], make, x_wanted)
        return None, None, None, d_x, *direct


class _GroupedLinear(torch.autograd.Function):
    """As `_Products`, for runs of rows with a matrix each."""

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


def give(
    parameters: ShardedParameters, postponed: Postponed | None,
    weights: nn.Parameter | Sequence[nn.Parameter], term: Term,
) -> None:
    """Hand over a term of a matrix's gradient, or of several that lie end to end; to ``postponed``, where the entry of
    a region waits for dX."""
    if postponed is not None:
        postponed.add(parameters, weights, term)
    else:
        parameters.add(weights, term)


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
