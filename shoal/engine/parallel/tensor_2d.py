"""Two-dimensional tensor parallelism: matrices are split by input and output over a grid of ranks.

The tensor-parallel ranks form a grid x (``tp_x``, neighbours) by y (tp / tp_x), and the hidden state is split over x
between layers. A block is two products (Pope et al. 2022, "Efficiently scaling transformer inference", section 3.2.2,
"2D weight-stationary"), in the notation of `shoal explain`:

    In[B, Hx] * Win[Hx, Fy] -> [B, Fy] {Ux} -> [B, Fyx]    reduce-scatter along x
    [B, Fyx] -> [B, Fy] * Wout[Fy, Hx] -> [B, Hx] {Uy}     all-gather along x, sum along y

With x and y in proportion to sqrt(tp) the volume falls as 1/sqrt(tp); in one dimension it is constant. Between the two
collectives along x a rank holds the same heads or hidden units as in one dimension, so attention and activation
functions are unchanged. Norms sum one or two numbers per token along x. Token ids are split over all ranks, and the
hidden state is gathered for the head.

With sequence parallelism the hidden state is split along both axes: h over x, tokens over y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import gather_from, scatter_to
from shoal.engine.compiler import untraced
from shoal.engine.parallel.embedding import SequenceEmbedding
from shoal.engine.parallel.linear import Linear, SplitNorm, TensorParallel, keep_rows, multiply
from shoal.engine.parallel.placement import ParamPlacement, keep_box

HIDDEN = 2  # dim of [b, s, h] that the grid splits


@dataclass(frozen=True)
class Grid(TensorParallel):
    """This rank's position in the grid; the ranks along ``x`` split the hidden state.

    Activations between blocks are [b, s, h/x], or [b, s/y, h/x] with sequence parallelism.
    """

    x: Group = field(kw_only=True)

    @untraced
    def gather_hidden(self, x: Tensor) -> Tensor:
        """Gather the hidden state: [b, s, h/x] or [b, s/y, h/x] -> [b, s, h]."""
        return gather_from(self.gather_input(x), self.x, HIDDEN)

    multiply_along_y = TensorParallel.multiply  # by a part of the weights along x, too

    def multiply(
        self, x: Tensor, layers: Sequence[Linear], *, tokenwise: bool = False, biased: bool = True, joined: bool = False
    ) -> Sequence[Tensor]:
        """Compute the products of the gathered hidden state, which backward keeps."""
        return multiply(self.gather_hidden(x), layers, biased=biased, joined=joined)

    @untraced
    def reduce_hidden(self, x: Tensor) -> Tensor:
        """Reduce to this rank's part: [b, s, h] -> [b, s, h/x] or [b, s/y, h/x]."""
        return self.reduce_output(scatter_to(x, self.x, HIDDEN))

    @untraced
    def own_units(self, partial_sums: Sequence[Tensor], users: Sequence[int]) -> list[Tensor]:
        """Reduce partial sums [b, s, f/y] of a block's first products to this rank's units, in one collective.

        Args:
            users: for each product, the number of neighbours that use the same units; its result is [b, s, users f/(x
                y)].
        """
        by_rank = []
        for sums, n in zip(partial_sums, users, strict=True):
            units = sums.unflatten(HIDDEN, (self.x.size() // n, -1))  # [b, s, x/users, ..]
            by_rank.append(units.repeat_interleave(n, HIDDEN).movedim(HIDDEN, 0))
        widths = [units.shape[-1] for units in by_rank]
        (totals,) = scatter_to(torch.cat(by_rank, -1), self.x, 0)
        # Copies, so that tensors saved for backward do not keep the larger storage alive.
        return [total.contiguous() for total in totals.split(widths, -1)]


# ---- the split modules -----------------------------------------------------------------------------------------


class ColumnLinear2D(Linear):
    """Linear layer split by output over y and by input over x; the bias is split by output over all ranks."""

    at: Grid

    def __init__(self, unsplit: nn.Linear, name: str, at: Grid):
        super().__init__(unsplit, at.sink)
        self.at = at
        parts, y = min(at.y.size(), self.heads()), at.y.size()
        copies, rows, columns = y // parts, self.out_features // parts, self.in_features // at.x.size()
        box = Box((at.y.rank() // copies * rows, at.x.rank() * columns), (rows, columns))
        self.placements = [keep_box(
            self, name, "weight", box,
            sum_over=(f"tp_y/{copies}",) if copies > 1 else (), copies=copies, primary=at.y.rank() % copies == 0,
        )]
        if self.bias is not None:
            self.placements.append(keep_rows(self, name, "bias", at, min(at.size, self.heads())))

    def heads(self) -> int:
        """Return the maximum number of parts of the output."""
        return self.at.size

    def joined(self, x: Tensor, layers: Sequence[Linear]) -> None:
        """Return None: each product is reduced to this rank's units, which are not adjacent."""

    def results(self, x: Tensor, layers: Sequence[Linear], *, joined: bool = False) -> Sequence[Tensor]:
        """Compute [b, s, h/x] (or [b, s/y, h/x]) -> [b, s, f/(x y)] per layer, with one collective along each axis."""
        at = self.at
        # Per layer, the number of neighbours that use the same units.
        users = [
            min(at.x.size(), max(1, at.size // layer.heads())) for layer in layers if isinstance(layer, ColumnLinear2D)
        ]
        results = at.own_units(at.multiply_along_y(x, layers, biased=False), users)
        return [y if layer.bias is None else y + layer.bias for y, layer in zip(results, layers, strict=True)]


class KVColumnLinear2D(ColumnLinear2D):
    """`ColumnLinear2D` for keys and values; with fewer heads than ranks, neighbours hold the same head."""

    def heads(self) -> int:
        return self.at.shape.kv_heads


class RowLinear2D(Linear):
    """Linear layer split by input over y and by output over x; the bias is split over x and added after the sum."""

    at: Grid

    def __init__(self, unsplit: nn.Linear, name: str, at: Grid):
        super().__init__(unsplit, at.sink)
        self.at = at
        rows, columns = self.out_features // at.x.size(), self.in_features // at.y.size()
        box = Box((at.x.rank() * rows, at.y.rank() * columns), (rows, columns))
        self.placements = [keep_box(self, name, "weight", box)]
        if self.bias is not None:
            self.placements.append(_keep_hidden(self, name, "bias", at))

    def results(self, x: Tensor, layers: Sequence[Linear], *, joined: bool = False) -> Sequence[Tensor]:
        """Compute the output: [b, s, f/(x y)] -> [b, s, h/x] or [b, s/y, h/x]."""
        (y,) = multiply(gather_from(x, self.at.x, HIDDEN), layers, biased=False)
        y = self.at.reduce_output(y)
        return (y if self.bias is None else y + self.bias,)


class Norm2D(SplitNorm):
    """Norm of a hidden state split over x: [b, s, h/x] or [b, s/y, h/x]."""

    def __init__(self, unsplit: nn.RMSNorm | nn.LayerNorm, name: str, at: Grid):
        super().__init__(unsplit, at.x, at.shape.hidden, at.shape.norm_eps)
        self.placements = [_keep_hidden(self, name, part, at) for part, _ in unsplit.named_parameters()]


class PositionEmbedding2D(SequenceEmbedding):
    """Position embedding with this rank's columns of the hidden state."""

    def __init__(self, unsplit: nn.Embedding, name: str, at: Grid):
        super().__init__(unsplit, name, at)
        self.placements = [_keep_hidden(self, name, "weight", at)]


def _keep_hidden(module: nn.Module, name: str, part: str, at: Grid) -> ParamPlacement:
    """Keep this rank's part of h, the last dim of a parameter; ranks along y hold the same part."""
    *rows, hidden = getattr(module, part).shape
    own = hidden // at.x.size()
    box = Box((*(0 for _ in rows), at.x.rank() * own), (*rows, own))
    return keep_box(
        module, name, part, box,
        sum_over=("tp_y",) if at.sequence_parallel else (), copies=at.y.size(), primary=at.y.rank() == 0,
    )
