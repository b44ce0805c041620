"""Weight gradients of any module that wait until a schedule runs them (Qi et al. 2024, "Zero Bubble", section 2).

While a module that owns a matrix runs forward, its linear products, convolutions and lookups with a trained parameter
are replaced by operators with the same result. Their backward computes the gradient of the input, and keeps what the
weight gradient is computed from: the operator's input and the gradient of its output. Gradients of biases, norms and
of parameters that other operators use are computed with the gradients of inputs; their addition alone waits.

What a module calls is seen by torch's modes of functions, so it may be a layer of torch, of transformers or of one's
own. Code that is compiled computes all of its gradients at once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from shoal.engine.parallel.weight_grad import accumulate_product, add_gradient
from shoal.engine.parallel.zero.gradients import Term
from shoal.engine.parallel.zero.zero_engine import ShardedParameters


class _WeightedOperator(Protocol):
    """An operator with a weight."""

    channels: int
    """Dim of the output along which a bias is added."""

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output."""

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input from that of the output."""

    def to_weight(self, gradient: Tensor, x: Tensor, weight: Tensor, total: Tensor, fresh: bool) -> None:
        """Add the gradient of the weight to ``total`` in place, or overwrite it if ``fresh``."""


_Call = tuple[_WeightedOperator, Tensor, nn.Parameter, Tensor | None]
"""An operator, its input, its weight and its bias."""


class LateGradients:
    """Weight gradients of a module's operators, computed after backward if the stage's parameters defer them.

    Args:
        module: its modules that own matrices are changed.
    """

    def __init__(self, module: nn.Module):
        self.parameters: ShardedParameters | None = None
        self._terms: dict[nn.Parameter, list[Term]] = defaultdict(list)
        self._nodes: list[Any] = []  # autograd keeps a hook only as long as the node it is of
        for each in module.modules():
            if any(p.dim() > 1 and p.requires_grad for p in each.parameters(recurse=False)):
                each.forward = partial(self._run, each.forward)

    def connect(self, parameters: ShardedParameters) -> None:
        """Give the gradients to these parameters from now on."""
        self.parameters = parameters
        complete = weakref.WeakMethod(self._complete)
        for parameter in parameters.places:
            self._nodes.append(get_gradient_edge(parameter).node)
            self._nodes[-1].register_prehook(lambda found, p=parameter: complete()(p, found))  # type: ignore[misc]

    def trains(self, weight: object) -> bool:
        """Return whether gradients of a weight may wait."""
        return self.parameters is not None and weight in self.parameters.places

    def waits(self) -> bool:
        """Return whether the backward that runs leaves out gradients of weights."""
        return self.parameters is not None and self.parameters.deferring

    def add(self, weight: nn.Parameter, term: Term, kept: Sequence[Tensor]) -> None:
        """Note a gradient term, which holds the tensors ``kept``."""
        self._terms[weight].append(term)

    def _complete(self, parameter: nn.Parameter, found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...] | None:
        """Handle the end of a backward for a parameter: what other operators gave it is found, or None."""
        terms = self._terms.pop(parameter, [])
        if not terms:
            return None
        if found[0] is None:
            assert self.parameters is not None
            self.parameters.add([parameter], partial(_add_all, terms))
            return None
        total = found[0].clone()
        _add_all(terms, total, fresh=False)
        return (total,)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with _Replace(self):
            return forward(*args, **kwargs)


def _add_all(terms: Sequence[Term], total: Tensor, fresh: bool) -> None:
    for i, term in enumerate(terms):
        term(total, fresh and i == 0)


class _Replace(TorchFunctionMode):
    """Replaces the operators that a module calls."""

    def __init__(self, late: LateGradients):
        self.late = late

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = READERS.get(func) if torch.is_grad_enabled() else None
        call = read(*args, **(kwargs or {})) if read else None
        if call is None or not self.late.trains(call[2]):
            return func(*args, **(kwargs or {}))
        operator, x, weight, bias = call
        if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as the operator itself would
        if (x.is_floating_point() and x.dtype != weight.dtype) or (bias is not None and bias.dtype != weight.dtype):
            return func(*args, **(kwargs or {}))
        return _Late.apply(self.late, operator, x, weight, bias)


class _Late(torch.autograd.Function):
    """An operator whose weight gradient may wait."""

    @staticmethod
    def forward(
        ctx, late: LateGradients, operator: _WeightedOperator, x: Tensor, weight: nn.Parameter, bias: Tensor | None
    ) -> Tensor:
        ctx.late, ctx.operator, ctx.weight = late, operator, weight
        ctx.save_for_backward(x, weight)
        return operator.compute(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        operator, late = ctx.operator, ctx.late
        _, _, x_wanted, _, bias_wanted = ctx.needs_input_grad
        d_x = operator.to_input(gradient, x, weight) if x_wanted else None
        d_weight = None
        term = partial(operator.to_weight, gradient, x.detach(), weight.detach())
        if late.waits():
            late.add(ctx.weight, term, (x, gradient))
        else:
            d_weight = torch.empty_like(weight)
            term(d_weight, True)
        d_bias = gradient.transpose(0, operator.channels).flatten(1).sum(1) if bias_wanted else None
        return None, None, d_x, d_weight, d_bias


# ---- operators -------------------------------------------------------------------------------------------------------


class _Product:
    """A linear layer: [.., in], [out, in] -> [.., out]; transposed, the weight is [in, out]."""

    channels = -1

    def __init__(self, *, transposed: bool):
        self.transposed = transposed

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.transposed:
            return F.linear(x, weight, bias)
        assert bias is not None, "torch.addmm adds one"
        return torch.addmm(bias, x, weight)

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gradient @ (weight.t() if self.transposed else weight)

    def to_weight(self, gradient: Tensor, x: Tensor, weight: Tensor, total: Tensor, fresh: bool) -> None:
        pair = (x, gradient) if self.transposed else (gradient, x)
        accumulate_product(*pair, total, fresh)


@dataclass(frozen=True)
class _Lookup:
    """A table of embeddings: ids [..], [ids, h] -> [.., h]. The row of ``padding``, if any, gets no gradient."""

    padding: int | None
    channels = -1

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.embedding(x, weight, self.padding)

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("ids have no gradient")

    def to_weight(self, gradient: Tensor, x: Tensor, weight: Tensor, total: Tensor, fresh: bool) -> None:
        padding = -1 if self.padding is None else self.padding % len(weight)
        add_gradient(torch.ops.aten.embedding_dense_backward(gradient, x, len(weight), padding, False), total, fresh)


@dataclass(frozen=True)
class _Convolution:
    """A convolution: [n, in, ..] -> [n, out, ..], with the arguments of ``torch.convolution`` after the bias."""

    arguments: tuple[Any, ...]
    channels = 1

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self.arguments)

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._differentiate(gradient, x, weight, 0)

    def to_weight(self, gradient: Tensor, x: Tensor, weight: Tensor, total: Tensor, fresh: bool) -> None:
        add_gradient(self._differentiate(gradient, x, weight, 1), total, fresh)

    def _differentiate(self, gradient: Tensor, x: Tensor, weight: Tensor, i: int) -> Tensor:
        wanted = [i == 0, i == 1, False]
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *self.arguments, wanted)[i]


def _read_linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> _Call | None:
    return (_Product(transposed=False), input, weight, bias) if input.dim() > 1 else None


def _read_addmm(input: Tensor, mat1: Tensor, mat2: Any, *, beta: float = 1, alpha: float = 1) -> _Call | None:
    """Read the product of transformers' Conv1D."""
    return (_Product(transposed=True), mat1, mat2, input) if beta == alpha == 1 and input.dim() == 1 else None


def _read_embedding(
    input: Tensor, weight: Any, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> _Call | None:
    changed = max_norm is not None or scale_grad_by_freq or sparse
    return None if changed else (_Lookup(padding_idx), input, weight, None)


def _read_convolution(
    input: Tensor, weight: Any, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, *, output_padding: Any = 0, transposed: bool = False,
) -> _Call | None:  # fmt: skip
    dims = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != dims + 2:  # "same" may pad the ends differently
        return None
    stride, padding, dilation, output_padding = (
        [n] * dims if isinstance(n, int) else list(n) * (dims // len(n))
        for n in (stride, padding, dilation, output_padding)
    )
    return _Convolution((stride, padding, dilation, transposed, output_padding, groups)), input, weight, bias


def _read_transposed(
    input: Tensor, weight: Any, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> _Call | None:  # fmt: skip
    return _read_convolution(
        input, weight, bias, stride, padding, dilation, groups, output_padding=output_padding, transposed=True
    )


READERS: dict[Any, Callable[..., _Call | None]] = {
    F.linear: _read_linear, torch.addmm: _read_addmm, F.embedding: _read_embedding,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _read_convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _read_transposed),
}
"""Functions of torch that are replaced, and what reads their arguments; None of a call that is left as it is."""
