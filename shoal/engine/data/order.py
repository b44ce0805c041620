"""Shuffled sample order: a pure function of (seed, global sample index), in constant memory.

Epoch ``e`` visits sample ``P_e(i)`` at position ``i``, where ``P_e`` is a permutation of the samples chosen by (seed,
e). No list of samples is stored: ``P_e`` is a Feistel network, a bijection for any round function (Luby & Rackoff
1988), on the smallest square domain that holds all samples. Values outside of the samples are permuted again until
they fall inside (cycle-walking: Black & Rogaway 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """Map from global indices to samples.

    Attributes:
        samples: number of samples in one epoch, at least 1.
        seed: any non-negative integer; different seeds give unrelated orders.
    """

    samples: int
    seed: int

    def __call__(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the samples, each in ``0 .. samples - 1``, at global indices ``[n]``: int64 ``[n]``.

        Any ``samples`` consecutive indices from a multiple of ``samples`` give each sample once.

        Raises:
            ValueError: an index is negative.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if (indices < 0).any():
            raise ValueError(f"sample index {indices.min()} is negative")
        epoch, position = np.divmod(indices.astype(np.uint64), np.uint64(self.samples))
        key = _mix(epoch + _mix(np.uint64(self.seed % 2**64)))  # [n], one key per epoch
        half = np.uint64(max(1, ((self.samples - 1).bit_length() + 1) // 2))
        sample = _feistel(position, key, half)
        while (outside := sample >= self.samples).any():
            sample[outside] = _feistel(sample[outside], key[outside], half)
        return sample.astype(np.int64)


def _feistel(value: np.ndarray, key: np.ndarray, half: np.uint64) -> np.ndarray:
    """Apply a keyed bijection of ``0 .. 4**half - 1``: each round mixes one half of the bits into the other."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mix(right + _mix(key + np.uint64(number))) & mask)
    return (left << half) | right


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """Apply splitmix64 (Steele et al. 2014), a bijection of 64 bits; every input bit affects every output bit."""
    mixed: np.ndarray = np.atleast_1d(value) + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap, as intended; scalars warn
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class OverlappingShards:
    """Samples of one replica that reads its own part of each epoch, which extends into the next replica's part.

    Shared samples keep replicas that seldom exchange weights closer to each other.

    Attributes:
        overlap: how far a part extends into the next, as a fraction of its length.
    """

    replicas: int
    index: int
    samples: int
    overlap: float

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the global sample indices [n] of positions [n] in the replica's own stream, from 0."""
        first = self.index * self.samples // self.replicas
        own = max(1, (self.index + 1) * self.samples // self.replicas - first)
        length = min(self.samples, own + round(own * self.overlap))
        epoch, inside = np.divmod(positions, length)
        return epoch * self.samples + (first + inside) % self.samples
