"""Adafactor: second moments of a matrix factored into row and column sums (Shazeer & Stern 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.optim.rule import BLOCK, Rule
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.spec.config import OptimizerConfig

_EPS_SQUARE, _EPS_SCALE = 1e-30, 1e-3  # epsilon 1 and 2 of algorithm 6
_THRESHOLD = 1.0  # d
_DECAY = 0.8  # exponent: beta2 is 1 - t^-0.8


class Adafactor(Rule):
    """Adafactor's algorithm 6, with the learning rate instead of the relative step size rho.

    A matrix [n, m] has n + m states, ``row`` and ``column``, stored unsharded by every holder of a part of it; other
    parameters, such as kernels of convolutions, have a second moment per element. A parameter of several experts
    [E, n, m] is E matrices, each with its own scale and threshold. For parameters held by several ranks, an update
    needs two reductions: the rows and columns of all matrices, and two squared norms of every matrix and other
    parameter.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards):
        super().__init__(config, shards)
        self._sum_squares, self._update_norm, self._apply_update = _sum_squares, _update_norm, _apply_update
        self._rows_at_once = BLOCK if shards.device.type == "cpu" else None  # elements; None processes a part at once
        self.shapes = {  # shapes of each parameter's rows and columns: [n] and [m], or [E, n] and [E, m]
            name: (shape[:-1], (*shape[:-2], shape[-1]))
            for name, shape in shards.parameters.items() if len(shape) in (2, 3)
        }  # fmt: skip
        self.sizes = [math.prod(shape) for both in self.shapes.values() for shape in both]
        self.factors = torch.zeros(sum(self.sizes), dtype=shards.dtype, device=shards.device)
        self.views = self._views(self.factors)
        self.matrices = self._matrices(self.views)
        self.parts = [
            (shard, single) for shard in shards.shards for part in shard.parts for single in _split_experts(part)
        ]
        self.matrix_shapes = {
            single: shape[1:] if len(shape) == 3 else shape
            for name, shape in shards.parameters.items() for single in _matrix_names(name, shape)
        }
        numels = [math.prod(shape) for shape in self.matrix_shapes.values()]
        self.numels = torch.tensor(numels, dtype=torch.float64, device=shards.device).unsqueeze(1)
        self.squares = {
            (part.name, part.box): torch.zeros(part.box.shape, dtype=shards.dtype, device=shards.device)
            for _, part in self.parts if not _is_matrix(part)
        }

    def _views(self, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each parameter's rows and columns as views of a tensor with the layout of `factors`."""
        pieces = iter(flat.split(self.sizes))
        return {
            name: (next(pieces).view(rows), next(pieces).view(columns))
            for name, (rows, columns) in self.shapes.items()
        }

    def _matrices(self, views: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        """Split the views of `_views` by matrix."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (rows, columns) in views.items():
            singles = _matrix_names(name, self.shards.parameters[name])
            factors = zip(rows.view(len(singles), -1), columns.view(len(singles), -1), strict=True)
            found |= zip(singles, factors, strict=True)
        return found

    def compile(self) -> None:
        self._sum_squares = torch.compile(_sum_squares, dynamic=True)
        self._update_norm = torch.compile(_update_norm, dynamic=True)
        self._apply_update = torch.compile(_apply_update, dynamic=True)
        self._rows_at_once = None

    def update(self, learning_rate: float) -> None:
        self._accumulate(1 - self.count**-_DECAY)
        factors = [self._factors(part) for _, part in self.parts]
        update_size, weight_size = self._root_mean_squares(factors).unbind(1)
        shrunk, grown = (update_size / _THRESHOLD).clamp_(min=1), weight_size.clamp(min=_EPS_SCALE)
        place = {name: i for i, name in enumerate(self.matrix_shapes)}
        # Numbers are tensors that stay on the device; new float values would also recompile the kernel.
        scales: dict[float, Sequence[Tensor]] = {}  # lines 4 and 9, by learning rate
        kept: dict[float, Tensor] = {}
        for (shard, part), (by_row, by_column) in zip(self.parts, factors, strict=True):
            rate = learning_rate * shard.rate
            if rate not in scales:
                scales[rate] = (rate * grown / shrunk).unbind()
            if (left := 1 - rate * shard.decay) not in kept:
                kept[left] = shrunk.new_full((), left)
            numbers = kept[left], scales[rate][place[part.name]]
            rows = zip(self._rows(shard.weights, part), self._gradients(shard, part), strict=True)
            for (weights, gradient), factor in zip(rows, self._split_rows(by_row, part), strict=True):
                self._apply_update(weights, gradient, factor, by_column, *numbers)

    def _accumulate(self, beta2: float) -> None:
        """Update the running means of squared gradients: of rows and columns (lines 5 and 6), or of each element."""
        fresh = torch.zeros_like(self.factors)
        sums = self._matrices(self._views(fresh))
        for shard, part in self.parts:
            if not _is_matrix(part):
                gradient = shard.gradient[part.slice].view(part.box.shape).to(self.factors.dtype)
                square = gradient.square().add_(_EPS_SQUARE)
                self.squares[part.name, part.box].lerp_(square, 1 - beta2)
                continue
            row, column = (total[along] for total, along in zip(sums[part.name], part.box.slices, strict=True))
            start = 0
            for gradient in self._gradients(shard, part):
                n, m = gradient.shape
                row_sums, column_sums = self._sum_squares(gradient)
                row[start : start + n] += row_sums.add_(m * _EPS_SQUARE) / part.copies
                column += column_sums.add_(n * _EPS_SQUARE) / part.copies
                start += n
        self.shards.holders.sum(fresh)
        self.factors.lerp_(fresh, 1 - beta2)

    def _factors(self, part: ShardPart) -> tuple[Tensor, Tensor]:
        """Return a factor for each row and column of a part; the root of the estimated second moment is 1 / (row *
        column) (lines 7, 8).

        A part that is not a matrix is one row.
        """
        if not _is_matrix(part):
            by_column = self.squares[part.name, part.box].view(-1).rsqrt()
            return by_column.new_ones(1, 1), by_column
        row, column = self.matrices[part.name]
        rows, columns = part.box.slices
        # Take roots first, since the product of the two sums may underflow.
        return (row[rows, None] / row.sum()).rsqrt_(), column[columns].rsqrt()

    def _rows(self, flat: Tensor, part: ShardPart) -> tuple[Tensor, ...]:
        """Split a part of a flat tensor into cache-sized blocks of rows, as matrices."""
        return self._split_rows(flat[part.slice].view(part.box.shape[0] if _is_matrix(part) else 1, -1), part)

    def _gradients(self, shard: Shard, part: ShardPart) -> Iterator[Tensor]:
        """Return the same blocks of a part's gradient, converted to the weights' format, which may be wider."""
        return (rows.to(shard.weights.dtype) for rows in self._rows(shard.gradient, part))

    def _split_rows(self, matrix: Tensor, part: ShardPart) -> tuple[Tensor, ...]:
        each = self._rows_at_once and max(1, self._rows_at_once * matrix.size(0) // part.box.numel)
        return matrix.split(each or matrix.size(0))

    def _root_mean_squares(self, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the RMS of the update and of the weights, [matrices and other parameters, 2] float64."""
        squares = self.factors.new_zeros(len(self.matrix_shapes), 2, dtype=torch.float64)
        place = {name: i for i, name in enumerate(self.matrix_shapes)}
        for (shard, part), (by_row, by_column) in zip(self.parts, factors, strict=True):
            total = squares[place[part.name]]
            rows = zip(self._gradients(shard, part), self._split_rows(by_row, part), strict=True)
            for gradient, factor in rows:
                total[0] += self._update_norm(gradient, factor, by_column).double().square() / part.copies
            for weights in self._rows(shard.weights, part):
                total[1] += torch.linalg.vector_norm(weights).double().square() / part.copies
        self.shards.holders.sum(squares)
        return (squares / self.numels).sqrt_()

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        kinds: dict[str, dict[str, list[Piece]]] = {"row": {}, "column": {}, "exp_avg_sq": {}}
        for name, factors in self.views.items():
            for kind, values in zip(("row", "column"), factors, strict=True):
                kinds[kind][name] = [Piece.full(values, name in self.shards.saves)]
        for _, part in self.parts:
            if not _is_matrix(part):
                values = self.squares[part.name, part.box]
                piece = Piece(part.global_shape, part.box, values, part.primary)
                kinds["exp_avg_sq"].setdefault(part.name, []).append(piece)
        return kinds


def _matrix_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names of a parameter, or of its experts' matrices."""
    return [f"{name}[{expert}]" for expert in range(shape[0])] if len(shape) == 3 else [name]


def _split_experts(part: ShardPart) -> Iterator[ShardPart]:
    if len(part.global_shape) != 3:
        yield part
        return
    box = Box(part.box.offset[1:], part.box.shape[1:])
    names = _matrix_names(part.name, part.global_shape)
    for i in range(part.box.shape[0]):
        name, start = names[part.box.offset[0] + i], part.start + i * box.numel
        yield replace(part, name=name, global_shape=part.global_shape[1:], box=box, start=start)


def _is_matrix(part: ShardPart) -> bool:
    return len(part.global_shape) == 2


def _sum_squares(gradient: Tensor) -> tuple[Tensor, Tensor]:
    square = gradient * gradient
    return square.sum(1), square.sum(0)


def _update_norm(gradient: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(gradient * by_column, dim=1, keepdim=True)
    return torch.linalg.vector_norm(norms * by_row)


def _apply_update(
    weights: Tensor, gradient: Tensor, by_row: Tensor, by_column: Tensor, kept: Tensor, scale: Tensor
) -> None:
    """Update some rows of the weights in place, by the gradient divided by the root of its second moment."""
    weights.mul_(kept).sub_((gradient * by_column).mul_(by_row * scale))
