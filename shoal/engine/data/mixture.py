"""Mixture of sources: each global sample index belongs to one source, by a pure function of (weights, seed, index)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from shoal.base.errors import UsageError
from shoal.engine.data.order import SampleOrder

BLOCK = 10_000
"""Consecutive samples in which each source has exactly its share."""


@dataclass(frozen=True)
class _Segment:
    """Samples with the same weights: between ends of sources, and scheduled changes.

    Attributes:
        start: global index of its first sample.
        quotas: samples of each source in a block, [sources]; 0 for those that have ended.
        drawn: samples of each source before ``start``, [sources].
    """

    number: int
    start: int
    quotas: np.ndarray
    drawn: np.ndarray


class Blend:
    """Map from global sample indices to (source, sample of the source).

    The sources of a block of samples are a permutation of exact shares (`SampleOrder`). The samples of a source follow
    each other, so every source is read in its own order, epoch after epoch. After the last sample of a source with a
    limit, the others share its place by their weights. Memory does not depend on the number of samples.

    Args:
        weights: relative number of samples of each source.
        limits: samples after which a source has ended; None for no limit.
        later: other weights by the sample of the run from which on they hold, for each source that has any.

    Raises:
        UsageError: a weight is always 0, or less than 1 / `BLOCK` of the sum; or at some sample no source is left.
    """

    def __init__(
        self, weights: Mapping[str, float], limits: Mapping[str, int | None], seed: int,
        later: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
    ) -> None:
        self.names, self._seed = tuple(weights), seed
        self._weights = [{0: weight} | dict(later.get(name, {})) for name, weight in weights.items()]
        for name, each in zip(self.names, self._weights, strict=True):
            if not any(each.values()):
                raise UsageError(f"data.mixture.{name}.weight = 0, without a later one.\n  Leave {name} out.")
        self._changes = sorted({start for each in self._weights for start in each})
        self._limits = np.array([np.iinfo(np.int64).max if limits[n] is None else limits[n] for n in self.names])
        self._shares = lru_cache(maxsize=16)(self._compute_block)
        none = np.zeros(len(self.names), dtype=np.int64)
        self._segments = [_Segment(0, 0, self._quotas(0, none), none)]
        while (following := self._next(self._segments[-1])) is not None:
            self._segments.append(following)
        self._starts = np.array([segment.start for segment in self._segments])

    def __call__(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source [n] and its sample [n] at global indices [n], int64; samples continue over epochs."""
        indices = np.asarray(indices, dtype=np.int64)
        sources, samples = np.empty_like(indices), np.empty_like(indices)
        segments = np.searchsorted(self._starts, indices, side="right") - 1
        for place, (number, index) in enumerate(zip(segments.tolist(), indices.tolist(), strict=True)):
            segment = self._segments[number]
            block, inside = divmod(index - segment.start, BLOCK)
            order, ranks = self._shares(number, block)
            source = sources[place] = order[inside]
            samples[place] = segment.drawn[source] + block * segment.quotas[source] + ranks[inside]
        return sources, samples

    def drawn(self, index: int) -> dict[str, int]:
        """Return the number of samples of each source before a global index."""
        segment = self._segments[int(np.searchsorted(self._starts, index, side="right")) - 1]
        return dict(zip(self.names, self._drawn(segment, index).tolist(), strict=True))

    def _drawn(self, segment: _Segment, index: int) -> np.ndarray:
        """Return the number of samples of each source before a global index of a segment, [sources]."""
        block, inside = divmod(index - segment.start, BLOCK)
        order, _ = self._shares(segment.number, block)
        return segment.drawn + block * segment.quotas + np.bincount(order[:inside], minlength=len(self.names))

    def _quotas(self, index: int, drawn: np.ndarray) -> np.ndarray:
        """Divide a block by the weights, at an index, of the sources that have not ended: largest remainders."""
        current = np.array([each[max(start for start in each if start <= index)] for each in self._weights])
        weights = np.where(drawn < self._limits, current, 0)
        if not weights.any():
            raise UsageError(
                f"data.mixture: from sequence {index:,} on no source is left: all have ended by epochs, or have the "
                "weight 0.\n  Leave epochs out of one, which fills the rest."
            )
        exact = weights / weights.sum() * BLOCK
        small = (weights > 0) & (exact < 1)
        if small.any():
            name = self.names[int(small.argmax())]
            raise UsageError(
                f"data.mixture.{name}.weight = {weights[small.argmax()]:g} is less than 1 / {BLOCK:,} of the sum "
                f"of the weights.\n  Make it larger, or leave {name} out."
            )
        quotas = np.floor(exact).astype(np.int64)
        rest = np.argsort(quotas - exact, kind="stable")[: BLOCK - quotas.sum()]
        quotas[rest] += 1
        return quotas

    def _compute_block(self, number: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample of a block, and how many of this source precede it there: [BLOCK] each."""
        quotas = self._segments[number].quotas
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
        slots = SampleOrder(BLOCK, self._seed + number)(positions)
        order = np.searchsorted(np.cumsum(quotas), slots, side="right")
        ranks = np.empty(BLOCK, dtype=np.int64)
        for source in range(len(self.names)):
            mine = order == source
            ranks[mine] = np.arange(mine.sum())
        return order, ranks

    def _next(self, segment: _Segment) -> _Segment | None:
        """Return the segment after the first end of a source in ``segment``, or change of weights; None without one."""
        starts = [change for change in self._changes if change > segment.start][:1]
        ending = (segment.quotas > 0) & (self._limits < np.iinfo(np.int64).max)
        if ending.any():
            left = self._limits - segment.drawn
            block = int((left[ending] // segment.quotas[ending]).min())
            order, ranks = self._shares(segment.number, block)
            samples = block * segment.quotas[order] + ranks
            beyond = ending[order] & (samples >= left[order])
            starts.append(segment.start + block * BLOCK + int(beyond.argmax()))
        if not starts:
            return None
        start = min(starts)
        drawn = self._drawn(segment, start)
        return _Segment(segment.number + 1, start, self._quotas(start, drawn), drawn)
