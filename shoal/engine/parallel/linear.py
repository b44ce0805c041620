"""Replacements of torch's linear layers, unsplit or split over tensor-parallel ranks.

    `Linear`                    unsplit; gradients go directly to their buffers (`GradSink`)
    `ColumnLinear`              rank r holds the r-th part of the outputs (for the head, of the vocabulary); gathers its
                                input
    `KVColumnLinear`            the same for keys and values, which may have fewer heads than ranks
    `HeadsLinear`               the same for the latents of attention, which `GatheredLatents` gathers together
    `RowLinear`                 rank r holds the r-th part of the inputs; sums its output over the ranks

Column then row (Shoeybi et al. 2019, "Megatron-LM", section 3): a block's first matrices are split by output, its last
by input, which takes one collective per direction on entry and one on exit. With sequence parallelism (Korthikanti et
al. 2022, section 4.2.2) activations between blocks are split along the sequence: entry is an all-gather, exit a
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import copy_to, gather_from, reduce_from, scatter_to
from shoal.engine.compiler import untraced
from shoal.engine.kernels.swiglu import swiglu
from shoal.engine.parallel.float8.encoding import Encoded
from shoal.engine.parallel.float8.product import Float8Product
from shoal.engine.parallel.overlap import (
    SEQUENCE,
    ChunkedEntry,
    ChunkedExit,
    GatheredEntry,
    RingEntry,
    RingExit,
)
from shoal.engine.parallel.placement import ParamPlacement, keep_box
from shoal.engine.parallel.symmetric import SymmetricEntry, SymmetricExit
from shoal.engine.parallel.weight_grad import (
    NO_COMM,
    GradSink,
    LinearFunction,
    NoComm,
    group_following,
    multiply_compiled,
)
from shoal.spec.catalog import ModelShape


@dataclass(frozen=True)
class TensorParallel:
    """This rank's position among the ranks that split a layer.

    Attributes:
        y: the ranks that enter and leave a block together: all of them, or on a grid those along y.
        sink: receives the gradients of split parameters; flushed in backward during the collective of the entry.
        overlap: whether products and adjacent collectives are chunked and overlapped.
        symmetric: whether, with sequence parallelism, they then use symmetric memory.
        again: whether backward then gathers the inputs of blocks again; a recomputed layer has just gathered them.
    """

    group: Group
    rank: int
    size: int
    sequence_parallel: bool
    shape: ModelShape
    sink: GradSink
    y: Group
    overlap: bool = False
    symmetric: bool = False
    again: bool = True

    @untraced  # it would compile collectives again whenever their count of bytes changes
    def gather_input(self, x: Tensor) -> Tensor:
        """Enter a block, whose ranks need all of x: [b, s, h] (or [b, s/tp, h]) -> [b, s, h]."""
        if self.sequence_parallel:
            return gather_from(x, self.y, SEQUENCE, self.sink.flush)
        return copy_to(x, self.y, self.sink.flush)

    @untraced
    def reduce_output(self, x: Tensor) -> Tensor:
        """Leave a block by summing the partial outputs: [b, s, h] -> [b, s, h] or [b, s/tp, h]."""
        return scatter_to(x, self.y, SEQUENCE) if self.sequence_parallel else reduce_from(x, self.y)

    gather_hidden = gather_input  # this rank's part of the hidden state -> [b, s, h]; on a grid, h is split too
    reduce_hidden = reduce_output  # and back

    def multiply(
        self, x: Tensor, layers: Sequence[Linear], *, tokenwise: bool = False, biased: bool = True, joined: bool = False
    ) -> Sequence[Tensor]:
        """Compute the products at the start of a block: [b, s, h] (or [b, s/tp, h]) -> [b, s, out/tp] of each layer.

        With sequence parallelism backward may gather x again, or its codes (`Float8Product`).
        """
        if self.overlap or (self.sequence_parallel and all(layer.product is None for layer in layers)):
            return self._multiply_entering(x, layers, tokenwise, biased, joined)
        return multiply(self.gather_input(x), layers, biased=biased, joined=joined)

    @untraced
    def _multiply_entering(
        self, x: Tensor, layers: Sequence[Linear], tokenwise: bool, biased: bool, joined: bool
    ) -> Sequence[Tensor]:
        return multiply(x, layers, self.entry(tokenwise), biased=biased, joined=joined)

    def entry(self, tokenwise: bool) -> NoComm:
        """Return `gather_input` as a part of the products after it; ``tokenwise`` if token order does not matter."""
        if not self.sequence_parallel:
            return ChunkedEntry(self.group)
        if not self.overlap:
            return GatheredEntry(self.y, again=self.again)
        return (SymmetricEntry if self.symmetric else RingEntry)(self.group, self.again, tokenwise)

    def exit(self, tokenwise: bool) -> NoComm:
        """Return `reduce_output` fused with the product before it."""
        if not self.sequence_parallel:
            return ChunkedExit(self.group)
        return (SymmetricExit if self.symmetric else RingExit)(self.group, tokenwise)


class EncodedInput(NamedTuple):
    """Input of the products that read its codes.

    Attributes:
        x: tensor of its shape, for autograd, without its values.
    """

    x: Tensor
    encoded: Encoded


# ---- linear layers ---------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """Linear layer, x W^T + b, with the parameters of the layer that it replaces.

    Attributes:
        product: 8-bit computation of x W^T, of this layer or of several that are always applied together.
        follows: whether weight and bias are one in memory with the ones of the layer before this one in the model.
        key: by which operators find this layer.
    """

    weight: nn.Parameter
    at: TensorParallel | None = None
    product: Float8Product | None = None
    follows = False
    key: Tensor

    def __init__(self, unsplit: nn.Linear, sink: GradSink):
        super(nn.Linear, self).__init__()
        self.in_features, self.out_features, self.sink = unsplit.in_features, unsplit.out_features, sink
        self.weight = unsplit.weight  # type: ignore[assignment]  # declared as any tensor
        self.register_parameter("bias", unsplit.bias)

    def forward(self, x: Tensor | EncodedInput, y: Tensor | None = None) -> Tensor:
        """Apply the layer: [.., in] -> [.., out]; ``y`` is the result if `together` computed it already."""
        return self.results(x, (self,))[0] if y is None else y

    def together(self, x: Tensor | EncodedInput, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Apply several layers to one input. Each layer is still called, so that its hooks run."""
        results = self.results(x, layers)
        return tuple(layer(x, y) for layer, y in zip(layers, results, strict=True))

    def joined(self, x: Any, layers: Sequence[Linear]) -> Tensor | None:
        """Apply several layers to one input as one product: [.., in] -> [.., sum of out].

        None if their weights are not one matrix, or if something needs each result: a hook, or a bias after a product.
        """
        if any(layer._forward_hooks or (layer.product and layer.bias is not None) for layer in layers):
            return None
        if any(layer.product is not self.product for layer in layers):
            return None
        if self.product is None and len(group_following(layers)) > 1:
            return None
        return self.results(x, layers, joined=True)[0]

    def normalise(
        self, norm: nn.RMSNorm, x: Tensor, update: Tensor | None, layers: Sequence[Linear], eps: float
    ) -> tuple[Tensor, EncodedInput] | None:
        """Return x + update (x itself without one), and its RMSNorm as input of these layers: [.., h] each.

        None if the layers' products do not take it from one pass, or if something has to see it.
        """
        if self.product is None or self.at is not None or _are_watched(norm, *layers):
            return None
        if any(layer.product is not self.product for layer in layers):
            return None
        found = self.product.normalise(x, update, norm.weight, eps)
        if found is None:
            return None
        total, y, encoded = found
        return x if update is None else total, EncodedInput(y, encoded)

    def activate(
        self, x: Tensor | EncodedInput, layers: Sequence[Linear], following: Linear
    ) -> Tensor | EncodedInput | None:
        """Apply gate and up to one input, and SwiGLU: [.., in] -> [.., out] as an input of the layer ``following``.

        None if their products are not in one format, or if something has to see a result.
        """
        product, after = self.product, following.product
        if product is None or after is None or _are_watched(*layers, following):
            return None
        if any(layer.product is not product for layer in layers):
            return None
        if not isinstance(x, EncodedInput):
            x = self.enter(x)
            x = EncodedInput(x, product.encode_input(x))
        found = product.activate(*x, after)
        return swiglu(product(*x)) if found is None else EncodedInput(*found)

    def enter(self, x: Tensor) -> Tensor:
        """Return all of an input, of which a rank may have a part."""
        return x

    def results(self, x: Any, layers: Sequence[Linear], *, joined: bool = False) -> Sequence[Tensor]:
        """Compute the outputs of several layers of one type for one input, as one tensor if ``joined``.

        Args:
            x: [.., in], or where layers have products in 8 bits perhaps an `EncodedInput`.
        """
        return multiply(x, layers, joined=joined)

    def extra_repr(self) -> str:
        """Return ``in_features=64, out_features=128/4, bias=False, tp=4`` where a quarter of the outputs is local."""
        out_local, in_local = self.weight.shape
        columns, rows = describe_part(self.in_features, in_local), describe_part(self.out_features, out_local)
        ranks = f", tp={self.at.size}" if self.at else ""
        return f"in_features={columns}, out_features={rows}, bias={self.bias is not None}{ranks}"


def describe_part(n: int, local: int) -> str:
    """Return ``128/4`` for size 128 with 32 local."""
    return str(n) if n <= local else f"{n}/{-(-n // local)}"


def _are_watched(*modules: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def multiply(
    x: Tensor | EncodedInput, layers: Sequence[Linear], comm: NoComm = NO_COMM, *, biased: bool = True,
    joined: bool = False,
) -> Sequence[Tensor]:  # fmt: skip
    """Compute x W^T (+ b) for each layer: [.., in] -> [.., out]; one autograd function if no layer sets ``product``.

    If ``joined``, the products with adjacent weights are one tensor [.., sum of out].
    """
    biases = [layer.bias if biased else None for layer in layers]
    first = next((layer.product for layer in layers if layer.product is not None), None)
    if first is not None:
        results: list[Tensor] = []
        x, encoded = x if isinstance(x, EncodedInput) else (x, first.encode_input(x))
        rest = [*layers]
        while rest:
            product = rest[0].product
            count = len(product.weights) if product is not None else 1
            run, rest = rest[:count], rest[count:]
            if product is None:
                results += multiply(x, run, comm, biased=biased)
                continue
            y = product(x, encoded)
            if joined or count == 1:
                parts = [y]
            else:  # copies: attention, which keeps the values for backward, would keep all of them
                parts = [part.contiguous() for part in y.split([len(layer.weight) for layer in run], -1)]
            for part, layer in zip(parts, run, strict=False):
                results.append(part if layer.bias is None or not biased else part + layer.bias)
        return results
    assert isinstance(x, Tensor), "codes are of layers with products"
    sink = layers[0].sink
    if sink.parameters is None and comm is NO_COMM:
        return [F.linear(x, layer.weight, bias) for layer, bias in zip(layers, biases, strict=True)]
    if torch.compiler.is_compiling():
        return multiply_compiled(x, layers, biases, joined=joined)
    waits = comm is NO_COMM and layers[0].at is not None  # for its region's collective; an unsplit layer is in none
    weights = [layer.weight for layer in layers]
    return LinearFunction.apply(sink, comm, joined, waits, len(layers), x, *weights, *biases)


class ColumnLinear(Linear):
    """Linear layer split by output: rank r holds the r-th part of the rows of weight and bias."""

    at: TensorParallel

    def __init__(self, unsplit: nn.Linear, name: str, at: TensorParallel):
        super().__init__(unsplit, at.sink)
        self.at, self.tokenwise = at, ".mlp." in name  # a feed-forward block processes each token independently
        self.placements = [keep_rows(self, name, part, at, self.parts()) for part, _ in unsplit.named_parameters()]

    def parts(self) -> int:
        """Return the number of parts of the output."""
        return self.at.size

    def results(self, x: Tensor, layers: Sequence[Linear], *, joined: bool = False) -> Sequence[Tensor]:
        """Compute outputs [b, s, out/tp] after one collective that gathers the shared input."""
        return self.at.multiply(x, layers, tokenwise=self.tokenwise, joined=joined)

    def enter(self, x: Tensor) -> Tensor:
        return self.at.gather_hidden(x)


class KVColumnLinear(ColumnLinear):
    """`ColumnLinear` for keys and values; if tp exceeds their heads, neighbouring ranks hold the same head."""

    def parts(self) -> int:
        return min(self.at.size, self.at.shape.kv_heads)


class GatheredLatents(nn.Module):
    """Entry of latent attention: one collective for the latents of all tokens, and for their gradients.

    The layers that compute latents are not split. With sequence parallelism each rank has latents of its tokens.
    """

    def __init__(self, unsplit: nn.Module, name: str, at: TensorParallel):
        super().__init__()
        self.at, self.placements = at, list[ParamPlacement]()

    def forward(self, *latents: Tensor) -> tuple[Tensor, ...]:
        """Gather latents: [b, s, width] or [b, s/tp, width] -> [b, s, width] of each."""
        widths = [latent.shape[-1] for latent in latents]
        return self.at.gather_input(torch.cat(latents, -1)).split(widths, -1)


class HeadsLinear(ColumnLinear):
    """`ColumnLinear` of latents, which its rank has in full."""

    def results(self, x: Tensor, layers: Sequence[Linear], *, joined: bool = False) -> Sequence[Tensor]:
        return multiply(x, layers, joined=joined)

    def enter(self, x: Tensor) -> Tensor:
        return x


class RowLinear(Linear):
    """Linear layer split by input: rank r holds the r-th part of the columns; the bias is added after the sum."""

    at: TensorParallel

    def __init__(self, unsplit: nn.Linear, name: str, at: TensorParallel):
        super().__init__(unsplit, at.sink)
        self.at, self.tokenwise = at, ".mlp." in name
        part = self.in_features // at.size
        box = Box((0, at.rank * part), (self.out_features, part))
        self.placements = [keep_box(self, name, "weight", box)]

    def results(self, x: Tensor | EncodedInput, layers: Sequence[Linear], *, joined: bool = False) -> Sequence[Tensor]:
        """Compute the output: [b, s, in/tp] -> [b, s, out] or [b, s/tp, out]."""
        if self.at.overlap:
            (y,) = multiply(x, layers, self.at.exit(self.tokenwise), biased=False)
        else:
            (y,) = multiply(x, layers, biased=False)
            y = self.at.reduce_output(y)
        return (y if self.bias is None else y + self.bias,)


class SplitNorm(nn.Module):
    """RMSNorm or LayerNorm of a dimension that ranks hold parts of: its sums, one or two per token, are reduced.

    Args:
        width: elements of the dimension on all of them.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, unsplit: nn.RMSNorm | nn.LayerNorm, group: Group, width: int, eps: float):
        super().__init__()
        self.group, self.width, self.eps, self.weight = group, width, eps, unsplit.weight
        self.centred = isinstance(unsplit, nn.LayerNorm)
        self.register_parameter("bias", getattr(unsplit, "bias", None))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's part of the last dimension."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if self.centred:
            wide = wide - self._mean(wide)
        y = (wide * (self._mean(wide.square()) + self.eps).rsqrt()).to(x.dtype) * self.weight
        return y if self.bias is None else y + self.bias

    @untraced
    def _mean(self, x: Tensor) -> Tensor:
        """Average over all ranks, every one of whose results depends on the total."""
        return copy_to(reduce_from(x.sum(-1, keepdim=True), self.group), self.group) / self.width


class JointNorm(SplitNorm):
    """RMSNorm over the heads of all ranks: a rank holds the weights of its own heads, [b, s, a d/tp]."""

    def __init__(self, unsplit: nn.RMSNorm, name: str, at: TensorParallel):
        parts = min(at.size, at.shape.kv_heads) if name.endswith("k_norm") else at.size
        super().__init__(unsplit, at.group, at.size // parts * unsplit.weight.numel(), at.shape.norm_eps)
        self.placements = [keep_rows(self, name, "weight", at, parts)]


# ---- parameters ------------------------------------------------------------------------------------------------

BY_TOKEN_ID = ("embed.token", "head")
"""Modules whose weight has a row for each token id."""


def keep_rows(module: nn.Module, name: str, part: str, at: TensorParallel, parts: int) -> ParamPlacement:
    """Keep one of ``parts`` equal row ranges of a parameter; the last ranges may be short and are padded."""
    total, *rest = getattr(module, part).shape
    copies = at.size // parts
    rows = at.shape.vocabulary_rows(parts) if name in BY_TOKEN_ID else -(-total // parts)
    start = min(at.rank // copies * rows, total)
    box = Box((start, *(0 for _ in rest)), (min(rows, total - start), *rest))
    return keep_box(
        module, name, part, box, (rows, *rest),
        sum_over=(f"tp/{copies}",) if copies > 1 else (), copies=copies, primary=at.rank % copies == 0,
    )
