"""Cluster disturbances (slow ranks, slow links, noise), and the pipeline replicas that they make different."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shoal.base.errors import UsageError


@dataclass(frozen=True)
class Disturbance:
    """Factors on the times of single ranks and links, and noise on all computations.

    Ranks are global, numbered as in a mesh of axes (pp, dp, tp) from outer to inner. With one replica and tp 1 they are
    the pipeline ranks.

    Attributes:
        stragglers: map from a rank to the factor on all its computing times, including its optimizer.
        slow_links: map from two ranks to the factor on the messages between them, in both directions.
        jitter: coefficient of variation of every computation: its time is multiplied by an independent log-normal
            variable with mean 1 and this standard deviation.
        seed: random seed of the jitter.
    """

    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, factors in (("straggler", self.stragglers), ("slow link", self.slow_links)):
            for who, factor in factors.items():
                if not (np.isfinite(factor) and factor > 0):
                    raise UsageError(f"{name} {who}: the factor {factor} must be above 0; 2 is twice as slow")
        if not 0 <= self.jitter <= 1:
            raise UsageError(f"jitter {self.jitter}: allowed are 0 to 1, the standard deviation over the mean")


def different_replicas(disturbance: Disturbance, pp: int, dp: int = 1, tp: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Group pipeline replicas into the fewest kinds that behave differently; with jitter all differ.

    The tensor-parallel ranks of one replica and stage run in lockstep, at the speed of the slowest.

    Returns:
        [kinds] the number of replicas of each kind, undisturbed ones first; and [kinds, pp, pp] the factor on messages
        from one pipeline rank to another, with the factor on a rank's computations on the diagonal.

    Raises:
        UsageError: a straggler or a slow link does not exist in this world.
    """
    world = f"the world has ranks 0 to {pp * dp * tp - 1} (pp {pp} x dp {dp} x tp {tp})"
    slow: dict[int, dict[tuple[int, int], float]] = {}  # by replica: factors by source and target

    def note(replica: int, source: int, target: int, factor: float) -> None:
        known = slow.setdefault(replica, {})
        known[source, target] = max(known.get((source, target), factor if tp == 1 else 1.0), factor)

    for rank, factor in disturbance.stragglers.items():
        if not 0 <= rank < pp * dp * tp:
            raise UsageError(f"straggler {rank}: {world}")
        note(rank // tp % dp, rank // (dp * tp), rank // (dp * tp), factor)
    for (a, b), factor in disturbance.slow_links.items():
        if not (0 <= a < pp * dp * tp and 0 <= b < pp * dp * tp):
            raise UsageError(f"slow link {a}-{b}: {world}")
        (i, x), (j, y) = (divmod(rank, dp * tp) for rank in (a, b))
        if x != y or i == j:
            raise UsageError(
                f"slow link {a}-{b}: activations only pass between pipeline ranks of one replica; "
                f"rank {a} meets {', '.join(str(k * dp * tp + x) for k in range(pp) if k != i) or 'none'}"
            )
        note(x // tp, i, j, factor)
        note(x // tp, j, i, factor)
    alike = Counter((r if disturbance.jitter else -1, tuple(sorted(slow.get(r, {}).items()))) for r in range(dp))
    kinds = sorted(alike, key=lambda kind: not disturbance.jitter and bool(kind[1]))
    factors = np.ones((len(kinds), pp, pp))
    for i, (_, own) in enumerate(kinds):
        for pair, factor in own:
            factors[i, *pair] = factor
    return np.array([alike[kind] for kind in kinds]), factors
