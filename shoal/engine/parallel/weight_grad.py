"""Gradients of weights written straight into their buffer, at once or later.

The backward of a linear layer is two products: dX = dY W, which the layer before waits for, and dW = dY^T X, which
nobody does. Autograd makes both together, and adds a fresh dW to what it has. Here the layer's backward makes dX and
hands (dY, X) to a `GradSink`, which has the product added to the gradient buffer in place. Where a schedule splits the
backward (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2), that waits until the schedule says so: no pass
is run twice, and dX and dW take together exactly the FLOPs of a whole backward.

Without such a schedule, a region of tensor parallelism still defers its dW for a moment: until the sum of dX over its
ranks is on its way (`GradSink.flush`), as Megatron-LM's linear layers do.

Matrices that multiply the same input (queries, keys and values; gate and up) lie end to end in their buffer, so that
they are one matrix without a copy: one larger product instead of several for dX and for dW. Forward makes several,
whose results each lie end to end for what comes next.

The gradients of embeddings wait in the same way. Those of norms are made in the first half, by autograd; they are sums
over tokens, without a matrix product, and only their addition waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.experts.grouped import rows_product, weight_product
from shoal.engine.parallel.zero.bucket import end_to_end
from shoal.engine.parallel.zero.gradients import Term
from shoal.engine.parallel.zero.zero_engine import ShardedParameters


class GradSink:
    """Where the backward of one stage's matrices leaves their gradients.

    Until `connect` it is autograd that makes them, and stays so where the compiler is to see all of a backward.

    Args:
        defer: whether linear layers' gradients wait for the next `flush`.
    """

    def __init__(self, *, defer: bool = False):
        self.parameters: ShardedParameters | None = None
        self._defer = defer
        self._waiting: list[tuple[Sequence[nn.Parameter], Term]] = []

    def connect(self, parameters: ShardedParameters, model: nn.Module) -> None:
        """From now on, leave the gradients of a model's matrices in the buffers of its parameters."""
        self.parameters = parameters
        parameters.expect(Counter(
            matrix for module in model.modules() if getattr(module, "sink", None) is self
            for matrix in module.parameters(recurse=False) if matrix.dim() > 1
        ))

    def add(self, weights: Sequence[nn.Parameter], term: Term) -> None:
        """Add a term of a parameter's gradient, or of several matrices' that lie end to end."""
        assert self.parameters is not None, "connect() comes first"
        self.parameters.add(weights, term)

    def defer_or_add(self, weights: Sequence[nn.Parameter], term: Term) -> None:
        """The same, but later where a region's entry waits for dX."""
        if self._defer:
            self._waiting.append((weights, term))
        else:
            self.add(weights, term)

    def flush(self) -> None:
        """Add what was deferred: a collective is on its way."""
        waiting, self._waiting = self._waiting, []
        for weights, term in waiting:
            self.add(weights, term)

    def runs(self, weights: Sequence[nn.Parameter]) -> list[slice]:
        """Cut weights into runs that are one matrix each."""
        alike = len({w.requires_grad for w in weights}) == 1
        if self.parameters is not None and alike and self.parameters.lie_end_to_end(weights):
            return [slice(0, len(weights))]
        return [slice(i, i + 1) for i in range(len(weights))]


Meanwhile = Callable[[list[Tensor]], object]
"""Makes the weights' gradients from the full gradients of the results. To be called once."""


class NoComm:
    """The products of one input with several matrices, where all that they need is on this rank.

    Other kinds (`shoal.engine.parallel.overlap`) fetch the input from the ranks that split a layer, or sum the result
    over them, part by part while they multiply.
    """

    def forward(self, x: Tensor, factors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """From x and factors [in, out] to (the products' full input, which their dW needs, and their results)."""
        return x, [x @ factor for factor in factors]

    def backward(
        self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Meanwhile, wanted: bool
    ) -> Tensor | None:
        """From the results' gradients and factors [out, in] to x's gradient, if it is wanted."""
        d_x = sum_of_products(gradients, factors) if wanted else None
        meanwhile(gradients)
        return d_x


NO_COMM = NoComm()


def sum_of_products(xs: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """The sum over i of x_i F_i: [.., K_i], [K_i, n] -> [.., n]."""
    total = xs[0] @ factors[0]
    for x, factor in zip(xs[1:], factors[1:], strict=True):
        total.flatten(0, -2).addmm_(x.flatten(0, -2), factor)
    return total


class LinearFunction(torch.autograd.Function):
    """x W_i^T + b_i of one input and several matrices."""

    @staticmethod
    def forward(ctx, sink: GradSink, comm: NoComm, n: int, x: Tensor, *parameters: nn.Parameter | None):
        """n results [.., out_i] of x [.., in], from n weights and then n biases, each of which may be None."""
        weights: tuple[nn.Parameter, ...] = parameters[:n]  # type: ignore[assignment]  # of which only biases are None
        biases = parameters[n:]
        ctx.sink, ctx.comm, ctx.weights, ctx.biases, ctx.runs = sink, comm, weights, biases, sink.runs(weights)
        x, results = comm.forward(x, [weight.t() for weight in weights])
        ctx.save_for_backward(x, *weights)  # which recomputation replaces by a new x, and by other views of the weights
        for y, bias in zip(results, biases, strict=True):
            if bias is not None:
                y += bias
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        x, *weights = ctx.saved_tensors
        sink, n = ctx.sink, len(weights)
        _, _, _, x_wanted, *wanted = ctx.needs_input_grad
        direct: list[Tensor | None] = [None] * (2 * n)  # for autograd

        def make(gradients: list[Tensor]) -> None:
            for run, gradient in zip(ctx.runs, gradients, strict=True):
                if not wanted[run.start]:
                    continue  # frozen
                term = partial(_add_product, gradient, x.detach())  # without what made x
                if sink.parameters is None:
                    direct[run.start] = torch.empty_like(weights[run.start])
                    term(direct[run.start], True)
                elif x_wanted:  # which a region's entry waits for
                    sink.defer_or_add(ctx.weights[run], term)
                else:
                    sink.add(ctx.weights[run], term)

        for i, (gradient, bias) in enumerate(zip(gradients, ctx.biases, strict=True)):
            if bias is None or not wanted[n + i]:
                continue
            if sink.parameters is None:
                direct[n + i] = gradient.flatten(0, -2).sum(0)
            else:
                sink.add([bias], partial(add_rows, gradient))
        joined = [torch.cat(gradients[run], -1) if run.stop - run.start > 1 else gradients[run][0] for run in ctx.runs]
        d_x = ctx.comm.backward(joined, [end_to_end(weights[run]) for run in ctx.runs], make, x_wanted)
        return None, None, None, d_x, *direct


class GroupedLinearFunction(torch.autograd.Function):
    """As `LinearFunction`, for runs of rows with a matrix each."""

    @staticmethod
    def forward(ctx, sink: GradSink, x: Tensor, weight: nn.Parameter, counts: Sequence[int]) -> Tensor:
        ctx.sink, ctx.weight, ctx.counts = sink, weight, counts
        ctx.save_for_backward(x, weight)
        return rows_product(x, weight.mT, counts)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        d_x = rows_product(gradient, weight, ctx.counts) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[2]:
            ctx.sink.add([ctx.weight], partial(_add_grouped, gradient, x.detach(), ctx.counts))
        return None, d_x, None, None


class EmbeddingFunction(torch.autograd.Function):
    """Rows of a table: ids [..] -> [.., h]."""

    @staticmethod
    def forward(ctx, sink: GradSink, ids: Tensor, weight: nn.Parameter):
        ctx.sink, ctx.weight = sink, weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.sink.add([ctx.weight], partial(_add_looked_up, gradient, *ctx.saved_tensors))
        return None, None, None


# Terms: from (the sum so far, whether nothing is in it yet) to the new sum, in place.


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
    """Add the sum over the tokens: a bias's gradient."""
    add_gradient(gradient.flatten(0, -2).sum(0), total, fresh)


def _add_looked_up(gradient: Tensor, ids: Tensor, total: Tensor, fresh: bool) -> None:
    if total.dtype != gradient.dtype or total.device.type != "cpu":  # elsewhere `index_add_` adds in any order
        add_gradient(torch.ops.aten.embedding_dense_backward(gradient, ids, len(total), -1, False), total, fresh)
        return
    (total.zero_() if fresh else total).index_add_(0, ids.flatten(), gradient.flatten(0, -2))


def add_gradient(gradient: Tensor, total: Tensor, fresh: bool) -> None:
    """Add a gradient as autograd makes it."""
    (total.copy_ if fresh else total.add_)(gradient)
