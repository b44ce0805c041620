"""Slicing of sequences for TeraPipe: the dynamic program of Li et al. 2021, section 3.3.

With p equal stages and slices that take t_1 ... t_M on each, a pipeline takes

    T = sum t_i + (p - 1) max t_i                                              (Li et al. 2021, equation 4)

Short slices make the second term small. The first term grows with the number of slices, since a short slice takes more
time per token. A later slice attends to more keys and takes longer, so the best slices get shorter towards the end of
the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shoal.spec.catalog import ModelShape

Times = Callable[[int, int], float]
"""Function of (tokens of a slice, tokens before it) that returns the slice's time on one stage, in any unit."""

RIDGE = 256
"""Tokens below which a slice takes no less time, because reading the weights dominates: FLOP/s of matrix products over
bytes/s of memory, at 2 FLOPs and 2 bytes per weight. 156 on an A100, 295 on an H100 (bf16, data sheets)."""

CUTS = 64
"""Maximum number of cut positions; the gain from more is below the accuracy of the time model."""


def pipeline_time(lengths: Sequence[int], times: Times, stages: int, microbatches: int = 1) -> float:
    """Return T above for micro-batches that are all cut into these slices and run consecutively."""
    each = [times(length, sum(lengths[:i])) for i, length in enumerate(lengths)]
    return microbatches * sum(each) + (stages - 1) * max(each)


def best_slices(cuts: Sequence[int], times: Times, stages: int, microbatches: int = 1) -> tuple[int, ...]:
    """Return the slices with the smallest `pipeline_time`.

    For each limit t on the longest slice, find the cheapest slices within it by a dynamic program over the cut
    positions (algorithm 1). Stop when (p - 1) t alone exceeds the best total.

    Args:
        cuts: possible cut positions, increasing, from 0 to the sequence length.
        times: times of a slice on the slowest stage.

    Returns:
        The slices' lengths, in order.
    """
    cost = np.full((len(cuts), len(cuts)), np.inf)  # [i, j]: cost of the slice from cut i to cut j
    for i, start in enumerate(cuts):
        for j in range(i + 1, len(cuts)):
            cost[i, j] = times(cuts[j] - start, start)
    weight = (stages - 1) / microbatches
    least, _ = _cheapest(cost)
    best, chosen = np.inf, []
    for longest in np.unique(cost[np.isfinite(cost)]):
        if least + weight * longest >= best:
            break
        total, slices = _cheapest(np.where(cost <= longest, cost, np.inf))
        if total + weight * longest < best:
            best, chosen = total + weight * longest, slices
    return tuple(cuts[j] - cuts[i] for i, j in chosen)


def _cheapest(cost: np.ndarray) -> tuple[float, list[tuple[int, int]]]:
    """Return the smallest cost from the first cut to the last, and its slices as pairs of cuts."""
    total, before = np.zeros(len(cost)), np.zeros(len(cost), dtype=int)
    for j in range(1, len(cost)):
        ways = total[:j] + cost[:j, j]
        before[j] = ways.argmin()
        total[j] = ways[before[j]]
    slices, j = [], len(cost) - 1
    while j and np.isfinite(total[-1]):
        slices.append((int(before[j]), j))
        j = int(before[j])
    return float(total[-1]), slices[::-1]


def flops(shape: ModelShape, ridge: int = RIDGE) -> Times:
    """Return a time measure: the forward FLOPs of one layer, without masked scores.

    The matrix products of a slice shorter than ``ridge`` tokens count as ``ridge`` tokens, because they take equally
    long.
    """
    matrices, attention = 2 * shape.layer_matrices(0), 2 * shape.heads * (shape.query_dim + shape.value_dim)
    return lambda length, before: max(length, ridge) * matrices + attention * length * (before + length / 2)


def fit_times(measured: Sequence[tuple[int, int, float]]) -> Times:
    """Fit times to measurements by least squares on relative errors, in the paper's form (Li et al. 2021, 3.3).

    A first slice has a constant and a linear part. Preceding tokens add a part that is linear in both lengths: t(l, c)
    = a + b l + d l^2 + [c > 0] (e + f l + g c + h l c).

    Args:
        measured: (tokens of the slice, tokens before it, time) of at least as many slices as coefficients.
    """

    def features(length: int, before: int) -> list[float]:
        seen = float(before > 0)
        return [1, length, length**2, seen, seen * length, before, length * before]

    rows = np.array([features(length, before) for length, before, _ in measured], dtype=float)
    rows /= np.array([[time] for *_, time in measured])
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1
    solution = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)[0] / scale
    return lambda length, before: max(0.0, float(np.dot(features(length, before), solution)))


def even_slices(tokens: int, slices: int, multiple: int = 1) -> tuple[int, ...]:
    """Return slice lengths as equal as possible, in multiples of ``multiple``; longer ones first, as they see fewer
    keys.

    >>> even_slices(10, 4), even_slices(16, 3, multiple=4)
    ((3, 3, 2, 2), (8, 4, 4))
    """
    each, longer = divmod(tokens // multiple, slices)
    return tuple((each + (i < longer)) * multiple for i in range(slices))


def places(tokens: int, multiple: int = 1) -> list[int]:
    """Return the possible cut positions: at most `CUTS` equal steps, on multiples of ``multiple``."""
    units = tokens // multiple
    steps = min(CUTS, units)
    return [round(i * units / steps) * multiple for i in range(steps + 1)]
