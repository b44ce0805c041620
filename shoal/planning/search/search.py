"""Branch-and-bound search for the best layouts of a cluster, with the estimate's own times and bytes.

The search is best-first over `shoal.planning.search.space`. Each work item with each pipeline is a branch with a lower
bound (`shoal.planning.search.branches`). In order of this bound, a branch gets a tighter one, from the memory of its
first rank and the time that ZeRO adds, and is queued again with it. Then its layouts are simulated
(`shoal.pipeline.simulator`), until all remaining bounds exceed the fastest known layout that is no more complex
(`shoal.planning.search.kinds`). No bound exceeds the estimate, so the result equals that of pricing every layout.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from shoal.base.errors import UsageError
from shoal.pipeline.program import build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulator.columns import live_before_backwards
from shoal.pipeline.simulator.player import Player
from shoal.planning.cost.memory.stage import StageMemory
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.stage import StagePrices, paired_passes
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.branches import Branch, Outline, WorkItem, branches, first_rank, hide_rows
from shoal.planning.search.kinds import SLACK, Shelf, mesh_complexity
from shoal.planning.search.other_software import search_software
from shoal.planning.search.plan import Plan, PricedLayout, Progressing, order
from shoal.planning.search.replicas import ReplicaChoices
from shoal.planning.search.space import Fields, LayoutSpace, build_layout, meshes, shardings, works
from shoal.spec.layout import Layout


def search(
    run: EstimatedRun, space: LayoutSpace | None = None, *, diverse: bool = True, within: float = np.inf,
    progress: Progressing | None = None,
) -> Plan:  # fmt: skip
    """Find the best layouts that fit.

    Args:
        run: its layout is ignored.
        diverse: find the best of each kind; otherwise only the fastest, which takes less time.
        within: maximum seconds of a step; a lower limit ends an unsuccessful search sooner.
        progress: called with branches done, all branches, and the results so far.

    Raises:
        UsageError: the model is a mixture of depths (only some tokens pass through a layer).
    """
    if run.software.name != "shoal":
        return search_software(run, space or LayoutSpace(), diverse=diverse, within=within, progress=progress)
    if run.shape.depths is not None:
        raise UsageError(
            "model.depths: layouts of layers that only some tokens pass through are estimated, but not searched."
            "\n  Search for the model without it, and estimate the best (shoal estimate)."
        )
    begin = time.perf_counter()
    searching = Search(run, space or LayoutSpace(), diverse, within)
    collecting = gc.isenabled()
    gc.disable()  # no garbage is created here, and the collector would repeatedly scan all cached data
    try:
        searching.all(progress)
    finally:
        if collecting:
            gc.enable()
    searching.plan.best = searching.shelf.list()
    searching.plan.seconds = time.perf_counter() - begin
    return searching.plan


@dataclass(frozen=True, eq=False)
class PlacedModel:
    """A work item on the stages of an outline, for any schedule."""

    plain: StagePrices  # the work item's stages, without ZeRO
    outline: Outline
    replicas: ReplicaChoices  # the ways to shard

    @cached_property
    def kept(self) -> np.ndarray:
        """[stages] Bytes of activations that a micro-batch keeps alive."""
        return self.outline.each(self.plain.activation_bytes)

    @cached_property
    def empty(self) -> np.ndarray:
        """[ways] Lower bound of the first rank's bytes without activations."""
        return self.replicas.reserved(self.plain, self.outline.first, 0.0)

    @cached_property
    def fullest(self) -> np.ndarray:
        """[ways] The same of the fullest rank."""
        return np.max([self.replicas.reserved(self.plain, parts, 0.0) for _, parts in self.outline.groups], axis=0)

    @cached_property
    def times(self) -> np.ndarray:
        """[3, stages] Seconds without ZeRO's additions, up to rounding."""
        return (self.plain.linear[:3] @ self.outline.counts.T)[:, self.outline.kind]

    @cached_property
    def hidden(self) -> np.ndarray:
        """[2, stages] Seconds of a forward and of a backward that a paired micro-batch can hide."""
        return (self.plain.linear[4:] @ self.outline.counts.T)[:, self.outline.kind]

    @cached_property
    def added(self) -> np.ndarray:
        """[4, ways, stages] Lower bounds of each sharding's additions, see `Outline.with_added`."""
        kinds = self.plain.linear[:3] @ self.outline.counts.T
        return self.replicas.adding(self.plain, self.outline.kinds, kinds)[..., self.outline.kind]


class BoundedBranch(NamedTuple):
    """A branch with a tighter bound."""

    least: float  # lower bound of the step time in seconds for all its layouts
    branch: Branch
    of_way: np.ndarray  # [ways] the same for each way to shard; infinite if it does not fit
    margin: np.ndarray  # [ways] whether it may fit with a margin
    levels: np.ndarray  # [ways] complexity
    placed: PlacedModel  # its work item, placed on stages

    def wanted(self, shelf: Shelf) -> np.ndarray:
        """Return which ways to shard may be kept. [ways]"""
        limits = shelf.limits[self.levels]
        return (self.of_way <= limits[:, 0]) | (self.margin & (self.of_way <= limits[:, 1]))


class Search:
    """State of a search; `search` describes the arguments."""

    def __init__(self, run: EstimatedRun, space: LayoutSpace, diverse: bool, within: float):
        self.run, self.space = run, space
        self.plan, self.shelf = Plan(run), Shelf(run, diverse=diverse, within=within)
        self.known = self.plan.known
        self.priced: dict[tuple, StagePrices] = {}
        self.replicas: dict[tuple, ReplicaChoices] = {}
        self.placed: dict[tuple[StagePrices, Outline], PlacedModel] = {}
        self.capacity = StageMemory(run, self.known).capacity
        layers, experts = range(run.shape.layers), run.shape.experts
        self.dense_first = tuple(sorted(layers, key=run.shape.sparse)) if experts else layers

    def all(self, progress: Progressing | None = None) -> None:
        """Visit all branches, in order of their lower bound."""
        self.plan.branches, every = branches(self.run, self.space, self._works())
        waiting: list[tuple[float, int, BoundedBranch]] = []

        def look(until: float) -> None:
            """Simulate the waiting branches whose bound is below ``until``."""
            while waiting and waiting[0][0] < until and waiting[0][0] <= self.shelf.limit:
                self._play(heappop(waiting)[2])
                if progress:
                    progress(passed, self.plan.branches, self.plan)

        passed = looked = 0
        for branch in every:
            look(branch.least)
            if branch.least > self.shelf.limit:
                break
            passed += 1
            if branch.least > self.shelf.limits[branch.complexity * self.shelf.diverse].max():
                continue
            looked += 1
            if found := self._bound(branch):
                heappush(waiting, (found.least, branch.number, found))
        look(np.inf)
        self.plan.pruned = self.plan.branches - looked

    def _works(self) -> Iterator[WorkItem]:
        """Yield the work items for which some rank could hold its share of the layers."""
        for degrees in meshes(self.run, self.space):
            level = mesh_complexity(degrees, self.run.cluster)
            for way in works(self.run, degrees, self.space):
                if self._may_fit(degrees, way):
                    plain = self._priced(degrees, way, {"zero": 0})
                    yield WorkItem(degrees, way, plain.run.microbatches, plain, level)

    def _may_fit(self, degrees: Fields, way: Fields) -> bool:
        """Return whether some rank could hold its share of the layers, and its part of one micro-batch's activations.

        All of these activations are alive before the first backward on that rank. If only some layers have experts, the
        share has as many of them as it can, or as few; the fullest rank has the mean of all ranks.
        """
        plain, replicas = self._priced(degrees, way, {"zero": 0}), self._replicas(degrees, way)
        model = StagePart(range(self.run.shape.layers), True, True)
        fits = replicas.reserved(plain, [model], 0.0, ranks=degrees["pp"]) <= self.capacity
        each = -(-self.run.shape.layers // degrees["pp"])
        ends = (StagePart(layers, False, False) for layers in (self.dense_first[:each], self.dense_first[-each:]))
        least = (replicas.reserved(plain, [part], plain.layers_bytes(part)) for part in ends)
        return any((fits & (size <= self.capacity)).any() for size in least)

    def _replicas(self, degrees: Fields, way: Fields) -> ReplicaChoices:
        """Return the ways to shard on a mesh, for any micro-batch."""
        key = tuple(degrees.values())
        if key not in self.replicas:
            every = shardings(degrees, self.space)
            self.replicas[key] = ReplicaChoices(every, [self._priced(degrees, way, shards) for shards in every])
        return self.replicas[key]

    def _priced(self, degrees: Fields, way: Fields, shards: Fields) -> StagePrices:
        """Return the stage prices for every schedule and every split."""
        key = (*degrees.values(), *way.values(), *shards.values())
        if key not in self.priced:
            layout = build_layout(self.space, degrees, way, shards)
            self.priced[key] = StagePrices(replace(self.run, layout=layout), self.known)
        return self.priced[key]

    # ---- one program ---------------------------------------------------------------------------------------------

    def _bound(self, branch: Branch) -> BoundedBranch | None:
        """Return the tighter bound, or None if the branch does not fit or is too slow."""
        (degrees, way, microbatches, plain, _), (fields, _, outline, order, _) = branch.work, branch.pipe
        if (key := (plain, outline)) not in self.placed:
            self.placed[key] = PlacedModel(plain, outline, self._replicas(degrees, way))
        placed, capacity = self.placed[key], self.capacity * (1 + SLACK)
        if (placed.fullest > capacity).all():
            return None
        begun = first_rank(fields["schedule"], degrees["pp"], microbatches, len(outline.first))
        # Two stages of one rank store the tensor between them once.
        alive = float((begun @ (placed.kept - plain.message)[outline.holder == 0]).max())
        needed = np.maximum(placed.empty + plain.with_holes(alive), placed.fullest)
        if not (fits := needed <= capacity).any():
            return None
        times = hide_rows(placed.times, placed.hidden, order)
        ends = outline.ends(times[:, None], plain.hop, microbatches, order)
        of_way = outline.with_added(ends, placed.added, microbatches) * (1 - SLACK)
        of_way = np.maximum(np.where(fits, of_way, np.inf), branch.least)  # the host may be the limit
        margin = needed <= capacity - (1 - self.shelf.part) * self.capacity
        levels = self.shelf.diverse * (branch.complexity + placed.replicas.complexity)
        found = BoundedBranch(0.0, branch, of_way, margin, levels, placed)
        wanted = of_way[found.wanted(self.shelf)]
        return found._replace(least=float(wanted.min())) if len(wanted) else None

    def _play(self, bounded: BoundedBranch) -> None:
        """Simulate the layouts of a branch that no bound excludes, and keep the best that fit."""
        branch, placed, (degrees, way, _, plain, _) = bounded.branch, bounded.placed, bounded.branch.work
        ways = np.flatnonzero(bounded.wanted(self.shelf))
        if not len(ways):
            return
        outline, player = branch.pipe.outline, self._player(branch)
        between = outline.each(plain.split_backward_bytes)
        alive = outline.alive(live_before_backwards(player.columns, placed.kept, between, plain.message))
        needed = np.array([placed.replicas.at_worst(plain, *of) for of in alive]).max(axis=0)
        ways = ways[needed[ways] <= self.capacity * (1 + SLACK)]
        if not len(ways):
            return
        levels = (degrees, way, branch.pipe.fields, branch.pipe.split)
        layouts = [build_layout(self.space, *levels, placed.replicas.ways[i]) for i in ways]
        found = [self._priced(degrees, way, placed.replicas.ways[i]) for i in ways]
        times, launched = zip(*(self._times(branch, placed, stages) for stages in found), strict=True)
        played = player.step_times(np.stack(times, axis=2), [stages.link for stages in found])
        self.plan.played += len(found)
        steps = [self._step(*of) for of in zip(layouts, np.maximum(played, launched).tolist(), strict=True)]
        for i in np.argsort(steps, kind="stable"):
            if steps[i] <= self.shelf.limits[bounded.levels[ways[i]]].max():  # otherwise skip the memory: it is slow
                memory = max((found[i].peak_memory(*of) for of in alive), key=lambda memory: memory.reserved)
                if memory.reserved <= self.capacity:
                    self.shelf.keep(PricedLayout(steps[i], layouts[i], memory), self.capacity)
                    self.plan.best = [min(self.shelf.cells.values(), key=order)]

    @staticmethod
    def _times(branch: Branch, placed: PlacedModel, stages: StagePrices) -> tuple[np.ndarray, float]:
        """Return [7, stages] seconds of `Player.step_times`, and the minimum in which a host launches a step."""
        outline, priced = placed.outline, [stages.stage_times(part) for part in placed.outline.kinds]
        passes = np.array([each.passes for each in priced]).T[:, outline.kind]
        reduce, step, gather = finishing = outline.each(stages.finish_times)
        pair = paired_passes(passes, placed.hidden, outline.holder) if branch.paired else passes[0]
        longest = np.full_like(step, outline.sum_by_rank(step).max())
        launched = np.array([each.launched for each in priced])[outline.kind]
        host = outline.through(branch.work.microbatches)[0] * launched + finishing.sum(axis=0)
        return np.stack([*passes, reduce, longest, gather, pair]), float(outline.sum_by_rank(host).max())

    def _step(self, layout: Layout, least: float) -> float:
        """Return the seconds of a step, including the case of fewer cores than ranks."""
        if self.run.cluster.at_once is None or least > self.shelf.limit:
            return least
        return Estimate(replace(self.run, layout=layout), known=self.known).step_seconds

    def _player(self, branch: Branch) -> Player:
        """Return the player of the branch's program, built once."""
        if branch.program not in self.plan.players:
            pp, microbatches, schedule, virtual, paired = branch.program
            program = build_program(
                SCHEDULES[schedule], pp, microbatches, virtual_stages=virtual or 1, zero=1, transfers=False
            )
            self.plan.players[branch.program] = Player(program, paired=paired)
        return self.plan.players[branch.program]
