"""PowerSGD: compress a gradient matrix to a product of two thin ones (Vogels et al. 2019, algorithms 1 and 2).

The sum M [n, m] of the replicas' gradients M_i is approximated by P Q', both with r columns, in one step of power
iteration that starts from the Q of the previous step:

    P = sum of M_i Q;  orthonormalise P;  Q = sum of M_i' P;  M ~ P Q'

Both sums are ordinary all-reduces, of r (n + m) numbers instead of n m, so every replica computes the same bits.
Vectors are summed uncompressed. With r = min(n, m) the product equals M.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import sum_together
from shoal.engine.models.initial import Initial, fill
from shoal.training.async_dp.methods.compress import Compressed
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import MethodStates


class PowerSGD(Compressed):
    """PowerSGD compression with r = ``rank``; ``seed`` determines the first Q. See `Compressed`."""

    def __init__(self, flat: Flat, group: Group | None, rank: int, seed: int):
        super().__init__(flat, group)
        self.factors: dict[int, Tensor] = {}
        for i, part in enumerate(flat.parts):
            if len(part.shape) < 2:
                continue
            n, m = self._matrix(i).shape
            q = self.factors[i] = self.tensors[i].new_empty(m, min(rank, n, m))
            shape, normal = tuple(q.shape), Initial(0, 1)
            fill(q, name=f"powersgd.{part.name}", global_shape=shape, box=Box.full(shape), initial=normal, seed=seed)

    def _matrix(self, i: int) -> Tensor:
        return self.tensors[i].flatten(1)

    def exchange(self) -> None:
        ps = {i: self._matrix(i) @ q for i, q in self.factors.items()}
        plain = [i for i in range(len(self.tensors)) if i not in ps]
        sum_together([*ps.values(), *(self.tensors[i] for i in plain)], self.group)
        for i in plain:
            self.error_views[i].zero_()
        for i, p in ps.items():
            ps[i], _ = torch.linalg.qr(p)
            torch.mm(self._matrix(i).T, ps[i], out=self.factors[i])
            torch.sub(self._matrix(i), ps[i] @ self.factors[i].T, out=self.error_views[i].flatten(1))
        sum_together(list(self.factors.values()), self.group)
        for i, p in ps.items():
            torch.mm(p, self.factors[i].T, out=self._matrix(i))

    def states(self) -> MethodStates:
        """Return the errors, and the Q of each box into which a parameter is split, the start of the next step.

        If several ranks or stages hold the same box, its Q is equal on them and is saved once.
        """
        found: dict[str, list[Piece]] = defaultdict(list)
        for i, q in self.factors.items():
            split = self.flat.parts[i].split
            name = f"{'-'.join(map(str, split.box.offset))}.{split.name}"
            found[name].append(Piece.full(q, split.primary))
        return replace(super().states(), common={"q": dict(found)})
