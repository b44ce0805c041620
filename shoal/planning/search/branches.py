"""Branches of the search: each work item (degrees, micro-batch, recomputation) with each pipeline, and a lower bound.

The search visits the branches in order of their bound. The bounds of all work items of one pipeline are computed
together, from an order-independent model of it: a rank cannot begin before its first micro-batch has reached it, must
do all work of its stages, and the last gradient must still travel to the first stage. Each bound follows from the order
of the passes of *one* micro-batch, so it holds for every order of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import merge
from typing import Any, NamedTuple

import numpy as np

from shoal.pipeline.program import FORWARDS, WEIGHTS, Op, Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.planning.cost.memory.stage import TIMES, Alive, alive_at
from shoal.planning.cost.parameters import StagePart, stage_parts
from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.run import EstimatedRun
from shoal.planning.search.kinds import SLACK, pipeline_complexity
from shoal.planning.search.space import Fields, LayoutSpace, pipeline_depth, pipelines, splits
from shoal.spec.catalog import ModelShape
from shoal.spec.schedules import PAIRED, SPLIT_BACKWARD

CHANGE = {op: (op in FORWARDS) - (op in WEIGHTS) for op in Op}
"""Change in the number of micro-batches alive."""
EqualRanks = tuple[list[StagePart], list[Alive]]
"""Ranks with equal contents: their stages, and for each stage the maximum alive on one of the ranks."""


class Order(NamedTuple):
    """Properties of a schedule that bounds need."""

    full_backwards: bool  # backwards are not split: a gradient is sent after the weight gradients, too
    paired: bool  # forwards and backwards of other micro-batches hide each other's exchanges of rows, if there are any


def hide_rows(times: np.ndarray, hidden: np.ndarray, order: Order) -> np.ndarray:
    """Return lower bounds of [3, ..., stages] seconds of passes, without [2, ..., stages] that pairs can hide."""
    return np.concatenate([times[:2] - hidden, times[2:]]) if order.paired else times


Ends = tuple[np.ndarray, np.ndarray]
"""Lower bounds of the end of the last computation in seconds: of each rank [layouts, ranks], and of all [layouts]."""


@lru_cache(maxsize=4096)
def first_rank(schedule: str, ranks: int, microbatches: int, virtual: int) -> np.ndarray:
    """Return the micro-batches alive on the first rank after each computation. [computations, its stages]

    Uses the first rank's order if the schedule defines it separately; otherwise counts one forward.
    """
    of = SCHEDULES[schedule]
    stages = [stage for stage, rank in enumerate(of.placement(ranks, virtual)) if rank == 0]
    if of.order is None:
        return np.eye(1, len(stages))
    ops, where, *_ = zip(*of.order(0, ranks, microbatches, virtual), strict=True)
    change = np.zeros((len(ops), len(stages)))
    places = np.minimum(np.searchsorted(stages, np.fromiter(where, int, len(ops))), len(stages) - 1)
    change[np.arange(len(ops)), places] = np.fromiter(map(CHANGE.get, ops), float, len(ops))
    return np.cumsum(change, axis=0)


class Outline:
    """The stages of a program, grouped into kinds with equal costs.

    Args:
        program: source of placement and copies; its actions and micro-batches are ignored.
    """

    def __init__(self, shape: ModelShape, program: Program):
        parts, kinds, groups = stage_parts(shape, program), dict[tuple, int](), dict[tuple, list[np.ndarray]]()
        keys = []
        for part in parts:
            sparse = sum(map(shape.sparse, part.layers)) if shape.experts else 0
            keys.append((len(part.layers) - sparse, sparse, part.first, part.last, 1))
        self.kind = np.array([kinds.setdefault(key, len(kinds)) for key in keys])  # [stages]
        self.kinds = [parts[keys.index(key)] for key in kinds]  # one stage of each kind
        self.counts = np.array(list(kinds), float)  # [kinds, 5] multiplicities of the times in `StagePrices.linear`
        self.copies, self.depth = program.model_copies, program.depth
        self.holder = np.array(program.stage_rank)  # [stages] the pipeline rank of each
        self.first_holders = self.holder[:: self.depth]  # pipeline ranks that hold a first stage
        self._by_rank = np.argsort(self.holder, kind="stable")
        self._starts = np.searchsorted(self.holder[self._by_rank], np.arange(program.ranks))
        for held in np.split(self._by_rank, self._starts[1:]):
            groups.setdefault(tuple(self.kind[held]), []).append(held)
        # Groups of ranks with equal contents: the stage numbers of each rank, and the contents of these stages.
        self.groups = [(same, [parts[stage] for stage in same[0]]) for same in groups.values()]
        same_rank = np.append(False, self.holder[1:] == self.holder[:-1])
        begins = np.arange(len(parts)) % self.depth == 0
        # [stages] Number of messages from the first stage of the same copy.
        self.hops = np.cumsum((~same_rank & ~begins).reshape(self.copies, -1), axis=1).ravel()

    @property
    def first(self) -> list[StagePart]:
        return self.groups[0][1]

    def each(self, price: Callable[[StagePart], Any]) -> np.ndarray:
        """Evaluate a function for every stage; it returns one number or several. [..., stages]"""
        return np.array([price(part) for part in self.kinds], float).T[..., self.kind]

    def sum_by_rank(self, values: np.ndarray) -> np.ndarray:
        """Sum [..., stages] over each rank's stages. [..., ranks]"""
        return np.add.reduceat(values[..., self._by_rank], self._starts, axis=-1)

    def least_by_rank(self, values: np.ndarray) -> np.ndarray:
        """Return the minimum of [..., stages] over each rank's stages. [..., ranks]"""
        return np.minimum.reduceat(values[..., self._by_rank], self._starts, axis=-1)

    def through(self, microbatches: np.ndarray | int) -> np.ndarray:
        """Return the number of each layout's micro-batches that pass through each stage. [layouts, stages]"""
        ends = np.arange(self.copies + 1) * np.reshape(microbatches, (-1, 1)) // self.copies
        return np.repeat(np.diff(ends).astype(float), self.depth, axis=1)

    def alive(self, most: np.ndarray) -> list[EqualRanks]:
        """Return all groups of equal ranks, with the given numbers alive. [times, stages]"""
        reached = np.flatnonzero(most.max(axis=1) >= 0)  # few of the times occur
        times, most = [TIMES[i] for i in reached], most[reached]
        found = [(parts, most[:, np.array(same)].max(axis=1).T.tolist()) for same, parts in self.groups]
        return [(parts, [alive_at(stage, times) for stage in of_stages]) for parts, of_stages in found]

    # ---- bounds of time ------------------------------------------------------------------------------------------

    def bounds(self, linear: np.ndarray, hops: np.ndarray, microbatches: np.ndarray, order: Order) -> np.ndarray:
        """Return lower bounds of the step time in seconds, from stage times without ZeRO's gathers. [layouts]

        Args:
            linear: [layouts, 6, 5], see `StagePrices.linear`.
            hops: [layouts] seconds of a message.
            microbatches: [layouts] micro-batches of each replica.
        """
        every = (linear @ self.counts.T)[:, :, self.kind].swapaxes(0, 1)
        passes, launches, hidden = every[:3], every[3], every[4:]
        ranks, step = self.ends(hide_rows(passes, hidden, order), hops, microbatches, order)
        launched = self.sum_by_rank(self.through(microbatches) * launches)
        return np.maximum(np.maximum(ranks, launched).max(axis=1), step)

    def ends(self, times: np.ndarray, hop: np.ndarray | float, microbatches: np.ndarray | int, order: Order) -> Ends:
        """Return lower bounds of when each rank, and each first stage, finishes its last computation.

        Args:
            times: [3, layouts, stages] seconds of a forward and of the halves of a backward.
            hop: [layouts] seconds from the end of a computation until its result is on the next rank, or one number.
            microbatches: [layouts] micro-batches through the pipeline, or one number.
        """
        forward, inputs, weights = times
        upward = inputs + weights if order.full_backwards else inputs  # the part that the previous stage waits for
        through, hop = self.through(microbatches), np.reshape(hop, (-1, 1))
        begins = self.least_by_rank(self._before(forward) + hop * self.hops)
        left = self.least_by_rank(self._before(upward) + hop * self.hops)
        busy = begins + self.sum_by_rank(through * (forward + inputs + weights))
        # A rank's last gradient passes through all previous stages; the first still computes its weight gradients.
        drained = (begins + self.sum_by_rank(through * (forward + upward)) + left).max(axis=1)
        if not order.full_backwards:
            drained = drained + weights[:, :: self.depth].min(axis=1)
        return busy, np.maximum(drained, busy[:, self.first_holders].min(axis=1))

    def _before(self, values: np.ndarray) -> np.ndarray:
        """Sum over the previous stages of the same copy. [layouts, stages]"""
        table = values.reshape(len(values), self.copies, -1)
        return (np.cumsum(table, axis=2) - table).reshape(values.shape)

    def with_added(self, ends: Ends, added: np.ndarray, microbatches: int) -> np.ndarray:
        """Return lower bounds of the step time in seconds, including ZeRO's additions. [layouts]

        Args:
            ends: bounds of all the layouts, or one for all of them, without ZeRO's additions.
            added: [4, layouts, stages] seconds: per micro-batch; and for a stage's reduction, update and gather.
        """
        passes, reduce, update, gather = self.sum_by_rank(added)
        after = reduce + update.max(axis=1, keepdims=True) + gather
        ranks, step = ends
        through = microbatches // self.copies  # through the first stage
        busy = (ranks + through * passes + after).max(axis=1)
        return np.maximum(busy, step + after[:, self.first_holders].min(axis=1))


# ---- branches --------------------------------------------------------------------------------------------------------


class WorkItem(NamedTuple):
    """Layouts with the same FLOPs on each rank."""

    degrees: Fields  # dp, tp, cp, ulysses, ep, etp, pp
    way: Fields  # the micro-batch, how it is split and what is recomputed
    microbatches: int  # micro-batches of each replica
    plain: StagePrices  # its stages, without ZeRO
    complexity: int  # of its mesh (`shoal.planning.search.kinds`)


class Pipe(NamedTuple):
    """A pipeline schedule with a split of the layers."""

    fields: Fields  # the schedule, and stages on each rank
    split: Fields  # layers of the stages
    outline: Outline  # outline, shared by all pipelines with equal stage placement
    order: Order  # properties of the schedule that bounds need
    complexity: int  # of the schedule and the split


class Branch(NamedTuple):
    """A work item with a pipeline."""

    least: float  # lower bound of the step time in seconds, for any ZeRO sharding
    number: int  # index among all branches; breaks ties
    work: WorkItem
    pipe: Pipe

    @property
    def complexity(self) -> int:
        """Complexity of its layouts, without the sharding of state."""
        return self.work.complexity + self.pipe.complexity

    @property
    def program(self) -> tuple:
        """Key that branches of the same program share."""
        schedule, virtual = self.pipe.fields["schedule"], self.pipe.fields["virtual_stages"]
        return self.work.degrees["pp"], self.work.microbatches, schedule, virtual, self.paired

    @property
    def paired(self) -> bool:
        """Whether paired micro-batches hide each other's exchanges of rows."""
        return self.pipe.order.paired and self.work.plain.hides_rows


def branches(run: EstimatedRun, space: LayoutSpace, works: Iterable[WorkItem]) -> tuple[int, Iterator[Branch]]:
    """Return the number of branches, and an iterator in order of their lower bound that builds them lazily."""
    of_depth: dict[int, dict[int, list[WorkItem]]] = {}
    for work in works:
        of_depth.setdefault(work.degrees["pp"], {}).setdefault(work.microbatches, []).append(work)
    found, count, hides = [], 0, run.shape.experts is not None and run.cluster.at_once is None
    outlines: dict[tuple, Outline] = {}
    for pp, together in of_depth.items():
        every = [work for same in together.values() for work in same]
        linear = np.stack([work.plain.linear for work in every])
        hops, through = np.array([(work.plain.hop, work.microbatches) for work in every]).T
        bounds: dict[tuple[Outline, Order], np.ndarray] = {}
        pipes: dict[tuple, list[Pipe]] = {}
        for microbatches, same in together.items():
            for fields in pipelines(pp, microbatches, run.shape.layers, space, apart=hides):
                key = tuple(fields.values())
                if key not in pipes:
                    pipes[key] = list(_pipes(run, pp, fields, space, outlines))
                for pipe in pipes[key]:
                    both = pipe.outline, pipe.order
                    if both not in bounds:
                        bounds[both] = pipe.outline.bounds(linear, hops, through, pipe.order) * (1 - SLACK)
                    found.append(_in_order(bounds[both][through == microbatches], count, same, pipe, space))
                    count += len(same)
    return count, merge(*found)


def _in_order(
    least: np.ndarray, begin: int, works: Sequence[WorkItem], pipe: Pipe, space: LayoutSpace
) -> Iterator[Branch]:
    for i in np.argsort(least, kind="stable").tolist():
        if works[i].plain.hides_rows or pipe.fields["ep_overlap"] == space.unpaired:
            yield Branch(float(least[i]), begin + i, works[i], pipe)


def _pipes(
    run: EstimatedRun, pp: int, fields: Fields, space: LayoutSpace, known: dict[tuple, Outline]
) -> Iterator[Pipe]:
    """Yield a schedule's pipelines by split of the layers; pipelines with equal placement share an outline."""
    schedule = SCHEDULES[fields["schedule"]]
    paired = schedule.name in PAIRED and fields["ep_overlap"] is not False
    order = Order(schedule.name not in SPLIT_BACKWARD, paired)
    placement = schedule.placement(pp, schedule.virtual or fields["virtual_stages"])
    for split in splits(run.shape, pp, pipeline_depth(pp, fields), space):
        layers = split["stage_layers"] or ()
        copies = schedule.model_copies
        if (key := (placement, copies, layers)) not in known:
            known[key] = Outline(run.shape, Program(((),) * pp, placement, 0, model_copies=copies, layers=layers))
        yield Pipe(fields, split, known[key], order, pipeline_complexity(fields | split, pp))
