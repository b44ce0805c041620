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
from shoal.engine.collectives.ops import copy_to, gather_from, reduce_from, scatter_to
from shoal.engine.parallel.linear import (
    Linear,
    SequenceEmbedding,
    TensorParallel,
    empty_like,
    keep_rows,
    multiply,
)
from shoal.engine.parallel.overlap import SEQUENCE
from shoal.engine.parallel.placement import ParamPlacement

HIDDEN = 2  # dim of [b, s, h] that the grid splits


@dataclass(frozen=True)
class Grid(TensorParallel):
    """This rank's place in the grid.

    Attributes:
        x, y: the ranks along each axis.
    """

    x: Group = field(kw_only=True)
    y: Group = field(kw_only=True)

    def gather_input(self, x: Tensor) -> Tensor:
        """Enter a region, along y: [b, s, h/x] (or [b, s/y, h/x]) -> [b, s, h/x]."""
        if self.sequence_parallel:
            return gather_from(x, self.y, SEQUENCE, self.sink.flush)
        return copy_to(x, self.y, self.sink.flush)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Leave it: sum along y. [b, s, h/x] -> [b, s, h/x] or [b, s/y, h/x]."""
        return scatter_to(x, self.y, SEQUENCE) if self.sequence_parallel else reduce_from(x, self.y)

    def gather_hidden(self, x: Tensor) -> Tensor:
        """[b, s, h/x] or [b, s/y, h/x] -> [b, s, h]."""
        return gather_from(self.gather_input(x), self.x, HIDDEN)

    def reduce_hidden(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h/x] or [b, s/y, h/x]."""
        return self.reduce_output(scatter_to(x, self.x, HIDDEN))

    def own_positions(self, positions: Tensor) -> Tensor:
        """[s] -> [s/y]."""
        return positions.chunk(self.y.size())[self.y.rank()]

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


# ---- the split modules: arguments as of `shoal.engine.parallel.linear` -----------------------------------------


class ColumnLinear2D(Linear):
    """Split by output over y and by input over x; the bias by output over all."""

    at: Grid

    def __init__(self, whole: nn.Linear, name: str, at: Grid):
        super().__init__(whole, at.sink)
        self.at = at
        parts, y = min(at.y.size(), self.heads()), at.y.size()
        copies, rows, columns = y // parts, self.out_features // parts, self.in_features // at.x.size()
        box = Box((at.y.rank() // copies * rows, at.x.rank() * columns), (rows, columns))
        self.weight = empty_like(whole.weight, box.shape)
        self.placements = [ParamPlacement(
            f"{name}.weight", tuple(whole.weight.shape), box, box.shape,
            sum_over=(f"tp_y/{copies}",) if copies > 1 else (), copies=copies, primary=at.y.rank() % copies == 0,
        )]
        if self.bias is not None:
            self.placements.append(keep_rows(self, name, "bias", at, min(at.size, self.heads())))

    def heads(self) -> int:
        """Into how many parts the outputs can be split."""
        return self.at.size

    def results(self, x: Tensor, layers: Sequence[Linear]) -> Sequence[Tensor]:
        """[b, s, h/x] (or [b, s/y, h/x]) -> [b, s, f/(x y)] of each layer, by one collective along each axis."""
        at = self.at
        # Of each layer, how many neighbours use the same units.
        users = [
            min(at.x.size(), max(1, at.size // layer.heads())) for layer in layers if isinstance(layer, ColumnLinear2D)
        ]
        results = at.own_units(multiply(at.gather_input(x), layers, biased=False), users)
        return [
            y if layer.bias is None else y + layer.bias for y, layer in zip(results, layers, strict=True)
        ]


class KVColumnLinear2D(ColumnLinear2D):
    """The same for keys and values, of which neighbours hold the same where there are fewer heads than ranks."""

    def heads(self) -> int:
        """Those of the model."""
        return self.at.shape.kv_heads


class RowLinear2D(Linear):
    """Split by input over y and by output over x, as the bias is, which is added once, after the sum."""

    at: Grid

    def __init__(self, whole: nn.Linear, name: str, at: Grid):
        super().__init__(whole, at.sink)
        self.at = at
        rows, columns = self.out_features // at.x.size(), self.in_features // at.y.size()
        box = Box((at.x.rank() * rows, at.y.rank() * columns), (rows, columns))
        self.weight = empty_like(whole.weight, box.shape)
        self.placements = [ParamPlacement(f"{name}.weight", tuple(whole.weight.shape), box, box.shape)]
        if self.bias is not None:
            self.placements.append(_keep_hidden(self, name, "bias", at))

    def results(self, x: Tensor, layers: Sequence[Linear]) -> Sequence[Tensor]:
        """[b, s, f/(x y)] -> [b, s, h/x] or [b, s/y, h/x]."""
        (y,) = multiply(gather_from(x, self.at.x, HIDDEN), layers, biased=False)
        y = self.at.reduce_output(y)
        return (y if self.bias is None else y + self.bias,)


class Norm2D(nn.Module):
    """RMSNorm or LayerNorm of a hidden state of which each rank has a part: its sums are completed along x."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, whole: nn.RMSNorm | nn.LayerNorm, name: str, at: Grid):
        super().__init__()
        self.at, self.centred, self.weight = at, isinstance(whole, nn.LayerNorm), whole.weight
        self.register_parameter("bias", getattr(whole, "bias", None))
        self.placements = [_keep_hidden(self, name, part, at) for part, _ in whole.named_parameters()]

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h/x] or [b, s/y, h/x]."""
        at, hidden = self.at, self.at.shape.hidden
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if self.centred:
            wide = wide - at.total(wide.sum(-1, keepdim=True)) / hidden
        mean = at.total(wide.square().sum(-1, keepdim=True)) / hidden
        y = (wide * (mean + at.shape.norm_eps).rsqrt()).to(x.dtype) * self.weight
        return y if self.bias is None else y + self.bias


class PositionEmbedding2D(SequenceEmbedding):
    """The columns of this rank's part of the hidden state."""

    def __init__(self, whole: nn.Embedding, name: str, at: Grid):
        super().__init__(whole, name, at)
        self.placements = [_keep_hidden(self, name, "weight", at)]


def _keep_hidden(module: nn.Module, name: str, part: str, at: Grid) -> ParamPlacement:
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
