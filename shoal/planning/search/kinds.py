"""Kinds of layouts: how complex they are, whether they leave memory free, and which of them a plan lists.

A search keeps the fastest layout of each complexity, of all that fit and of those that fit with a margin. Layouts whose
times are closer than the error of estimates are ties, and the simplest of them is recommended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import Any

import numpy as np

from shoal.planning.estimate import run_accuracy
from shoal.planning.run import EstimatedRun
from shoal.planning.search.plan import PricedLayout, order
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.layout import Layout

TIE = 0.05
"""Relative difference of two step times that estimates cannot rank: the error of the ratio of two published times of
one model on one cluster, in the median of a family's pairs and of families (`shoal validate` prints it: 5.4 %)."""
ACROSS = 0.14
"""The same for layouts with tensor parallelism across nodes against others, for 80 % of the pairs (14.5 %): mostly the
estimate across nodes is too short, and in none of these families was such a layout measured to be fastest."""
SLOWEST = 1.2
"""Layouts that take longer than this, relative to the fastest, are not listed; longer than (1 + ACROSS) (1 + TIE)."""
MOST_COMPLEX = 26
ACROSS_NODES = 13  # complexity that makes a mesh more complex than any with tensor parallelism inside nodes
SCHEDULES = {"1f1b": 0, "gpipe": 0, "interleaved-1f1b": 1, "looped-bfs": 1, "zb-h1": 2}
"""Complexity of a pipeline schedule; 3 for all others, which split backwards or hold a model twice."""
SLACK = 1e-9  # relative rounding error between a bound and a time


def mesh_complexity(fields: Mapping[str, Any], cluster: Cluster) -> int:
    """Return the complexity of the mesh of a layout: one for each axis but dp, and more for what is unusual."""
    axes = sum(fields[axis] > 1 for axis in ("tp", "cp", "ep", "pp"))
    across = ACROSS_NODES * (cluster.per_node % fields["tp"] > 0)  # layers wait for the network between nodes
    return axes + across + (fields["cp"] > fields["ulysses"] > 1)


def pipeline_complexity(fields: Mapping[str, Any], pp: int) -> int:
    """Return the complexity of a schedule and of the split of layers."""
    return SCHEDULES.get(fields["schedule"], 3) + (fields["stage_layers"] is not None) if pp > 1 else 0


def shard_complexity(fields: Mapping[str, Any], pp: int) -> int:
    """Return the complexity that the sharding of state over replicas adds."""
    unusual = fields["zero"] >= 2 and pp > 1
    return unusual + (fields.get("zero_shard") is not None) + (not fields.get("reshard_after_forward", True))


def complexity(fields: Mapping[str, Any], cluster: Cluster) -> int:
    """Return the complexity of a layout, of which ``fields`` has all that are searched."""
    pp = fields["pp"]
    return mesh_complexity(fields, cluster) + pipeline_complexity(fields, pp) + shard_complexity(fields, pp)


class Shelf:
    """The fastest layouts found so far: of each complexity, or of all.

    Args:
        run: its layout is ignored.
        diverse: keep the fastest of each complexity; otherwise only the fastest.
        within: seconds of a step; slower layouts are not kept.
    """

    def __init__(self, run: EstimatedRun, *, diverse: bool, within: float = np.inf):
        self.cluster, self.diverse = run.cluster, diverse
        # Part of a device's memory within which a layout has a margin: it also fits at the upper end of its interval.
        self.part = exp(-run_accuracy("memory", run).width)
        self.cells: dict[tuple[int, int], PricedLayout] = {}  # by complexity and whether they fit with a margin
        # [complexities, 2] seconds of a layout that would be kept, of any that fits and with a margin.
        self.limits = np.full((MOST_COMPLEX + 1, 2), within)
        if not diverse:
            self.limits[:, 1] = -np.inf

    @property
    def limit(self) -> float:
        """Seconds of the slowest layout that would be kept."""
        return float(self.limits.max())

    def level(self, layout: Layout) -> int:
        """Return the complexity of a layout, or 0 if only the fastest is kept."""
        return complexity(vars(layout), self.cluster) if self.diverse else 0

    def keep(self, found: PricedLayout, capacity: float) -> None:
        """Keep a layout that fits into ``capacity`` bytes, if it is the fastest of its complexity."""
        level = self.level(found.layout)
        for margin in range(1 + (self.diverse and found.memory.reserved <= self.part * capacity)):
            known = self.cells.get((level, margin))
            if known is None or order(found) < order(known):
                self.cells[level, margin] = found
                limits = self.limits[level:, margin]
                np.minimum(limits, found.seconds * (1 + SLACK), out=limits)
        np.minimum(self.limits, SLOWEST * found.seconds, out=self.limits)

    def list(self) -> list[PricedLayout]:
        """Return the recommended layout, the fastest, the fastest with a margin, and simpler ones, each with its role.

        The recommended layout is the simplest of those that tie with the fastest. Simpler layouts are slower; one that
        ties with an even simpler one is left out.
        """
        if not self.cells:
            return []
        cells = sorted(self.cells.items(), key=lambda cell: (cell[0][0], -cell[0][1], order(cell[1])))
        ranked = [found for _, found in cells]  # the simplest first
        fastest = min(ranked, key=order)
        if not self.diverse:
            return [fastest]
        chosen = self._simplest_tie(ranked)
        rows = {str(chosen.layout): chosen._replace(role="recommended")}
        rows.setdefault(str(fastest.layout), fastest._replace(role="fastest"))
        roomy = [found for (_, margin), found in cells if margin and found.seconds <= SLOWEST * fastest.seconds]
        if roomy and chosen not in roomy:
            first = self._simplest_tie(roomy)
            rows.setdefault(str(first.layout), first._replace(role="more memory free"))
        simpler, before = [], np.inf
        most = next(level for (level, _), found in cells if found is chosen)
        for (level, _), found in cells:
            if level < most and found.seconds <= SLOWEST * fastest.seconds and found.seconds * (1 + TIE) <= before:
                simpler.append(found._replace(role="simpler"))
                before = found.seconds
        for found in reversed(simpler):
            rows.setdefault(str(found.layout), found)
        return list(rows.values())

    def _simplest_tie(self, ranked: Sequence[PricedLayout]) -> PricedLayout:
        """Return the first of the layouts that tie with the fastest."""
        longest = [found.seconds * (1 + ACROSS * (self.level(found.layout) >= ACROSS_NODES)) for found in ranked]
        limit = (1 + TIE) * min(longest)
        return next(found for found, seconds in zip(ranked, longest, strict=True) if seconds <= limit)
