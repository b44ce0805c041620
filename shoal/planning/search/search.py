"""Branch-and-bound search for the best layouts of a cluster, with the estimate's own times and bytes.

The search is best-first over `shoal.planning.search.space`. Each work item with each pipeline is a branch with a lower
bound (`shoal.planning.search.branches`). In order of this bound, a branch gets a tighter one, from the memory of its
first rank and the time that ZeRO adds, and is queued again with it. Then its layouts are simulated
(`shoal.pipeline.simulator`) together with others of the same program, until all remaining bounds exceed the fastest
known layout that is no more complex (`shoal.planning.search.kinds`). No bound exceeds the estimate, so the result
equals that of pricing every layout.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from shoal.base.errors import UsageError
from shoal.pipeline.program import build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulator.columns import Columns, live_before_backwards
from shoal.pipeline.simulator.player import Player
from shoal.planning.cost.memory.stage import StageMemory
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.stage import StagePrices, paired_passes
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.branches import Branch, EqualRanks, Outline, WorkItem, branches, first_rank, hide_rows
from shoal.planning.search.kinds import SLACK, Shelf, mesh_complexity
from shoal.planning.search.other_software import search_software
from shoal.planning.search.plan import Plan, PricedLayout, Progressing, order
from shoal.planning.search.replicas import ReplicaChoices
from shoal.planning.search.space import Fields, LayoutSpace, build_layout, meshes, shardings, works


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
    def working(self) -> int:
        """Lower bound of the transient bytes in a backward on the first rank."""
        return self.plain.working(self.outline.first)

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


class Candidate(NamedTuple):
    """A layout that no bound excludes."""

    levels: tuple[Fields, ...]  # its fields
    stages: StagePrices  # its priced stages
    seconds: np.ndarray  # [7, stages] times, see `Player.step_times`
    launched: float  # minimum seconds in which a host launches a step
    alive: list[EqualRanks]  # activations alive on its ranks (`Outline.alive`)
    complexity: int  # its complexity (`shoal.planning.search.kinds`)


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
        waiting: list[tuple[float, int, tuple]] = []
        by_program: dict[tuple, dict[int, BoundedBranch]] = {}  # waiting branches

        def look(until: float) -> None:
            """Simulate the waiting branches whose bound is below ``until``."""
            while waiting and waiting[0][0] < until and waiting[0][0] <= self.shelf.limit:
                _, number, program = heappop(waiting)
                if number in (same := by_program[program]):
                    # Once a layout is known, simulate all other wanted branches of the same program as well.
                    rest = same if self.shelf.cells else (number,)
                    now = [n for n in sorted(rest) if n == number or same[n].wanted(self.shelf).any()]
                    self._play([same.pop(n) for n in now])
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
                heappush(waiting, (found.least, branch.number, branch.program))
                by_program.setdefault(branch.program, {})[branch.number] = found
        look(np.inf)
        self.plan.pruned = self.plan.branches - looked

    def _works(self) -> Iterator[WorkItem]:
        """Yield the work items for which some rank could hold its share of the layers."""
        for degrees in meshes(self.run, self.space):
            full, level = set[tuple](), mesh_complexity(degrees, self.run.cluster)
            for way in works(self.run, degrees, self.space):
                kind = way["sequence_parallel"], way["recompute"]
                if kind not in full and self._may_fit(degrees, way):
                    plain = self._priced(degrees, way, {"zero": 0})
                    yield WorkItem(degrees, way, plain.run.microbatches, plain, level)
                else:
                    full.add(kind)  # larger micro-batches, which come later, do not fit either

    def _may_fit(self, degrees: Fields, way: Fields) -> bool:
        """Return whether some rank could hold its share of the layers, and its part of one micro-batch's activations.

        All of these activations are alive before the first backward on that rank. If only some layers have experts, the
        share has as many of them as it can, or as few.
        """
        plain, replicas = self._priced(degrees, way, {"zero": 0}), self._replicas(degrees, way)
        each = -(-self.run.shape.layers // degrees["pp"])
        ends = (StagePart(layers, False, False) for layers in (self.dense_first[:each], self.dense_first[-each:]))
        least = (replicas.reserved(plain, [part], plain.layers_bytes(part)) for part in ends)
        return any((size <= self.capacity).any() for size in least)

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
        placed = self.placed[key]
        begun = first_rank(fields["schedule"], degrees["pp"], microbatches, len(outline.first))
        # Two stages of one rank store the tensor between them once.
        alive = float((begun @ (placed.kept - plain.message)[outline.holder == 0]).max())
        free = self.capacity * (1 + SLACK) - placed.empty
        if not (plain.with_holes(alive) <= free).any():
            return None
        fits = plain.with_holes(alive + placed.working) <= free  # slower to evaluate
        if not fits.any():
            return None
        times = hide_rows(placed.times, placed.hidden, order)
        ends = outline.ends(times[:, None], plain.hop, microbatches, order)
        of_way = outline.with_added(ends, placed.added, microbatches) * (1 - SLACK)
        of_way = np.maximum(np.where(fits, of_way, np.inf), branch.least)  # the host may be the limit
        margin = plain.with_holes(alive + placed.working) <= free - (1 - self.shelf.part) * self.capacity
        levels = self.shelf.diverse * (branch.complexity + placed.replicas.complexity)
        found = BoundedBranch(0.0, branch, of_way, margin, levels, placed)
        wanted = of_way[found.wanted(self.shelf)]
        return found._replace(least=float(wanted.min())) if len(wanted) else None

    def _play(self, together: Sequence[BoundedBranch]) -> None:
        """Simulate the layouts of some branches of one program, and keep the best that fit."""
        player = self._player(together[0].branch)
        found = [candidate for bounded in together for candidate in self._candidates(bounded, player.columns)]
        if not found:
            return
        times = np.stack([candidate.seconds for candidate in found], axis=2)
        played = player.step_times(times, [candidate.stages.link for candidate in found])
        seconds = np.maximum(played, [candidate.launched for candidate in found])
        self.plan.played += len(found)
        steps = [self._step(candidate, float(least)) for least, candidate in zip(seconds, found, strict=True)]
        for i in np.argsort(steps, kind="stable"):
            if steps[i] <= self.shelf.limits[found[i].complexity].max():  # otherwise skip the memory: it is slow
                each = (found[i].stages.peak_memory(*of) for of in found[i].alive)
                memory = max(each, key=lambda memory: memory.reserved)
                if memory.reserved <= self.capacity:
                    layout = build_layout(self.space, *found[i].levels)
                    self.shelf.keep(PricedLayout(steps[i], layout, memory), self.capacity)
                    self.plan.best = [min(self.shelf.cells.values(), key=order)]

    def _step(self, candidate: Candidate, least: float) -> float:
        """Return the seconds of a step, including the case of fewer cores than ranks."""
        if self.run.cluster.at_once is None or least > self.shelf.limit:
            return least
        run = replace(self.run, layout=build_layout(self.space, *candidate.levels))
        return Estimate(run, known=self.known).step_seconds

    def _candidates(self, bounded: BoundedBranch, columns: Columns) -> Iterator[Candidate]:
        branch, placed, (degrees, way, microbatches, plain, _) = bounded.branch, bounded.placed, bounded.branch.work
        ways = np.flatnonzero(bounded.wanted(self.shelf)).tolist()
        if not ways:
            return
        outline, between = branch.pipe.outline, branch.pipe.outline.each(plain.split_backward_bytes)
        alive = outline.alive(live_before_backwards(columns, placed.kept, between, plain.message))
        fits = np.array([placed.replicas.at_worst(plain, *of) for of in alive]).max(axis=0)
        through = outline.through(microbatches)[0]
        for i in (i for i in ways if fits[i] <= self.capacity * (1 + SLACK)):
            shards, level = placed.replicas.ways[i], int(bounded.levels[i])
            stages = self._priced(degrees, way, shards)
            priced = [stages.stage_times(part) for part in outline.kinds]
            times = np.array([each.passes for each in priced]).T[:, outline.kind]
            reduce, step, gather = finishing = outline.each(stages.finish_times)
            host = through * np.array([each.launched for each in priced])[outline.kind] + finishing.sum(axis=0)
            longest = np.full_like(step, outline.sum_by_rank(step).max())
            levels = (degrees, way, branch.pipe.fields, branch.pipe.split, shards)
            pair = paired_passes(times, placed.hidden, outline.holder) if branch.paired else times[0]
            seconds, launched = np.stack([*times, reduce, longest, gather, pair]), outline.sum_by_rank(host).max()
            yield Candidate(levels, stages, seconds, float(launched), alive, level)

    def _player(self, branch: Branch) -> Player:
        """Return the player of the branch's program, built once."""
        if branch.program not in self.plan.players:
            pp, microbatches, schedule, virtual, paired = branch.program
            program = build_program(
                SCHEDULES[schedule], pp, microbatches, virtual_stages=virtual or 1, zero=1, transfers=False
            )
            self.plan.players[branch.program] = Player(program, paired=paired)
        return self.plan.players[branch.program]
