"""Exact bytes of optimizer states of a rank's shards, for each optimizer of `shoal.engine.optim`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shoal.base.boxes import flat_range
from shoal.engine.optim.orthogonal import APART, AT_ONCE, orthogonal_flops
from shoal.planning.cost.buckets import Bucket, Filled
from shoal.planning.cost.parameters import LocalParameter
from shoal.spec.optimizers import is_matrix

STATES = {  # bytes per element
    "sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2, "radam": 2, "sage": 3, "sophia-g": 2, "sophia-h": 2,
}  # fmt: skip
BLOCK, SMALLEST = 256, 4096  # adam8bit: elements per scale, and of the smallest quantised parameter


class Orthogonal(NamedTuple):
    """Matrices that Muon orthogonalises in an update, over all ranks that hold parts of the same parameters."""

    elements: int  # total elements
    matrices: tuple[tuple[tuple[int, int], int], ...]  # number of matrices of each shape

    def busiest(self, ranks: int, *, wide: bool) -> float:
        """Return a tight lower bound of the FLOPs of the busiest rank: its share, or the largest matrix.

        With many matrices the true value is hardly larger, as the largest are assigned first (Graham 1969).
        """
        each = [(orthogonal_flops(shape, wide=wide), count) for shape, count in self.matrices]
        return max(sum(flops * count for flops, count in each) / ranks, max(each, default=(0,))[0])


class Moments:
    """Counts the bytes of an optimizer's states, stage by stage, with ``itemsize`` bytes per element of a state."""

    def __init__(self, optimizer: str, itemsize: int):
        self.optimizer, self.itemsize, self.bytes = optimizer, itemsize, 0
        self.factored: set[str] = set()  # parameters already counted, which two stages of a rank may share
        self._matrices: list[tuple[int, ...]] = []  # Muon: global shapes of orthogonalised matrices

    def add(self, stage: Filled, chunks: Sequence[int], index: Mapping[bool, int]) -> None:
        """Add the states of one rank's shard of each bucket of a stage.

        Args:
            chunks: elements of a shard of each bucket.
            index: shard index, for expert buckets (True) and others (False).
        """
        for bucket, chunk in zip(stage.buckets, chunks, strict=True):
            begin, start = index[bucket[0].expert] * chunk, 0
            for held in in_order(bucket):
                first, stop = max(start, begin) - start, min(start + held.box.numel, begin + chunk) - start
                self._add(held, first, stop)
                start += held.allocated

    @property
    def passing(self) -> int:
        """Maximum extra bytes during an update.

        For Muon: the communication buffer, the matrices of a round (`shoal.engine.optim.muon_distribution`), two copies
        of the largest matrix, and three of the size of its product with itself.
        """
        sides = [(n * m, min(n, m)) for *_, n, m in self._matrices]
        largest, side = max(sides, default=(0, 0))
        product = side * (side + APART)
        every = sum(map(math.prod, self._matrices))
        turn = min(AT_ONCE, every) + min(max(AT_ONCE, largest), every)
        return (turn + 2 * largest + 3 * product) * self.itemsize

    @property
    def orthogonal(self) -> Orthogonal:
        """Matrices of the stages that Muon orthogonalises."""
        found: Counter[tuple[int, int]] = Counter()
        for *stack, n, m in self._matrices:
            found[n, m] += math.prod(stack)
        return Orthogonal(sum(map(math.prod, self._matrices)), tuple(found.items()))

    @property
    def estimating(self) -> int:
        """Extra bytes during the backward of a curvature estimate.

        For sophia-h: the weights and the gradients of the previous pass (`shoal.training.step.curvature`), two values
        per element like its states.
        """
        return self.bytes if self.optimizer == "sophia-h" else 0

    def _add(self, held: LocalParameter, first: int, stop: int) -> None:
        """Add the states of a parameter's elements from ``first`` to ``stop``, if any."""
        orthogonal, elements = self.optimizer == "muon" and _hidden(held), max(0, stop - first)
        if orthogonal:
            self._matrices.append(held.global_shape)
        if self.optimizer == "adafactor":
            self.bytes += self._factored(held, elements) * self.itemsize
        elif self.optimizer == "adam8bit" and math.prod(held.global_shape) >= SMALLEST:
            self.bytes += 2 * (elements + self.itemsize * _scales(held, first, stop) if elements else 0)
        else:
            self.bytes += elements * (1 if orthogonal else STATES.get(self.optimizer, 2)) * self.itemsize

    def _factored(self, held: LocalParameter, elements: int) -> int:
        """Return Adafactor's bytes: full row and column sums of matrices; otherwise one value per element."""
        if len(held.global_shape) < 2:
            return elements
        known = held.alone and held.name in self.factored  # equal layers have the same name here
        self.factored.add(held.name)
        *experts, n, m = held.global_shape
        return 0 if known else math.prod(experts) * (n + m)


def least(optimizer: str, itemsize: int) -> int:
    """Return the minimum bytes of states per element, for any bucket boundaries."""
    if optimizer == "adam8bit":
        return 2  # 8-bit codes
    return itemsize * {**STATES, "muon": 1, "adafactor": 0}[optimizer]


def _hidden(held: LocalParameter) -> bool:
    """Return whether Muon orthogonalises a parameter (`shoal.engine.optim.muon.is_hidden_matrix`)."""
    return is_matrix(held.name, held.global_shape) and held.name.startswith("layers.")


def _scales(held: LocalParameter, first: int, stop: int) -> int:
    """Return the number of adam8bit blocks, full or partial, in some elements of a parameter."""
    count = 0
    for _, local in flat_range(held.box.shape, first, stop):
        box = local.to_global(held.box)
        left, right = box.offset[-1], box.offset[-1] + box.shape[-1]
        inner = min(right, -(-left // BLOCK) * BLOCK), max(left, right // BLOCK * BLOCK)
        blocks = sum(-(-b // BLOCK) - a // BLOCK for a, b in pairwise(sorted({left, *inner, right})))
        count += math.prod(box.shape[:-1]) * blocks
    return count


def in_order(bucket: Bucket) -> list[LocalParameter]:
    """Return the parameters in the order of `shoal.engine.parallel.zero.bucket`."""
    return sorted(bucket, key=lambda held: (held.partial, held.copies, len(held.global_shape) > 1))
