"""What a search branches on: every work (degrees, a micro-batch, what is recomputed) by every pipeline, with the least
time that a step of it can take.

The bounds of all works of one pipeline are found together (`shoal.plan.outline`), so that thousands cost little more
than one; the search then goes through them from the least on.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from shoal.pipeline.program import Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.plan.bounds import Order
from shoal.plan.outline import Outline
from shoal.plan.run import Run
from shoal.plan.space import Fields, Space, depth_of, pipelines, splits
from shoal.plan.stage import Stages

SLACK = 1e-9  # relative: a bound and a time may differ by as much in rounding


class Work(NamedTuple):
    """What has the same FLOPs on each rank.

    Attributes:
        degrees: dp, tp, cp, ulysses, ep, etp, pp.
        way: the micro-batch, what of it is split and what is computed again.
        microbatches: of each replica.
        plain: its stages, without ZeRO.
    """

    degrees: Fields
    way: Fields
    microbatches: int
    plain: Stages


class Branch(NamedTuple):
    """A work by a pipeline.

    Attributes:
        least: seconds that a step takes at least, whatever ZeRO shards.
        work: which.
        pipe: the schedule, and stages on each rank.
        split: layers of the stages.
        outline: the pipeline's, which all that place their stages alike share.
        order: what bounds ask of its schedule.
    """

    least: float
    work: Work
    pipe: Fields
    split: Fields
    outline: Outline
    order: Order

    @property
    def program(self) -> tuple:
        """What branches of the same program share."""
        return self.work.degrees["pp"], self.work.microbatches, *self.pipe.values()


def branches(run: Run, space: Space, works: Iterable[Work]) -> list[Branch]:
    """Every one, the least time first."""
    together: dict[tuple[int, int], list[Work]] = {}
    for work in works:
        together.setdefault((work.degrees["pp"], work.microbatches), []).append(work)
    found: list[Branch] = []
    outlines: dict[tuple, Outline] = {}
    for (pp, microbatches), same in together.items():
        linear = np.stack([work.plain.linear for work in same])
        hops = np.array([work.plain.hop for work in same])
        bounds: dict[tuple[Outline, Order], list[float]] = {}
        for pipe in pipelines(pp, microbatches, run.shape.layers, space):
            order = Order.of(pipe["schedule"], microbatches)
            for split in splits(run.shape, pp, depth_of(pp, pipe), space):
                outline = _outline(run, pp, pipe, split, outlines)
                if (outline, order) not in bounds:
                    bounds[outline, order] = (outline.bounds(linear, hops, order) * (1 - SLACK)).tolist()
                rows = zip(bounds[outline, order], same, strict=True)
                found += [Branch(seconds, work, pipe, split, outline, order) for seconds, work in rows]
    return sorted(found, key=itemgetter(0))


def _outline(run: Run, pp: int, pipe: Fields, split: Fields, known: dict[tuple, Outline]) -> Outline:
    """The outline of a pipeline's programs."""
    schedule, layers = SCHEDULES[pipe["schedule"]], split["stage_layers"] or ()
    key = (schedule.placement(pp, schedule.virtual or pipe["virtual_stages"]), schedule.copies, layers)
    if key not in known:
        placement, copies, _ = key
        known[key] = Outline.of(run.shape, Program(((),) * pp, placement, 0, copies=copies, layers=layers))
    return known[key]
