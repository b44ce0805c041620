"""Segments of sequences that attend to themselves alone, as the lengths that FlashAttention takes instead of a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.engine.streams import to_device

_ROUND = 128  # rows of a block of the kernel: its grid has the longest segment in blocks
_LEAST = 16  # segments


class Segments(NamedTuple):
    """Cumulative lengths of segments, as `flash_attention` takes them.

    Attributes:
        q_ends, k_ends: [n + 1] int32 on the device. n is rounded up to a power of two from 16 on by empty segments, as
            code is compiled for each size.
        longest: [2] int32 on the host.
    """

    q_ends: Tensor
    k_ends: Tensor
    longest: Tensor

    @classmethod
    def from_lengths(cls, lengths: Sequence[tuple[int, int]], device: torch.device) -> Segments:
        """Return segments of the given numbers of queries and of keys, copied to a device without waiting for it.

        >>> Segments.from_lengths([(2, 3), (1, 1)], torch.device("cpu")).k_ends[:4].tolist()
        [0, 3, 4, 4]
        """
        ends = np.zeros((2, 1 + max(_LEAST, 1 << (len(lengths) - 1).bit_length())), dtype=np.int32)
        ends[:, 1 : len(lengths) + 1] = np.cumsum(np.array(lengths, dtype=np.int32), axis=0).T
        ends[:, len(lengths) + 1 :] = ends[:, len(lengths), None]
        longest = -(-np.diff(ends).max(axis=1) // _ROUND) * _ROUND
        q_ends, k_ends = to_device(torch.from_numpy(ends), device)
        return cls(q_ends, k_ends, torch.from_numpy(longest.astype(np.int32)))


def document_segments(documents: Tensor, s: int, device: torch.device) -> Segments:
    """Return the documents of the last s tokens of each sequence as segments.

    Args:
        documents: [b, t] ascending document numbers, on the host. A document without one of the s tokens is a segment
            without queries.
    """
    found = documents.numpy()
    t = found.shape[1]
    lengths: list[tuple[int, int]] = []
    for row in found:
        starts = np.concatenate(([0], np.flatnonzero(np.diff(row)) + 1, [t]))
        queries = np.diff(np.maximum(starts, t - s))
        lengths += zip(queries.tolist(), np.diff(starts).tolist(), strict=True)
    return Segments.from_lengths(lengths, device)
