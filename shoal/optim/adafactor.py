"""Adafactor: second moments of a matrix from its row and column sums (Shazeer & Stern 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.config import OptimizerConfig
from shoal.optim.rule import BLOCK, Rule
from shoal.optim.shards import Part, Shard, Shards
from shoal.pieces import Box, Piece

_EPS_SQUARE, _EPS_SCALE = 1e-30, 1e-3  # epsilon 1 and 2 of algorithm 6
_THRESHOLD = 1.0  # d
_DECAY = 0.8  # of beta2: 1 - t^-0.8


class Adafactor(Rule):
    """Algorithm 6, with the learning rate in place of the relative step size rho.

    A matrix [n, m] keeps n + m numbers, ``row`` and ``column``, which every holder of a part of it keeps whole; other
    parameters keep a second moment for each element. What concerns a parameter that several ranks hold is summed in
    two reductions: the rows and columns of all matrices, and two squared norms of every parameter.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards):
        super().__init__(config, shards)
        kind = {"dtype": shards.dtype, "device": shards.device}
        self.sizes = {name: sum(whole) for name, whole in shards.parameters.items() if len(whole) == 2}
        self.factors = torch.zeros(sum(self.sizes.values()), **kind)
        self.views = self._split(self.factors)
        self.squares = {
            (part.name, part.box): torch.zeros(part.box.shape, **kind)
            for _, part in self._parts()
            if not _matrix(part)
        }

    def _parts(self) -> Iterator[tuple[Shard, Part]]:
        return ((shard, part) for shard in self.shards.shards for part in shard.parts)

    def _split(self, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Each matrix's rows and columns in a tensor that lies like `factors`."""
        parts = zip(self.sizes, flat.split(list(self.sizes.values())), strict=True)
        return {name: part.split(self.shards.parameters[name]) for name, part in parts}

    def update(self, learning_rate: float) -> None:
        self._accumulate(1 - self.count**-_DECAY)
        root_mean_squares = self._root_mean_squares()
        for shard, part in self._parts():
            update_size, weight_size = root_mean_squares[part.name]
            rate = learning_rate * shard.rate
            scale = rate * max(_EPS_SCALE, weight_size) / max(1.0, update_size / _THRESHOLD)  # lines 4 and 9
            for some, (scaled, factor) in zip(_rows(shard.weights, part), self._directions(shard, part), strict=True):
                if shard.decay:
                    some.mul_(1 - rate * shard.decay)
                some.addcmul_(scaled, factor, value=-scale)

    def _accumulate(self, beta2: float) -> None:
        """Running means of the squared gradients: of rows and columns (lines 5 and 6), or of each element."""
        fresh = torch.zeros_like(self.factors)
        sums = self._split(fresh)
        for shard, part in self._parts():
            if not _matrix(part):
                square = shard.gradient[part.slice].view(part.box.shape).square().add_(_EPS_SQUARE)
                self.squares[part.name, part.box].lerp_(square, 1 - beta2)
                continue
            row, column = (total[along] for total, along in zip(sums[part.name], part.box.slices, strict=True))
            start = 0
            for gradient in _rows(shard.gradient, part):
                square = gradient * gradient
                n, m = square.shape
                row[start : start + n] += square.sum(1).add_(m * _EPS_SQUARE) / part.copies
                column += square.sum(0).add_(n * _EPS_SQUARE) / part.copies
                start += n
        self.shards.holders.sum(fresh)
        self.factors.lerp_(fresh, 1 - beta2)

    def _directions(self, shard: Shard, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient over the root of its estimated second moment (lines 7 and 8), some rows at a time.

        Yields:
            Two factors of it: one for all elements, and one for all elements of a vector or for the rows of a matrix.
        """
        gradients = _rows(shard.gradient, part)
        if not _matrix(part):
            roots = self.squares[part.name, part.box].rsqrt().split(gradients[0].size(0))
            yield from zip(gradients, roots, strict=True)
            return
        row, column = self.views[part.name]
        rows, columns = part.box.slices
        # By roots of each, since the product of the two sums could underflow.
        by_row = (row[rows, None] / row.sum()).rsqrt_().split(gradients[0].size(0))
        by_column = column[columns].rsqrt()
        for gradient, factor in zip(gradients, by_row, strict=True):
            yield gradient * by_column, factor

    def _root_mean_squares(self) -> dict[str, tuple[float, float]]:
        """By parameter, those of the update and of the weights."""
        squares = self.factors.new_zeros(len(self.shards.parameters), 2, dtype=torch.float64)
        place = {name: i for i, name in enumerate(self.shards.parameters)}
        for shard, part in self._parts():
            total = squares[place[part.name]]
            for scaled, factor in self._directions(shard, part):
                by_row = torch.linalg.vector_norm(scaled, dim=1, keepdim=True) if _matrix(part) else scaled
                total[0] += torch.linalg.vector_norm(by_row * factor).double().square() / part.copies
            for weights in _rows(shard.weights, part):
                total[1] += torch.linalg.vector_norm(weights).double().square() / part.copies
        self.shards.holders.sum(squares)
        numbers = squares.tolist()
        return {
            name: tuple(math.sqrt(square / math.prod(whole)) for square in numbers[place[name]])
            for name, whole in self.shards.parameters.items()
        }

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        kinds: dict[str, dict[str, list[Piece]]] = {"row": {}, "column": {}, "exp_avg_sq": {}}
        for name, factors in self.views.items():
            for kind, values in zip(("row", "column"), factors, strict=True):
                shape = tuple(values.shape)
                kinds[kind][name] = [Piece(shape, Box.whole(shape), values, name in self.shards.saves)]
        for _, part in self._parts():
            if not _matrix(part):
                values = self.squares[part.name, part.box]
                kinds["exp_avg_sq"].setdefault(part.name, []).append(Piece(part.whole, part.box, values, part.primary))
        return kinds


def _matrix(part: Part) -> bool:
    return len(part.whole) == 2


def _rows(flat: Tensor, part: Part) -> tuple[Tensor, ...]:
    """A part of a flat tensor, as many rows at a time as stay in a core's cache."""
    view = flat[part.slice].view(part.box.shape)
    return view.split(max(1, BLOCK * view.size(0) // view.numel()))
