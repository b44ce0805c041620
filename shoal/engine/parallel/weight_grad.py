"""Weight gradients computed directly into their buffers, immediately or deferred.

The backward of a linear layer has two products: dX = dY W, which the previous layer needs, and dW = dY^T X, which
nothing waits for. Autograd computes both together and then adds a new dW to the accumulated one. This backward computes
dX and passes (dY, X) to a `GradSink`, which accumulates the product into the gradient buffer in place. If a schedule
splits the backward (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2), the product waits until the
schedule runs it. Otherwise a tensor-parallel region defers it until the reduction of dX is in flight
(`GradSink.flush`), as Megatron-LM's linear layers do.

Matrices with the same input (queries, keys and values; gate and up) are adjacent in their buffer and form one matrix
without a copy: one product for dX and one for dW. Forward results are separate, unless the next operation takes them
as one tensor, as fused operators do; backward then needs no concatenation of their gradients. On the CPU that copy
takes longer than it saves if the matrices have many rows (`ALONE`), and each is multiplied alone.

Gradients of embeddings are deferred in the same way; of norms, only the accumulation is.

In compiled layers an operator takes the place of the autograd function. Its backward gives the weight gradients to the
sink while it computes dX, and returns dX alone: where the buffers are, and what they hold already, is state that the
compiler does not see.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op

from shoal.engine import kernels
from shoal.engine.kernels.add_product import add_product
from shoal.engine.parallel.zero.bucket import join_adjacent
from shoal.engine.parallel.zero.gradients import Term
from shoal.engine.parallel.zero.zero_engine import ShardedParameters

ALONE = 512
"""Rows from which on the CPU a matrix is multiplied alone in backward. With 2048 tokens and 2 x 688 rows this is 1 %
faster on one thread and 4 % on two; with 3 x 128 rows it is 3 % slower (Zen 4)."""


class GradSink:
    """Destination of the weight gradients of one stage; with ``defer``, gradients of linear layers wait for `flush`.

    Before `connect` autograd computes these gradients.
    """

    def __init__(self, *, defer: bool = False):
        self.parameters: ShardedParameters | None = None
        self._defer = defer
        self._waiting: list[tuple[Sequence[nn.Parameter], Term]] = []

    def connect(self, parameters: ShardedParameters, model: nn.Module, again: Mapping[Tensor, int]) -> None:
        """Send gradients of a model's matrices to the buffers of its parameters from now on.

        Args:
            again: how often a forward uses a matrix besides once for each module that has it.
        """
        self.parameters = parameters
        owners: list[Any] = [module for module in model.modules() if getattr(module, "sink", None) is self]
        matrices = [(owner, p) for owner in owners for p in owner.parameters(recurse=False) if p.dim() > 1]
        parameters.expect(Counter[Tensor](matrix for _, matrix in matrices) + Counter(again))
        for (before, first), (owner, second) in pairwise(matrices):
            biases = getattr(before, "bias", None), getattr(owner, "bias", None)
            owner.follows = self._are_one((first, second)) and self._are_one(biases)
        for owner in owners:
            owner.key = make_key(owner, parameters.mesh.device)

    def add(self, weights: Sequence[nn.Parameter], term: Term) -> None:
        """Accumulate a gradient term of a parameter, or of several adjacent matrices."""
        assert self.parameters is not None, "connect() comes first"
        self.parameters.add(weights, term)

    def defer_or_add(self, weights: Sequence[nn.Parameter], term: Term) -> None:
        """Accumulate a gradient term, at the next `flush` if deferral is enabled."""
        if self._defer:
            self._waiting.append((weights, term))
        else:
            self.add(weights, term)

    def flush(self) -> None:
        """Accumulate the deferred terms, while a collective is in flight."""
        waiting, self._waiting = self._waiting, []
        for weights, term in waiting:
            self.add(weights, term)

    def group_adjacent(self, weights: Sequence[nn.Parameter]) -> list[slice]:
        """Group weights that are adjacent in memory, and all trained or all frozen, into one matrix each."""
        return [slice(0, len(weights))] if self._are_one(weights) else [slice(i, i + 1) for i in range(len(weights))]

    @property
    def deferring(self) -> bool:
        """Whether terms wait for the second half of a split backward."""
        return self.parameters is not None and self.parameters.deferring

    def _are_one(self, weights: Sequence[Any]) -> bool:
        kinds = {None if w is None else w.requires_grad for w in weights}
        if kinds == {None}:  # absent biases
            return True
        return len(kinds) == 1 and self.parameters is not None and self.parameters.are_adjacent(weights)


Meanwhile = Callable[[list[Tensor]], object]
"""Callback that computes the weight gradients from the full gradients of the results. Call it once."""


class NoComm:
    """Products of one input with several matrices, without communication.

    Subclasses (`shoal.engine.parallel.overlap`) gather the input from the ranks that split a layer, or sum the result
    over them.

    Attributes:
        chunked: whether the products are computed in chunks, while others are transferred.
    """

    chunked: ClassVar[bool] = False

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return (what `start_gather` needs of x, [.., in]; x W_i^T + b_i, [.., out_i])."""
        return x, [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def start_gather(self, kept: Tensor) -> Callable[[], Tensor]:
        """Start gathering the input of the products again; the returned function waits for it."""
        return lambda: kept

    def backward(
        self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Meanwhile, wanted: bool
    ) -> Tensor | None:
        """Return the gradient of x, if wanted, from the gradients of the results and factors [out, in]."""
        if wanted:
            return self.sum(gradients, factors, lambda: meanwhile(gradients))
        meanwhile(gradients)
        return None

    def sum(self, gradients: list[Tensor], factors: list[Tensor], meanwhile: Callable[[], object]) -> Tensor:
        """Return the gradient of x; ``meanwhile`` is called during the last transfer, if there is any."""
        d_x = sum_products(gradients, factors)
        meanwhile()
        return d_x


NO_COMM = NoComm()


def sum_products(xs: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """Return sum_i x_i F_i: [.., K_i], [K_i, n] -> [.., n]."""
    total = xs[0] @ factors[0]
    for x, factor in zip(xs[1:], factors[1:], strict=True):
        total.flatten(0, -2).addmm_(x.flatten(0, -2), factor)
    return total


class ProductInput:
    """Input of products, gathered again at the latest for the first weight gradient, and freed with the last."""

    def __init__(self, start_gather: Callable[[], Callable[[], Tensor]], uses: int):
        self.uses, self._start_gather = uses, start_gather
        self._wait: Callable[[], Tensor] | None = None
        self._x: Tensor | None = None

    def start(self) -> Callable[[], Tensor]:
        self._wait = self._wait or self._start_gather()
        return self._wait

    def take(self) -> Tensor:
        """Return the input, one of the expected times."""
        x = self.start()() if self._x is None else self._x
        self.uses -= 1
        self._wait, self._x = None, x if self.uses else None  # its parts are freed here
        return x


class LinearFunction(torch.autograd.Function):
    """Linear products x W_i^T + b_i of one input with several matrices."""

    @staticmethod
    def forward(
        ctx, sink: GradSink, comm: NoComm, joined: bool, waits: bool, n: int, x: Tensor,
        *parameters: nn.Parameter | None,
    ):  # fmt: skip
        """Return n results [.., out_i] of x [.., in], given n weights followed by n biases, each possibly None.

        If ``joined``, which needs adjacent weights and biases, the result is one tensor [.., sum of out_i]. If
        ``waits``, weight gradients may wait for the next `GradSink.flush`.
        """
        weights: tuple[nn.Parameter, ...] = parameters[:n]  # type: ignore[assignment]  # only biases may be None
        biases = parameters[n:]
        ctx.sink, ctx.comm, ctx.waits, ctx.weights, ctx.biases = sink, comm, waits, weights, biases
        ctx.parts = [slice(0, n)] if joined else [slice(i, i + 1) for i in range(n)]
        alone = not comm.chunked and x.device.type == "cpu" and min(map(len, weights)) >= ALONE
        ctx.runs = ctx.parts if alone else sink.group_adjacent(weights)
        factors: Sequence[Tensor] = [join_adjacent(weights)] if joined else weights
        added = [join_adjacent(held) if (held := [b for b in biases if b is not None]) else None] if joined else biases
        kept, results = comm.forward(x, factors, added)
        ctx.save_for_backward(kept, *weights)  # recomputation replaces these by a new x and other views of the weights
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        kept, *weights = ctx.saved_tensors
        sink, comm, n = ctx.sink, ctx.comm, len(weights)
        *_, x_wanted = ctx.needs_input_grad[:6]
        wanted = ctx.needs_input_grad[6:]
        direct: list[Tensor | None] = [None] * (2 * n)  # for autograd

        # Without autograd history, which terms that wait would hold.
        x = ProductInput(partial(comm.start_gather, kept.detach()), uses=sum(wanted[run.start] for run in ctx.runs))
        if x.uses and not sink.deferring:
            x.start()  # it arrives while the gradient of x is computed

        def add_terms(gradients: list[Tensor]) -> None:
            if comm is not NO_COMM:  # its collective hides what waited for it
                sink.flush()
            for run, gradient in zip(ctx.runs, gradients, strict=True):
                if not wanted[run.start]:
                    continue  # frozen
                term = partial(_accumulate_gathered, gradient, x)
                if sink.parameters is None:
                    direct[run.start] = torch.empty_like(weights[run.start])
                    term(direct[run.start], True)
                elif x_wanted and ctx.waits:  # a region's entry waits for it
                    sink.defer_or_add(ctx.weights[run], term)
                else:
                    sink.add(ctx.weights[run], term)

        for run, gradient in zip(ctx.parts, gradients, strict=True):
            i = n + run.start
            if ctx.biases[run.start] is None or not wanted[i]:
                continue
            if sink.parameters is None:
                direct[i] = gradient.flatten(0, -2).sum(0)
            else:
                sink.add(ctx.biases[run], partial(_add_rows, gradient))
        joined = [torch.cat(few, -1) if len(few := gradients[run]) > 1 else few[0] for run in ctx.runs]
        d_x = comm.backward(joined, [join_adjacent(weights[run]) for run in ctx.runs], add_terms, x_wanted)
        return None, None, None, None, None, d_x, *direct


class EmbeddingFunction(torch.autograd.Function):
    """Embedding lookup: ids [..] -> [.., h]."""

    @staticmethod
    def forward(ctx, sink: GradSink, ids: Tensor, weight: nn.Parameter):
        ctx.sink, ctx.weight = sink, weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.sink.add([ctx.weight], partial(_add_looked_up, gradient, *ctx.saved_tensors))
        return None, None, None


# ---- the same for the compiler -----------------------------------------------------------------------------------

_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def make_key(owner: object, device: torch.device) -> Tensor:
    """Return a tensor by whose memory operators find an object.

    With a number of it, each layer would be compiled again. With a key in host memory, the compiler would assume that
    results are not aligned.
    """
    key = torch.empty(1, device=device)
    _OWNERS[key.untyped_storage()._cdata] = owner
    return key


def find_owner(key: Tensor) -> Any:
    return _OWNERS[key.untyped_storage()._cdata]


@custom_op("shoal::linear", mutates_args=())
def multiply_adjacent(x: Tensor, keys: Sequence[Tensor], rows: int) -> Tensor:
    """Compute x W^T with the weights of adjacent linear layers: [.., in] -> [.., rows].

    The input has to require a gradient: the compiler keeps the backward for it.

    Args:
        keys: of the layers.
        rows: of all weights together.
    """
    return x @ join_adjacent([find_owner(key).weight for key in keys]).t()


@multiply_adjacent.register_fake
def _(x: Tensor, keys: Sequence[Tensor], rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@custom_op("shoal::linear_backward", mutates_args=())
def give_gradients(gradient: Tensor, x: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Accumulate the gradients of the weights, and return the gradient of x."""
    layers = [find_owner(key) for key in keys]
    weights = [layer.weight for layer in layers]
    d_x = gradient @ join_adjacent(weights)
    layers[0].sink.add(weights, partial(accumulate_product, gradient, x))
    return d_x


@give_gradients.register_fake
def _(gradient: Tensor, x: Tensor, keys: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    x, keys, _ = inputs
    ctx.save_for_backward(x, *keys)


def _differentiate(ctx, gradient: Tensor):
    assert ctx.needs_input_grad[0], "without a gradient of x the compiler would drop the gradients of the weights"
    x, *keys = ctx.saved_tensors
    return give_gradients(gradient, x, keys), [None] * len(keys), None


multiply_adjacent.register_autograd(_differentiate, setup_context=_save)


def multiply_compiled(
    x: Tensor, layers: Sequence[Any], biases: Sequence[Tensor | None], *, joined: bool
) -> Sequence[Tensor]:
    """Apply linear layers to x, [.., in], by operators that the compiler sees as one product each."""
    results: list[Tensor] = []
    for run in group_following(layers):
        rows = [len(layer.weight) for layer in run]
        y = multiply_adjacent(x, [layer.key for layer in run], sum(rows))
        results += [y] if joined or len(run) == 1 else y.split(rows, -1)
    if joined and biases[0] is not None:
        biases = [torch.cat([bias for bias in biases if bias is not None])]
    return [y if bias is None else y + bias for y, bias in zip(results, biases, strict=False)]


def group_following(layers: Sequence[Any]) -> list[list[Any]]:
    """Group layers whose weights are one matrix in memory and biases one vector, all trained or all frozen."""
    groups = [[layers[0]]]
    for layer in layers[1:]:
        if layer.follows:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups


# Gradient terms: functions of (accumulator, whether to overwrite it) that update it in place.


def accumulate_product(gradient: Tensor, x: Tensor, total: Tensor, fresh: bool) -> None:
    """Accumulate the weight gradient of a product: dY^T X of [.., out] and [.., in]."""
    d_y, x = gradient.flatten(0, -2), x.flatten(0, -2)
    if total.dtype == x.dtype:
        torch.mm(d_y.t(), x, out=total) if fresh else torch.addmm(total, d_y.t(), x, out=total)
    elif kernels.use_fused(total):  # bf16 products are accumulated in float32
        add_product(total, d_y, x, fresh)
    else:
        add_gradient(d_y.t() @ x, total, fresh)


def _accumulate_gathered(gradient: Tensor, x: ProductInput, total: Tensor, fresh: bool) -> None:
    accumulate_product(gradient, x.take(), total, fresh)


def _add_rows(gradient: Tensor, total: Tensor, fresh: bool) -> None:
    add_gradient(gradient.flatten(0, -2).sum(0, dtype=total.dtype), total, fresh)


def _add_looked_up(gradient: Tensor, ids: Tensor, total: Tensor, fresh: bool) -> None:
    if total.dtype != gradient.dtype or total.device.type != "cpu":  # on other devices `index_add_` adds in any order
        add_gradient(torch.ops.aten.embedding_dense_backward(gradient, ids, len(total), -1, False), total, fresh)
        return
    (total.zero_() if fresh else total).index_add_(0, ids.flatten(), gradient.flatten(0, -2))


def add_gradient(gradient: Tensor, total: Tensor, fresh: bool) -> None:
    """Accumulate a gradient computed by autograd."""
    (total.copy_ if fresh else total.add_)(gradient)
