"""What goes wrong in a cluster: slow ranks, slow links, noise; and which replicas of a pipeline it makes different."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shoal.base.errors import UsageError


@dataclass(frozen=True)
class Disturbance:
    """Factors on the times of single ranks and links, and noise on all.

    Ranks are global, numbered as in a mesh of axes (pp, dp, tp) from outer to inner; with one replica and tp 1 they
    are the pipeline ranks.

    Attributes:
        stragglers: from a rank to the factor on all that it computes, its optimizer too.
        slow_links: from two ranks to the factor on the messages between them, both ways.
        jitter: coefficient of variation of every computation: its time is multiplied by a log-normal variable with
            mean 1 and this standard deviation, drawn anew for each.
        seed: of the draws.
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


@dataclass(frozen=True)
class DistinctReplicas:
    """Those of a pipeline's replicas that differ; all others behave as the first.

    Attributes:
        count: [kinds] how many replicas each stands for.
        compute: [kinds, ranks] the factor on each pipeline rank's computations.
        links: for each kind, the factors on messages between two pipeline ranks (source, target).
    """

    count: np.ndarray
    compute: np.ndarray
    links: tuple[Mapping[tuple[int, int], float], ...]


def different_replicas(disturbance: Disturbance, pp: int, dp: int = 1, tp: int = 1) -> DistinctReplicas:
    """Tell apart as few replicas as behave differently; with jitter all do.

    The tensor-parallel ranks of one replica and stage move together, as slow as the slowest.

    Raises:
        UsageError: a straggler or a slow link that this world does not have.
    """
    world = f"the world has ranks 0 to {pp * dp * tp - 1} (pp {pp} x dp {dp} x tp {tp})"
    compute: dict[int, dict[int, float]] = {}
    links: dict[int, dict[tuple[int, int], float]] = {}
    for rank, factor in disturbance.stragglers.items():
        if not 0 <= rank < pp * dp * tp:
            raise UsageError(f"straggler {rank}: {world}")
        stage, replica = rank // (dp * tp), rank // tp % dp
        factors = compute.setdefault(replica, {})
        alone = tp == 1
        factors[stage] = max(factors.get(stage, factor if alone else 1.0), factor)
    for (a, b), factor in disturbance.slow_links.items():
        if not (0 <= a < pp * dp * tp and 0 <= b < pp * dp * tp):
            raise UsageError(f"slow link {a}-{b}: {world}")
        (i, x), (j, y) = ((rank // (dp * tp), rank % (dp * tp)) for rank in (a, b))
        if x != y or i == j:
            raise UsageError(
                f"slow link {a}-{b}: activations only pass between pipeline ranks of one replica; "
                f"rank {a} meets {', '.join(str(k * dp * tp + x) for k in range(pp) if k != i) or 'nobody'}"
            )
        slow = links.setdefault(x // tp, {})
        for pair in ((i, j), (j, i)):
            slow[pair] = max(slow.get(pair, factor if tp == 1 else 1.0), factor)
    return _group(disturbance, compute, links, pp, dp)


def _group(
    disturbance: Disturbance, compute: dict[int, dict[int, float]], links: dict[int, dict[tuple[int, int], float]],
    pp: int, dp: int,
) -> DistinctReplicas:  # fmt: skip
    groups: dict[tuple[object, ...], list[int]] = {}
    disturbed = range(dp) if disturbance.jitter else sorted(compute.keys() | links.keys())
    for replica in disturbed:
        own = (replica,) if disturbance.jitter else ()
        key = (*own, tuple(sorted(compute.get(replica, {}).items())), tuple(sorted(links.get(replica, {}).items())))
        groups.setdefault(key, []).append(replica)
    kinds = [(len(members), compute.get(members[0], {}), links.get(members[0], {})) for members in groups.values()]
    if undisturbed := dp - len(disturbed):
        kinds.insert(0, (undisturbed, {}, {}))
    factors = np.ones((len(kinds), pp))
    for kind, (_, slow, _) in enumerate(kinds):
        for rank, factor in slow.items():
            factors[kind, rank] = factor
    return DistinctReplicas(np.array([count for count, _, _ in kinds]), factors, tuple(slow for _, _, slow in kinds))
