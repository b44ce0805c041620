"""The outer level of Alpa (Zheng et al. 2022, section 5.2): cut layers into stages on parts of the cluster.

A pipeline of stages that take t_1 .. t_S a micro-batch, forward and backward, takes for B micro-batches

    T = t_1 + ... + t_S + (B - 1) max t_i                                                             (equation 2)

For each limit t_max of the stages' times, a dynamic program finds the least sum:

    F(s, k, d) = min over j, (n, m) of  t(k, j, (n, m), s) + F(s - 1, j + 1, d - n m)                 (equation 3)

with s the stages left and so, in 1F1B, the micro-batches that the next one keeps. Parts of the cluster are 1, 2, 4, ...
devices of a node, each a divisor of the next, or complete nodes: placed from the largest on, they always fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf

Part = tuple[int, int]
"""Nodes, and devices per node."""

Cost = Callable[[int, int, Part, int], float]
"""Seconds of a micro-batch of layers [first, last) on a part, with a number of stages left; inf if it does not fit."""


@dataclass(frozen=True)
class AssignedStage:
    """Layers [first, last) on a part of the cluster."""

    first: int
    last: int
    part: Part
    seconds: float

    @property
    def devices(self) -> int:
        return self.part[0] * self.part[1]


def list_parts(nodes: int, per_node: int) -> list[Part]:
    """List the parts that a stage may have.

    >>> list_parts(3, 8)
    [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8)]
    >>> list_parts(2, 6)
    [(1, 1), (1, 2), (1, 6), (2, 6)]
    """
    inside = [(1, 2**k) for k in range(per_node.bit_length()) if 2**k < per_node and per_node % 2**k == 0]
    return [*inside, *((n, per_node) for n in range(1, nodes + 1))]


def latency(stages: tuple[AssignedStage, ...], microbatches: int) -> float:
    """Return T of equation 2."""
    seconds = [stage.seconds for stage in stages]
    return sum(seconds) + (microbatches - 1) * max(seconds)


def find_pipeline(
    cost: Cost, layers: int, nodes: int, per_node: int, microbatches: int, most: int
) -> tuple[AssignedStage, ...] | None:
    """Find the fastest stages, at most ``most``, on all devices; None if nothing fits."""
    choices, most = list_parts(nodes, per_node), min(most, layers)
    cost = cache(cost)
    times = sorted({
        t for s in range(1, most + 1) for k in range(layers) for j in range(k + 1, layers + 1) for part in choices
        if _is_possible(s, j, layers, nodes * per_node - part[0] * part[1]) and (t := cost(k, j, part, s)) < inf
    })  # fmt: skip
    best, least = None, inf
    for limit in times:
        if (microbatches - 1) * limit >= least:
            break
        found = _fastest(cost, layers, nodes * per_node, choices, most, limit)
        if found is not None and (total := latency(found, microbatches)) < least:
            best, least = found, total
    return best


def _is_possible(stages: int, last: int, layers: int, devices: int) -> bool:
    """Whether a stage leaves a layer and a device for each later one; the last stage takes all layers."""
    later = stages - 1
    return layers - last >= later and devices >= later and (later > 0 or last == layers)


def _fastest(
    cost: Cost, layers: int, devices: int, choices: list[Part], most: int, limit: float
) -> tuple[AssignedStage, ...] | None:
    """Find the stages with the least sum, each within a time limit."""

    @cache
    def rest(s: int, k: int, d: int) -> tuple[float, tuple[AssignedStage, ...]]:
        if s == 0:
            return (0.0, ()) if k == layers and d == 0 else (inf, ())
        found: tuple[float, tuple[AssignedStage, ...]] = (inf, ())
        for part in choices:
            left = d - part[0] * part[1]
            for j in range(k + 1, layers + 1):
                if left >= 0 and _is_possible(s, j, layers, left) and (t := cost(k, j, part, s)) <= limit:
                    later, stages = rest(s - 1, j, left)
                    if t + later < found[0]:
                        found = (t + later, (AssignedStage(k, j, part, t), *stages))
        return found

    total, stages = min((rest(s, 0, devices) for s in range(1, most + 1)), key=lambda found: found[0])
    return stages if total < inf else None
