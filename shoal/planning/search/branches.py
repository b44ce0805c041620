"""What a search branches on: every work (degrees, a micro-batch, what is recomputed) by every pipeline, with the least
time that a step of it can take.

The bounds of all works of one pipeline are found together (`shoal.planning.search.outline`), so that thousands cost
little more than one; the search then goes through them from the least on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shoal.pipeline.program import Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.run import EstimatedRun
from shoal.planning.search.bounds import Order
from shoal.planning.search.outline import Outline
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
    work: WorkItem
    pipe: Fields
    split: Fields
    outline: Outline
    order: Order

    @property
    def program(self) -> tuple:
        """What branches of the same program share."""
        return self.work.degrees["pp"], self.work.microbatches, *self.pipe.values()


class _Together(NamedTuple):
    """Branches of works by one pipeline, with `Branch`'s attributes of all.

    Attributes:
        least: [works] seconds.
    """

    least: np.ndarray
    works: Sequence[WorkItem]
    pipe: Fields
    split: Fields
    outline: Outline
    order: Order


class Branches:
    """Branches in the order of their least times. Most are never looked at, and none is made before it is.

    Attributes:
        least: seconds of each.
    """

    def __init__(self, together: Sequence[_Together]):
        self._together = together
        self._ends = np.cumsum([len(group.works) for group in together])
        least = np.concatenate([group.least for group in together]) if together else np.empty(0)
        self._order = np.argsort(least, kind="stable")
        self.least: list[float] = least[self._order].tolist()

    def __len__(self) -> int:
        return len(self.least)

    def __getitem__(self, place: int) -> Branch:
        at = self._order[place]
        number = int(np.searchsorted(self._ends, at, side="right"))
        group = self._together[number]
        work = group.works[at - self._ends[number]]  # from the end
        return Branch(self.least[place], work, *group[2:])


def branches(run: EstimatedRun, space: LayoutSpace, works: Iterable[WorkItem]) -> Branches:
    """Every one, the least time first."""
    of_depth: dict[int, dict[int, list[WorkItem]]] = {}
    for work in works:
        of_depth.setdefault(work.degrees["pp"], {}).setdefault(work.microbatches, []).append(work)
    found: list[_Together] = []
    outlines: dict[tuple, Outline] = {}
    for pp, together in of_depth.items():
        every = [work for same in together.values() for work in same]
        linear = np.stack([work.plain.linear for work in every])
        hops = np.array([work.plain.hop for work in every])
        through = np.array([work.microbatches for work in every])
        bounds: dict[tuple[Outline, Order], np.ndarray] = {}
        placed: dict[tuple, list[tuple[Fields, Outline]]] = {}
        for microbatches, same in together.items():
            which = through == microbatches
            for pipe in pipelines(pp, microbatches, run.shape.layers, space):
                order, key = Order.of(pipe["schedule"]), tuple(pipe.values())
                if key not in placed:
                    placed[key] = list(_outlines(run, pp, pipe, space, outlines))
                for split, outline in placed[key]:
                    if (outline, order) not in bounds:
                        bounds[outline, order] = outline.bounds(linear, hops, through, order) * (1 - SLACK)
                    found.append(_Together(bounds[outline, order][which], same, pipe, split, outline, order))
    return Branches(found)


def _outlines(
    run: EstimatedRun, pp: int, pipe: Fields, space: LayoutSpace, known: dict[tuple, Outline]
) -> Iterator[tuple[Fields, Outline]]:
    """The outlines of a pipeline's programs, by the layers of its stages; those of pipelines that place them alike are
    the same."""
    schedule = SCHEDULES[pipe["schedule"]]
    placement = schedule.placement(pp, schedule.virtual or pipe["virtual_stages"])
    for split in splits(run.shape, pp, depth_of(pp, pipe), space):
        layers = split["stage_layers"] or ()
        if (key := (placement, schedule.model_copies, layers)) not in known:
            program = Program(((),) * pp, placement, 0, model_copies=schedule.model_copies, layers=layers)
            known[key] = Outline.of(run.shape, program)
        yield split, known[key]
