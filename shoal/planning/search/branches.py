"""What a search branches on: every work (degrees, a micro-batch, what is recomputed) by every pipeline, with the least
time that a step of it can take.

The bounds of all works of one pipeline are found together (`shoal.planning.search.outline`), so that thousands cost
little more than one; the search then goes through them from the least on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import NamedTuple

import numpy as np

from shoal.pipeline.program import Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.run import EstimatedRun
from shoal.planning.search.outline import Order, Outline
from shoal.planning.search.space import Fields, LayoutSpace, depth_of, pipelines, splits

SLACK = 1e-9  # relative: a bound and a time may differ by as much in rounding


class WorkItem(NamedTuple):
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
    plain: StagePrices


class Pipe(NamedTuple):
    """A pipeline.

    Attributes:
        fields: the schedule, and stages on each rank.
        split: layers of the stages.
        outline: which all that place their stages alike share.
        order: what bounds ask of its schedule.
    """

    fields: Fields
    split: Fields
    outline: Outline
    order: Order


class Branch(NamedTuple):
    """A work by a pipeline.

    Attributes:
        least: seconds that a step takes at least, whatever ZeRO shards.
        number: which of all branches; it decides between equal ones.
    """

    least: float
    number: int
    work: WorkItem
    pipe: Pipe

    @property
    def program(self) -> tuple:
        """What branches of the same program share."""
        return self.work.degrees["pp"], self.work.microbatches, *self.pipe.fields.values()


def branches(run: EstimatedRun, space: LayoutSpace, works: Iterable[WorkItem]) -> tuple[int, Iterator[Branch]]:
    """How many there are, and every one, the least time first; most are never looked at, and not made before."""
    of_depth: dict[int, dict[int, list[WorkItem]]] = {}
    for work in works:
        of_depth.setdefault(work.degrees["pp"], {}).setdefault(work.microbatches, []).append(work)
    found, count = [], 0
    outlines: dict[tuple, Outline] = {}
    for pp, together in of_depth.items():
        every = [work for same in together.values() for work in same]
        linear = np.stack([work.plain.linear for work in every])
        hops, through = np.array([(work.plain.hop, work.microbatches) for work in every]).T
        bounds: dict[tuple[Outline, Order], np.ndarray] = {}
        pipes: dict[tuple, list[Pipe]] = {}
        for microbatches, same in together.items():
            for fields in pipelines(pp, microbatches, run.shape.layers, space):
                key = tuple(fields.values())
                if key not in pipes:
                    pipes[key] = list(_pipes(run, pp, fields, space, outlines))
                for pipe in pipes[key]:
                    both = pipe.outline, pipe.order
                    if both not in bounds:
                        bounds[both] = pipe.outline.bounds(linear, hops, through, pipe.order) * (1 - SLACK)
                    found.append(_in_order(bounds[both][through == microbatches], count, same, pipe))
                    count += len(same)
    return count, merge(*found)


def _in_order(least: np.ndarray, begin: int, works: Sequence[WorkItem], pipe: Pipe) -> Iterator[Branch]:
    """Branches of works by one pipeline, the least time first."""
    for i in np.argsort(least, kind="stable").tolist():
        yield Branch(float(least[i]), begin + i, works[i], pipe)


def _pipes(
    run: EstimatedRun, pp: int, fields: Fields, space: LayoutSpace, known: dict[tuple, Outline]
) -> Iterator[Pipe]:
    """A schedule's pipelines, by the layers of the stages; the outlines of those that place them alike are the same."""
    schedule = SCHEDULES[fields["schedule"]]
    placement = schedule.placement(pp, schedule.virtual or fields["virtual_stages"])
    for split in splits(run.shape, pp, depth_of(pp, fields), space):
        layers = split["stage_layers"] or ()
        copies = schedule.model_copies
        if (key := (placement, copies, layers)) not in known:
            known[key] = Outline(run.shape, Program(((),) * pp, placement, 0, model_copies=copies, layers=layers))
        yield Pipe(fields, split, known[key], Order.of(fields["schedule"]))
