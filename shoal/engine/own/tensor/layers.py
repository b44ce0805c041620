"""Layers that are split over ranks, and what the ranks exchange around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import (
    all_gather,
    all_reduce,
    copy_to,
    reduce_from,
    reduce_scatter,
    scatter_to,
    with_conjugate,
)
from shoal.spec.layout import Layout

TOKENS = -2
"""Dim of the tokens in hidden states [b, s, h]."""


@dataclass
class SplitRanks:
    """The ranks that split a module.

    Attributes:
        group: None to try a table without the other ranks: shapes are right, values are not.
        shared: the last input of a layer split by output, its version, and what the layer computed with. Layers with
            one input, such as queries, keys and values, sum its gradient once.
        sequence: whether they split the tokens between split layers too (`shoal.engine.own.tensor.sequence`).
        experts, expert_rank, expert_ranks: those that hold different experts (`shoal.engine.own.tensor.experts`).
        gathered: the last tensor of all tokens for layers split by output, and this rank's part of it.
        again: the last part that backward gathered, and the tensor of all tokens.
    """

    group: Group | None
    rank: int
    size: int
    shared: tuple[Tensor, int, bool, Tensor] | None = None
    sequence: bool = False
    gathered: tuple[Tensor, Tensor] | None = None
    again: tuple[Tensor, Tensor] | None = None
    experts: Group | None = None
    expert_rank: int = 0
    expert_ranks: int = 1

    @staticmethod
    def alone(layout: Layout) -> SplitRanks | None:
        """Return the first rank of a layout, without the others; None if the layout splits no layers."""
        if layout.tp == layout.ep == 1:
            return None
        return SplitRanks(None, 0, layout.tp, sequence=layout.sequence_parallel, expert_ranks=layout.ep)

    @staticmethod
    def among(mesh: Mesh) -> SplitRanks | None:
        """Return this rank and the others of a mesh; None if its layout splits no layers."""
        layout, found = mesh.layout, SplitRanks.alone(mesh.layout)
        if found is None:
            return None
        if layout.ep > 1:
            for axis in ("ep", "edp_shard", "edp_replicate", "stage"):  # on each rank in this order
                mesh.group(axis)
            found.experts, found.expert_rank = mesh.group("ep"), mesh.index("ep")
        found.group, found.rank = mesh.group("tp"), mesh.index("tp")
        return found

    def describe(self) -> str:
        """Return ``parallel.tp = 2``, for messages."""
        ep = f"ep = {self.expert_ranks}" if self.expert_ranks > 1 else ""
        return "parallel." + " and ".join(filter(None, (f"tp = {self.size}" if self.size > 1 else "", ep)))

    def forget(self) -> None:
        """Forget the tensors of a forward, whose graph ends."""
        self.shared = self.gathered = None

    def enter(self, x: Tensor) -> Tensor:
        """Return x for a layer that is split by output; backward sums the gradients of all ranks."""
        same = self.shared
        if same is None or same[0] is not x or same[1:3] != (x._version, torch.is_grad_enabled()):
            part = self.find_part(x)
            entered = copy_to(x, self.group) if part is None else self._enter_gathered(x, part)
            self.shared = same = x, x._version, torch.is_grad_enabled(), entered
        return same[3]

    def find_part(self, x: Tensor) -> Tensor | None:
        """Return this rank's part of a tensor that `gather_tokens` has returned; None of others."""
        return self.gathered[1] if self.gathered is not None and self.gathered[0] is x else None

    def _enter_gathered(self, x: Tensor, part: Tensor) -> Tensor:
        """Return x as a function of this rank's part alone; backward sums the gradients of all ranks for the part."""

        def scatter(gradient: Tensor, group: Group) -> Tensor:
            self.again = None
            return reduce_scatter(gradient, group, gradient.dim() + TOKENS)

        return with_conjugate(part, self.group, lambda part, _: x.detach(), scatter) if self.group else x

    def gather_tokens(self, x: Tensor, *, entered: bool = False) -> Tensor:
        """Gather the tokens of all ranks: [b, s/tp, h] -> [b, s, h]; backward keeps this rank's part.

        Args:
            entered: whether layers split by output may take the result as their input (`enter`).
        """
        full = self.join(x, TOKENS)
        if entered:
            self.gathered = full, x
        return full

    def gather_again(self, part: Tensor) -> Tensor:
        """Gather in backward what a layer split by output had as its input; once for layers with one input."""
        kept = self.again
        if kept is None or kept[0].untyped_storage()._cdata != part.untyped_storage()._cdata:
            full = self._gather(part, self.group, TOKENS) if self.group else torch.cat([part] * self.size, TOKENS)
            self.again = kept = part, full
        return kept[1]

    def split_tokens(self, x: Tensor) -> Tensor:
        """Keep this rank's tokens: [b, s, h] -> [b, s/tp, h]; backward gathers the gradient of all.

        Raises:
            UsageError: the number of tokens is no multiple of the ranks.
        """
        self._check_tokens(x)
        return self.split(x, TOKENS)

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """Sum x over the ranks and keep this rank's tokens: [b, s, h] -> [b, s/tp, h]."""
        self._check_tokens(x)
        return scatter_to(x, self.group, x.dim() + TOKENS) if self.group else self._part(x, None, TOKENS)

    def _check_tokens(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[TOKENS] % self.size:
            raise UsageError(f"parallel.sequence_parallel splits {list(x.shape)} along its tokens, the last dim but one"
                             f", over parallel.tp = {self.size}.\n  Give samples of a multiple of that many tokens, or "
                             "leave sequence_parallel out.")

    def enter_each(self, x: Any) -> Any:
        """Return x, whose gradient other operators may read, for a region that is split; others than floats as is."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return with_conjugate(x, self.group, lambda x, _: x.view_as(x), lambda g, group: all_reduce(g.clone(), group))

    def enter_full(self, x: Any, part: Tensor) -> Any:
        """Return another input of a module that gathers tokens, given its part of them.

        All ranks get its full gradient, and the layer around sums gradients, so each passes on its share. An input of
        the rank's tokens alone has a gradient of its own.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[:-1] == part.shape[:-1]:
            return x
        return with_conjugate(x, self.group, lambda x, _: x.view_as(x), lambda g, _: g / self.size)

    def leave(self, x: Tensor) -> Tensor:
        """Sum a region's output, which other operators may read."""
        return with_conjugate(x, self.group, lambda x, group: all_reduce(x.clone(), group), lambda g, _: g)

    def join(self, x: Tensor, dim: int = -1) -> Tensor:
        """Gather the parts of all ranks along a dim."""
        if self.group is None:
            return torch.cat([x] * self.size, dim)
        return with_conjugate(x, self.group, self._gather, self._part, dim)

    def split(self, x: Tensor, dim: int = -1) -> Tensor:
        """Keep this rank's part of a dim."""
        if self.group is None:
            return self._part(x, None, dim)
        return with_conjugate(x, self.group, self._part, self._gather, dim)

    def _gather(self, x: Tensor, group: Group, dim: int) -> Tensor:
        return all_gather(x.contiguous(), group, x.dim() + dim)

    def _part(self, x: Tensor, _: Group | None, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)  # frees the rest


class SplitLinear(nn.Linear):
    """Linear layer that holds a part of its weight."""

    def __init__(self, unsplit: nn.Linear, ranks: SplitRanks, full: bool):
        super(nn.Linear, self).__init__()
        self.in_features, self.out_features = unsplit.in_features, unsplit.out_features
        self.weight, self.ranks, self.full = unsplit.weight, ranks, full
        self.register_parameter("bias", unsplit.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tp={self.ranks.size}"


class OutputSplitLinear(SplitLinear):
    """Linear layer split by output, which is gathered if ``full``."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [.., in] -> [.., out/tp], or [.., out]."""
        part, entered = self.ranks.find_part(x), self.ranks.enter(x)
        if part is None:
            y = F.linear(entered, self.weight, self.bias)
        else:
            y = _GatheredProduct.apply(entered, part, self.weight, self.bias, self.ranks)
        return self.ranks.join(y)[..., : self.out_features] if self.full else y


class _GatheredProduct(torch.autograd.Function):
    """Product with an input that the ranks hold in parts: backward gathers it again, so that only a part is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, ranks: SplitRanks) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.ranks, ctx.dtypes = ranks, (x.dtype, None if bias is None else bias.dtype)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        part, weight = ctx.saved_tensors
        dtype, bias = ctx.dtypes
        x, rows = ctx.ranks.gather_again(part).to(gradient.dtype), gradient.flatten(0, -2)
        of_weight = rows.t() @ x.flatten(0, -2)
        of_x = gradient @ weight.to(gradient.dtype)
        of_bias = None if bias is None else rows.sum(0).to(bias)
        return of_x.to(dtype), None, of_weight.to(weight.dtype), of_bias, None


class InputSplitLinear(SplitLinear):
    """Linear layer split by input, which is not split yet if ``full``; the bias is added after the sum.

    Attributes:
        scatters: whether a rank gets its tokens of the sum alone.
    """

    scatters = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [.., in/tp], or [.., in] -> [.., out], or [.., s/tp, out]."""
        y = F.linear(self.ranks.split(x) if self.full else x, self.weight)
        y = self.ranks.scatter_tokens(y) if self.scatters else reduce_from(y, self.ranks.group)
        return y if self.bias is None else y + self.bias


class SplitEmbedding(nn.Embedding):
    """Embedding split by id: a rank looks up its own, and the ranks sum."""

    def __init__(self, unsplit: nn.Embedding, ranks: SplitRanks):
        super(nn.Embedding, self).__init__()
        for name in ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq",
                     "sparse", "weight"):  # fmt: skip
            setattr(self, name, getattr(unsplit, name))
        self.ranks = ranks

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids: [..] -> [.., h]."""
        rows = len(self.weight)
        first = self.ranks.rank * rows
        foreign = (ids < first) | (ids >= first + rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        found = F.embedding((ids - first).masked_fill(foreign, 0), self.weight,
                            padding if padding is not None and 0 <= padding < rows else None)
        return reduce_from(found.masked_fill(foreign.unsqueeze(-1), 0), self.ranks.group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tp={self.ranks.size}"
