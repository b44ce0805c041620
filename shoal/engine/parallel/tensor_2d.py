"""Tensor parallelism in two dimensions: matrices are split by input and by output at once, over a grid of ranks.

In the notation of `shoal explain` the tensor-parallel ranks are a grid x (``tp_x``, neighbours) by y (tp / tp_x), the
hidden state lies over x between all layers, and a block is two products (Pope et al. 2022, "Efficiently scaling
transformer inference", section 3.2.2, "2D weight-stationary"):

    In[B, Hx] * Win[Hx, Fy] -> [B, Fy] {Ux} -> [B, Fyx]    reduce-scatter along x
    [B, Fyx] -> [B, Fy] * Wout[Fy, Hx] -> [B, Hx] {Uy}     all-gather along x, sum along y

Weights stay where they are. What goes along y is 1/x of what one dimension sends, what goes along x is 1/y of what is
inside the blocks: with x and y in proportion to sqrt(tp) both fall as 1/sqrt(tp), where the sums of one dimension stay
as they are. Between the two collectives along x a rank has its own heads or hidden units, which are the ones that it
has in one dimension, so that attention and the non-linearities know nothing of the grid. Norms sum one or two numbers a
token along x. Token ids are split over all ranks, as in one dimension: the hidden state is made whole for the head.

With sequence parallelism the hidden state is split along both axes: by h over x, by tokens over y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import copy_to, gather_from, reduce_from, scatter_to
from shoal.engine.models.norm import RMSNorm
from shoal.engine.models.projections import JointProjections
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.overlap import SEQUENCE
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.replace import replace_forward
from shoal.engine.parallel.tensor import (
    ParallelStyle,
    TensorParallel,
    VocabularyEmbedding,
    VocabularyHead,
    VocabularyLoss,
    empty_like,
    keep_rows,
    split_modules,
)
from shoal.engine.parallel.weight_grad import Postponed, look_up, product, project
from shoal.spec.catalog import ModelShape

HIDDEN = 2  # dim of [b, s, h] that the grid splits


@dataclass(frozen=True)
class Grid(TensorParallel):
    """This rank's place in the grid.

    Attributes:
        x, y: the ranks along each axis.
    """

    x: Group = field(kw_only=True)
    y: Group = field(kw_only=True)

    def enter(self, x: Tensor) -> Tensor:
        """Into a region, along y: [b, s, h/x] (or [b, s/y, h/x]) -> [b, s, h/x]."""
        if self.sequence_parallel:
            return gather_from(x, self.y, SEQUENCE, self.postponed.make)
        return copy_to(x, self.y, self.postponed.make)

    def leave(self, x: Tensor) -> Tensor:
        """Out of it: sum along y. [b, s, h/x] -> [b, s, h/x] or [b, s/y, h/x]."""
        return scatter_to(x, self.y, SEQUENCE) if self.sequence_parallel else reduce_from(x, self.y)

    def enter_whole(self, x: Tensor) -> Tensor:
        return gather_from(self.enter(x), self.x, HIDDEN)

    def leave_whole(self, x: Tensor) -> Tensor:
        return self.leave(scatter_to(x, self.x, HIDDEN))

    def total(self, sums: Tensor) -> Tensor:
        """Sums over this rank's part of h -> over all of it, on which every rank's results depend."""
        return copy_to(reduce_from(sums, self.x), self.x)

    def own_units(self, partial_sums: Sequence[Tensor], users: Sequence[int]) -> list[Tensor]:
        """Out of the first products of a block: from partial sums [b, s, f/y] to this rank's units of the totals, by
        one collective.

        Args:
            users: of each, how many neighbours use the same units: [b, s, users f/(x y)] is what becomes of it.
        """
        by_rank = []
        for sums, n in zip(partial_sums, users, strict=True):
            units = sums.unflatten(HIDDEN, (self.x.size() // n, -1))  # [b, s, x/users, ..]
            by_rank.append(units.repeat_interleave(n, HIDDEN).movedim(HIDDEN, 0))
        widths = [units.shape[-1] for units in by_rank]
        (totals,) = scatter_to(torch.cat(by_rank, -1), self.x, 0)
        # Copies, so that what is kept for backward keeps nothing else alive.
        return [total.contiguous() for total in totals.split(widths, -1)]


# ---- the kinds of split ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region2D:
    """A module entered along y, whose first products are summed along x.

    Attributes:
        heads: the projections that make keys and values, of which there may be fewer heads than ranks.
    """

    heads: tuple[str, ...] = ()

    def apply(self, module: nn.Module, name: str, at: Grid) -> list[ParamPlacement]:
        assert isinstance(module, JointProjections)
        share = min(at.x.size(), max(1, at.size // at.shape.kv_heads))
        users = [share if projection in self.heads else 1 for projection in module.projections]
        module.project = lambda x: _project(module, x, users, at)
        return []


def _project(module: JointProjections, x: Tensor, users: Sequence[int], at: Grid) -> tuple[Tensor, ...]:
    biases = [getattr(module, name).bias for name in module.projections]
    results = at.own_units(project(module, at.enter(x), biased=False), users)
    return tuple(y if bias is None else y + bias for y, bias in zip(results, biases, strict=True))


@dataclass(frozen=True)
class Column2D:
    """Split by output over y and by input over x; the bias by output over all.

    Attributes:
        heads: whether it makes keys and values, of which neighbours hold the same where there are fewer than ranks.
    """

    heads: bool = False

    def apply(self, module: nn.Module, name: str, at: Grid) -> list[ParamPlacement]:
        assert isinstance(module, nn.Linear)
        y, whole = at.y.size(), tuple(module.weight.shape)
        parts = min(y, at.shape.kv_heads) if self.heads else y
        copies, rows, columns = y // parts, whole[0] // parts, whole[1] // at.x.size()
        box = Box((at.y.rank() // copies * rows, at.x.rank() * columns), (rows, columns))
        module.weight = empty_like(module.weight, box.shape)
        weight = ParamPlacement(
            f"{name}.weight", whole, box, box.shape,
            sum_over=(f"tp_y/{copies}",) if copies > 1 else (), copies=copies, primary=at.y.rank() % copies == 0,
        )
        if module.bias is None:
            return [weight]
        parts = min(at.size, at.shape.kv_heads) if self.heads else at.size
        return [weight, keep_rows(module, name, "bias", at, parts)]


class Row2D:
    """Split by input over y and by output over x, as the bias is, which is added once, after the sum."""

    def apply(self, module: nn.Module, name: str, at: Grid) -> list[ParamPlacement]:
        assert isinstance(module, nn.Linear)
        whole = tuple(module.weight.shape)
        rows, columns = whole[0] // at.x.size(), whole[1] // at.y.size()
        box = Box((at.x.rank() * rows, at.y.rank() * columns), (rows, columns))
        module.weight = empty_like(module.weight, box.shape)
        replace_forward(module, lambda x: _row_forward(module, x, at))
        weight = ParamPlacement(f"{name}.weight", whole, box, box.shape)
        return [weight] if module.bias is None else [weight, _part_of_hidden(module, name, "bias", at)]


def _row_forward(module: nn.Linear, x: Tensor, at: Grid) -> Tensor:
    y = at.leave(product(module, gather_from(x, at.x, HIDDEN)))
    return y if module.bias is None else y + module.bias


class Norm:
    """Of a hidden state of which each rank has a part: its sums are completed along x."""

    def apply(self, module: nn.Module, name: str, at: Grid) -> list[ParamPlacement]:
        if isinstance(module, RMSNorm):
            replace_forward(module, lambda x: _rms_norm(module, x, at))
        else:
            assert isinstance(module, nn.LayerNorm)
            replace_forward(module, lambda x: _layer_norm(module, x, at))
        return [_part_of_hidden(module, name, part, at) for part, _ in list(module.named_parameters())]


def _rms_norm(module: RMSNorm, x: Tensor, at: Grid) -> Tensor:
    wide = _wide(x)  # [b, s, h/x], or [b, s/y, h/x]
    mean = at.total(wide.square().sum(-1, keepdim=True)) / at.shape.hidden
    return (wide * (mean + at.shape.norm_eps).rsqrt()).to(x.dtype) * module.weight


def _layer_norm(module: nn.LayerNorm, x: Tensor, at: Grid) -> Tensor:
    wide = _wide(x)
    centred = wide - at.total(wide.sum(-1, keepdim=True)) / at.shape.hidden
    variance = at.total(centred.square().sum(-1, keepdim=True)) / at.shape.hidden
    return (centred * (variance + at.shape.norm_eps).rsqrt()).to(x.dtype) * module.weight + module.bias


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class PositionTable:
    """The columns of this rank's part of the hidden state; with sequence parallelism it looks up its own tokens'."""

    def apply(self, module: nn.Module, name: str, at: Grid) -> list[ParamPlacement]:
        assert isinstance(module, nn.Embedding)
        if at.sequence_parallel:
            replace_forward(module, lambda positions: look_up(module, positions.chunk(at.y.size())[at.y.rank()]))
        return [_part_of_hidden(module, name, "weight", at)]


def _part_of_hidden(module: nn.Module, name: str, part: str, at: Grid) -> ParamPlacement:
    """Keep what belongs to this rank's part of h, a parameter's last dim; ranks along y hold the same."""
    parameter = getattr(module, part)
    *rows, hidden = whole = tuple(parameter.shape)
    own = hidden // at.x.size()
    box = Box((*(0 for _ in rows), at.x.rank() * own), (*rows, own))
    setattr(module, part, empty_like(parameter, box.shape))
    return ParamPlacement(
        f"{name}.{part}", whole, box, box.shape,
        sum_over=("tp_y",) if at.sequence_parallel else (), copies=at.y.size(), primary=at.y.rank() == 0,
    )


GRID: dict[str, ParallelStyle[Grid]] = {
    "embed.token": VocabularyEmbedding(),
    "embed.position": PositionTable(),
    "layers.*.{attention_norm,mlp_norm}": Norm(),
    "layers.*.attention": Region2D(heads=("k", "v")),
    "layers.*.attention.q": Column2D(),
    "layers.*.attention.{k,v}": Column2D(heads=True),
    "layers.*.attention.out": Row2D(),
    "layers.*.mlp": Region2D(),
    "layers.*.mlp.{gate,up}": Column2D(),
    "layers.*.mlp.down": Row2D(),
    "norm": Norm(),
    "head": VocabularyHead(),
    "loss": VocabularyLoss(),
}


def apply_grid(
    model: Transformer, shape: ModelShape, mesh: Mesh, postponed: Postponed | None = None
) -> dict[str, ParamPlacement]:
    """Split a model on the meta device in place over the mesh's axes tp_x and tp_y.

    Args, returns: as of `shoal.engine.parallel.tensor.apply_tensor_parallel`; every parameter is split by a rule.
    """
    at = Grid(
        mesh.group_of_several("tp"), mesh.index("tp"), mesh.size("tp"), mesh.layout.sequence_parallel, shape,
        postponed or Postponed(), x=mesh.group_of_several("tp_x"), y=mesh.group_of_several("tp_y"),
    )
    return split_modules(model, GRID, at)
