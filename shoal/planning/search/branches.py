"""Branches of the search: each work item (degrees, micro-batch, recomputation) with each pipeline, and a lower bound.

The bounds of all work items of one pipeline are computed together (`shoal.planning.search.outline`), so thousands cost
little more than one. The search then visits the branches in order of their bound.
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
from shoal.planning.search.space import Fields, LayoutSpace, pipeline_depth, pipelines, splits

SLACK = 1e-9  # relative rounding error between a bound and a time


class WorkItem(NamedTuple):
    """Layouts with the same FLOPs on each rank.

    Attributes:
        degrees: dp, tp, cp, ulysses, ep, etp, pp.
        way: the micro-batch, how it is split and what is recomputed.
        microbatches: micro-batches of each replica.
        plain: its stages, without ZeRO.
    """

    degrees: Fields
    way: Fields
    microbatches: int
    plain: StagePrices


class Pipe(NamedTuple):
    """A pipeline schedule with a split of the layers.

    Attributes:
        fields: the schedule, and stages on each rank.
        split: layers of the stages.
        outline: outline, shared by all pipelines with equal stage placement.
        order: properties of the schedule that bounds need.
    """

    fields: Fields
    split: Fields
    outline: Outline
    order: Order


class Branch(NamedTuple):
    """A work item with a pipeline.

    Attributes:
        least: lower bound of the step time in seconds, for any ZeRO sharding.
        number: index among all branches; breaks ties.
    """

    least: float
    number: int
    work: WorkItem
    pipe: Pipe

    @property
    def program(self) -> tuple:
        """Key that branches of the same program share."""
        return self.work.degrees["pp"], self.work.microbatches, *self.pipe.fields.values()


def branches(run: EstimatedRun, space: LayoutSpace, works: Iterable[WorkItem]) -> tuple[int, Iterator[Branch]]:
    """Return the number of branches, and an iterator in order of their lower bound that builds them lazily."""
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
    """Yield the branches of one pipeline's work items in order of their lower bound."""
    for i in np.argsort(least, kind="stable").tolist():
        yield Branch(float(least[i]), begin + i, works[i], pipe)


def _pipes(
    run: EstimatedRun, pp: int, fields: Fields, space: LayoutSpace, known: dict[tuple, Outline]
) -> Iterator[Pipe]:
    """Yield a schedule's pipelines by split of the layers; pipelines with equal placement share an outline."""
    schedule = SCHEDULES[fields["schedule"]]
    placement = schedule.placement(pp, schedule.virtual or fields["virtual_stages"])
    for split in splits(run.shape, pp, pipeline_depth(pp, fields), space):
        layers = split["stage_layers"] or ()
        copies = schedule.model_copies
        if (key := (placement, copies, layers)) not in known:
            known[key] = Outline(run.shape, Program(((),) * pp, placement, 0, model_copies=copies, layers=layers))
        yield Pipe(fields, split, known[key], Order.of(fields["schedule"]))
