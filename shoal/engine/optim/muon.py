"""Muon: orthogonalised momentum for the matrices inside the layers (Jordan et al. 2024; Liu et al. 2025)."""

from __future__ import annotations

from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.optim.low_precision_state import adamw_beside
from shoal.engine.optim.muon_distribution import plan_rounds, product_dtype
from shoal.engine.optim.orthogonal import APART, ROWS, nearly_square
from shoal.engine.optim.rule import Rule, to_pieces
from shoal.engine.optim.shards import Shards
from shoal.spec.config import OptimizerConfig
from shoal.spec.optimizers import is_matrix

# Coefficients of the quintic polynomial that one Newton-Schulz step applies to singular values (Jordan et al. 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_MATCH = 0.2  # RMS of AdamW's updates, to which updates are scaled (Liu et al. 2025, equation 4)


class Muon(Rule):
    """Orthogonalised momentum for matrices inside the layers; AdamW for embeddings, the head, norms and biases.

    Orthogonalisation needs the unsharded matrix; each expert of a parameter is one matrix. One of the ranks that hold
    parts of a matrix processes it (`shoal.engine.optim.muon_distribution`), with the communication volume of ZeRO-1.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards):
        super().__init__(config, shards)
        kinds = shards.cut(is_hidden_matrix)
        empty = Shards({}, [], shards.dtype, shards.device, shards.holders)
        self.matrices, self.rest = kinds.get(True, empty), adamw_beside(config, kinds.get(False, empty))
        self.momentum = self.matrices.zeros()
        self.rounds = list(plan_rounds(self.matrices))
        self.skips_on_device = shards.device.type == "cuda" and self.rest.skips_on_device

    def apply(self, learning_rate: float, scale: Tensor | float, skip: Tensor | None) -> None:
        if not self.skips_on_device:
            super().apply(learning_rate, scale, skip)
            return
        self.rest.step(learning_rate, scale, skip)
        for shard in self.matrices.shards:
            if skip is not None:  # the gradient may be NaN, which a factor of 0 would keep
                shard.gradient.masked_fill_(skip != 0, 0)
            if isinstance(scale, Tensor) or scale != 1:
                shard.gradient.mul_(scale)
        self._update_matrices(learning_rate, skip)

    def update(self, learning_rate: float) -> None:
        self.rest.step(learning_rate)
        self._update_matrices(learning_rate, None)

    def _update_matrices(self, learning_rate: float, skip: Tensor | None) -> None:
        """Update the matrices; if ``skip`` is not 0, by nothing, with gradients of 0."""

        def unless_skipped(value: float, otherwise: float) -> Tensor | float:
            if skip is None:
                return value
            normal = torch.full((), value, dtype=torch.float64, device=skip.device)
            return torch.where(skip != 0, torch.full_like(normal, otherwise), normal)

        shards, holders = self.matrices.shards, self.shards.holders
        rates = [learning_rate * shard.rate for shard in shards]
        kept = unless_skipped(self.config.momentum, 1.0)
        for shard, momentum, rate in zip(shards, self.momentum, rates, strict=True):
            momentum.mul_(kept).add_(shard.gradient)
            shard.weights.mul_(unless_skipped(1 - rate * shard.decay, 1.0))
        pieces = [piece for each in self.rounds for piece, _ in each.pieces]
        empty = partial(torch.empty, dtype=self.shards.dtype, device=self.shards.device)
        full = empty(holders.ranks * max((p.stop - p.start for p in pieces), default=0))
        mine = empty(max((p.stop for p in pieces), default=0))
        for each in self.rounds:
            for piece, moves in each.pieces:
                buffer = full[: holders.ranks * (piece.stop - piece.start)].zero_()
                for move in moves:
                    gradient, momentum = shards[move.shard].gradient, self.momentum[move.shard]
                    view = move.view_buffer(buffer)
                    torch.add(  # Nesterov momentum
                        move.view_shard(gradient), move.view_shard(momentum), alpha=self.config.momentum, out=view
                    )
                    if move.part.copies > 1:
                        view /= move.part.copies
                holders.reduce_scatter(mine[piece], buffer)
            start = 0
            for shape, matrices in groupby(each.mine, lambda matrix: matrix.shape):
                values = mine[start : start + sum(matrix.numel for matrix in matrices)].view(-1, *shape)
                orthogonalise_(values, unless_skipped(_MATCH * max(shape) ** 0.5, 0.0))
                start += values.numel()
            for piece, moves in each.pieces:
                buffer = full[: holders.ranks * (piece.stop - piece.start)]
                holders.all_gather(buffer, mine[piece])
                for move in moves:
                    move.view_shard(shards[move.shard].weights).sub_(move.view_buffer(buffer), alpha=rates[move.shard])

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        return {"momentum": to_pieces(self.matrices.shards, self.momentum), **self.rest.states()}

    def resume_at(self, count: int) -> None:
        super().resume_at(count)
        self.rest.resume_at(count)


def orthogonalise_(matrices: Tensor, factor: Tensor | float) -> None:
    """Replace each of some matrices, [g, n, m], by its `orthogonal` multiplied by a factor.

    GPUs take all in batched products; the CPU one after the other, in products of fewer FLOPs.
    """
    if matrices.device.type == "cpu":
        for matrix in matrices:
            torch.mul(orthogonal(matrix), factor, out=matrix)
    else:
        torch.mul(newton_schulz(matrices), factor, out=matrices)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Return `orthogonal` of each matrix, [g, n, m], by three batched products in each step."""
    n, m = matrices.shape[1:]
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = (matrices / (norms + 1e-7)).to(product_dtype(matrices.dtype, matrices.device))
    x = x if n <= m else x.mT
    first, second, third = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return (x if n <= m else x.mT).to(matrices.dtype)


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximate the nearest matrix with orthonormal rows or columns; singular values end up between 0.7 and 1.2.

    Newton-Schulz iterations: each multiplies the matrix x, [n, m], by a polynomial of x x' (Jordan et al. 2024).
    Unless x is nearly square, the polynomials, which are [n, n] and symmetric, are multiplied with each other first
    and with x last (Zhang et al. 2026, "Gram Newton-Schulz"). bfloat16 does not use this, since small singular values
    would be lost.
    """
    x = matrix.to(product_dtype(matrix.dtype, matrix.device))
    wide = x.size(0) <= x.size(1)
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)  # the spectral norm is at most 1
    first, *others = _COEFFICIENTS
    if x.dtype == torch.bfloat16 or nearly_square(matrix.shape):
        for _ in range(_STEPS):
            x = torch.addmm(x, _polynomial(_symmetric(x, x.T), *others), x, beta=first)
    else:
        gram = _symmetric(x, x.T)
        product = factor = _factor(gram)
        for _ in range(_STEPS - 1):
            gram = _symmetric(_symmetric(gram, factor), factor, out=gram)  # polynomials of the same matrix commute
            factor = _factor(gram)
            product = _symmetric(product, factor)
        x = product @ x
    return (x if wide else x.T).to(matrix.dtype)


def _factor(gram: Tensor) -> Tensor:
    """Return the symmetric [n, n] factor that a step multiplies x by, including its constant."""
    first, *others = _COEFFICIENTS
    factor = _polynomial(gram, *others)
    factor.diagonal().add_(first)
    return factor


def _polynomial(gram: Tensor, second: float, third: float) -> Tensor:
    """Return a symmetric [n, n] polynomial of another such matrix, without a constant."""
    return _symmetric(gram, gram).mul_(third).add_(gram, alpha=second)


def _symmetric(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply left @ right, [n, n], whose result is symmetric: elements above the diagonal are copied, which saves up
    to half of the products on the CPU, where smaller products are not slower."""
    n = len(left)
    if left.is_cuda:
        return torch.mm(left, right, out=out)
    out = left.new_empty(n, n + APART)[:, :n] if out is None else out
    for start in range(0, n, ROWS):
        end = min(start + ROWS, n)
        torch.mm(left[start:end], right[:, :end], out=out[start:end, :end])
        out[:start, start:end] = out[start:end, :start].T
    return out


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether Muon updates a parameter: matrices inside a layer that map activations to activations."""
    return is_matrix(name, shape) and name.startswith("layers.")
