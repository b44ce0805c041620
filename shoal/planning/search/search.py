"""The best layouts of a cluster: branch and bound over `shoal.planning.search.space`, with the estimate's own times
and bytes.

Best first: each work by each pipeline (`shoal.planning.search.branches`) has a least time. In rising order each is
looked at more closely, with the memory of its first rank and what ZeRO adds to its time, and gets a higher least time,
by which it takes its turn again; then its layouts are played (`shoal.pipeline.simulator`), with others of the same
program, until all that is left takes longer than the last of the list. No bound is above the estimate, so the answer
is that of pricing every layout.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from shoal.base.errors import UsageError
from shoal.pipeline.program import build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulator.columns import Columns, before_backwards
from shoal.pipeline.simulator.player import Player
from shoal.planning.cost.memory.activations import of_layers
from shoal.planning.cost.memory.stage import PeakMemory, StageMemory
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.branches import SLACK, Branch, WorkItem, branches
from shoal.planning.search.outline import Alike, Outline, first_rank
from shoal.planning.search.replicas import ReplicaChoices
from shoal.planning.search.space import LEVELS, Fields, LayoutSpace, layout_of, meshes, shardings, works
from shoal.spec.layout import Layout

TOLD_APART = (
    "dp", "tp", "cp", "ulysses", "ep", "etp", "pp", "schedule", "virtual_stages", "micro_batch", "recompute",
)  # fmt: skip
Progressing = Callable[[int, int, "Plan"], None]


class PricedLayout(NamedTuple):
    """A layout, priced.

    Attributes:
        seconds: of a step.
        layout: complete.
        memory: of its fullest rank.
    """

    seconds: float
    layout: Layout
    memory: PeakMemory


@dataclass
class Plan:
    """What a search found.

    Attributes:
        run: what it was for; its layout says nothing.
        best: the fastest that fits of each mesh, pipeline, micro-batch and recomputation, the fastest first.
        players: of programs, by pipeline ranks, micro-batches, schedule and stages on each rank.
        known: what was counted of their stages, as `StagePrices` has it.
        played: how many layouts were.
        branches, pruned: works by pipelines, and how many of them were left out by their time.
        seconds: that the search took.
    """

    run: EstimatedRun
    best: list[PricedLayout] = field(default_factory=list)
    players: dict[tuple, Player] = field(default_factory=dict)
    known: dict = field(default_factory=dict)
    played: int = 0
    branches: int = 0
    pruned: int = 0
    seconds: float = 0.0

    @property
    def found(self) -> PricedLayout:
        """The best layout, where something fits."""
        return self.best[0]


def family(layout: Layout) -> tuple:
    """What tells two layouts of a list apart; in the rest each is the best of its kind."""
    return tuple(getattr(layout, name) for name in TOLD_APART)


def search(
    run: EstimatedRun, space: LayoutSpace | None = None, *, count: int = 10, within: float = np.inf,
    progress: Progressing | None = None,
) -> Plan:  # fmt: skip
    """The fastest layouts that fit.

    Args:
        run: its layout is ignored.
        count: how many to list, each of another mesh, pipeline, micro-batch or recomputation.
        within: seconds that a step may take; the less, the sooner it is known that nothing does.
        progress: called with branches done, all branches, and what is found so far.

    Raises:
        UsageError: only some tokens pass through layers of the model.
    """
    if run.shape.depths is not None:
        raise UsageError(
            "model.depths: layouts of layers that only some tokens pass through are estimated, but not searched."
            "\n  Search for the model without it, and estimate the best (shoal estimate)."
        )
    begin = time.perf_counter()
    searching = Search(run, space or LayoutSpace(), count, within)
    collecting = gc.isenabled()
    gc.disable()  # nothing becomes garbage, and the collector would go through all that is known again and again
    try:
        searching.all(progress)
    finally:
        if collecting:
            gc.enable()
    searching.plan.seconds = time.perf_counter() - begin
    return searching.plan


@dataclass(frozen=True, eq=False)
class PlacedModel:
    """A work on the stages of an outline, whatever the schedule.

    Attributes:
        plain: the work's stages, without ZeRO.
        replicas: the ways to shard.
    """

    plain: StagePrices
    outline: Outline
    replicas: ReplicaChoices

    @cached_property
    def kept(self) -> np.ndarray:
        """[stages] bytes that a micro-batch keeps alive."""
        return self.outline.each(self.plain.kept_of)

    @cached_property
    def kept_first(self) -> np.ndarray:
        """[stages of the first rank] the same, with what passes between two of them there once."""
        return (self.kept - self.plain.message * self.outline.beside)[self.outline.holder == 0]

    @cached_property
    def empty(self) -> np.ndarray:
        """[ways] bytes that the first rank needs at least, with nothing alive."""
        return self.replicas.reserved(self.plain, self.outline.first, 0.0)

    @cached_property
    def working(self) -> int:
        """Bytes that come and go in a backward on the first rank, at least."""
        return self.plain.working(self.outline.first)

    @cached_property
    def times(self) -> np.ndarray:
        """[3, stages] seconds, without what ZeRO adds, but for rounding."""
        return (self.plain.linear[:3] @ self.outline.counts.T)[:, self.outline.kind]

    @cached_property
    def added(self) -> np.ndarray:
        """[4, ways, stages] what each way to shard adds at least, as `Outline.with_added` takes it."""
        kinds = self.plain.linear[:3] @ self.outline.counts.T
        return self.replicas.adding(self.plain, self.outline.kinds, kinds)[..., self.outline.kind]


class BoundedBranch(NamedTuple):
    """A branch, looked at more closely.

    Attributes:
        least: seconds that a step of any of its layouts takes at least.
        of_way: [ways] the same of each way to shard; infinite where it does not fit.
        placed: its work.
    """

    least: float
    branch: Branch
    of_way: np.ndarray
    placed: PlacedModel


class Candidate(NamedTuple):
    """A layout that no bound excludes.

    Attributes:
        levels: its fields.
        stages: of its layout, priced.
        seconds: [6, stages] as `Player.step_times` takes them.
        launched: seconds that a host needs for a step at least.
        alive: of its ranks (`Outline.alive`).
    """

    levels: tuple[Fields, ...]
    stages: StagePrices
    seconds: np.ndarray
    launched: float
    alive: list[Alike]


class Search:
    """A search under way.

    Args:
        run: its layout is ignored.
        space: what is chosen from.
        count: how many to find.
        within: seconds that a step may take.
    """

    def __init__(self, run: EstimatedRun, space: LayoutSpace, count: int, within: float = np.inf):
        self.run, self.space, self.count, self.limit = run, space, count, within
        self.plan = Plan(run)
        self.known = self.plan.known
        self.priced: dict[tuple, StagePrices] = {}
        self.replicas: dict[tuple, ReplicaChoices] = {}
        self.placed: dict[tuple[StagePrices, Outline], PlacedModel] = {}
        self.families: dict[tuple, PricedLayout] = {}
        self.room = StageMemory(run, self.known).capacity

    def all(self, progress: Progressing | None = None) -> None:
        """Go through everything, the most promising first."""
        self.plan.branches, every = branches(self.run, self.space, self._works())
        waiting: list[tuple[float, int, tuple]] = []
        of_program: dict[tuple, dict[int, BoundedBranch]] = {}  # those that wait

        def look(until: float) -> None:
            """Play what waits and may take less."""
            while waiting and waiting[0][0] < until and waiting[0][0] <= self.limit:
                _, number, program = heappop(waiting)
                if number in (same := of_program[program]):
                    # Once there is a limit, whatever else the same program may be wanted for is played at once.
                    now = [n for n in sorted(same) if n == number or same[n].least <= self.limit < np.inf]
                    self._play([same.pop(n) for n in now])
                    if progress:
                        progress(looked, self.plan.branches, self.plan)

        looked = 0
        for branch in every:
            look(branch.least)
            if branch.least > self.limit:
                break
            looked += 1
            if found := self._bound(branch):
                heappush(waiting, (found.least, branch.number, branch.program))
                of_program.setdefault(branch.program, {})[branch.number] = found
        look(np.inf)
        self.plan.pruned = self.plan.branches - looked

    def _works(self) -> Iterator[WorkItem]:
        """Those of which some rank could hold its share of the layers."""
        for degrees in meshes(self.run, self.space):
            full: set[tuple] = set()
            for way in works(self.run, degrees, self.space):
                kind = way["sequence_parallel"], way["recompute"]
                if kind not in full and self._may_fit(degrees, way):
                    plain = self._priced(degrees, way, {"zero": 0})
                    yield WorkItem(degrees, way, plain.run.microbatches, plain)
                else:
                    full.add(kind)  # nor do more sequences, which come later

    def _may_fit(self, degrees: Fields, way: Fields) -> bool:
        """Whether a rank's share of the layers could be held, and what one micro-batch keeps of it: some rank has it,
        and all of that is alive before the first backward there.

        Where some layers have experts and others not, nobody knows which layers these are, and all may.
        """
        shape = self.run.shape
        if shape.experts and len({shape.sparse(layer) for layer in range(shape.layers)}) > 1:
            return True
        plain = self._priced(degrees, way, {"zero": 0})
        part = StagePart(range(-(-shape.layers // degrees["pp"])), first=False, last=False)
        kept = of_layers(plain.forward, part.layers)
        return bool((self._replicas(degrees, way).reserved(plain, [part], kept) <= self.room).any())

    def _replicas(self, degrees: Fields, way: Fields) -> ReplicaChoices:
        """The ways to shard of a mesh, whatever the micro-batch."""
        key = tuple(degrees.values())
        if key not in self.replicas:
            every = shardings(degrees, self.space)
            self.replicas[key] = ReplicaChoices(every, [self._priced(degrees, way, shards) for shards in every])
        return self.replicas[key]

    def _priced(self, degrees: Fields, way: Fields, shards: Fields) -> StagePrices:
        """For every schedule and every split."""
        key = (*degrees.values(), *way.values(), *shards.values())
        if key not in self.priced:
            layout = layout_of(self.space, degrees, way, shards)
            self.priced[key] = StagePrices(replace(self.run, layout=layout), self.known)
        return self.priced[key]

    # ---- one program ---------------------------------------------------------------------------------------------

    def _bound(self, branch: Branch) -> BoundedBranch | None:
        """None where it does not fit, or takes too long."""
        (degrees, way, microbatches, plain), (fields, _, outline, order) = branch.work, branch.pipe
        if (key := (plain, outline)) not in self.placed:
            self.placed[key] = PlacedModel(plain, outline, self._replicas(degrees, way))
        placed = self.placed[key]
        begun = first_rank(fields["schedule"], degrees["pp"], microbatches, len(outline.first))
        alive = float((begun @ placed.kept_first).max())
        room = self.room * (1 + SLACK) - placed.empty
        if not (plain.with_holes(alive) <= room).any():
            return None
        fits = plain.with_holes(alive + placed.working) <= room  # which takes longer to know
        if not fits.any():
            return None
        ends = outline.ends(placed.times[:, None], plain.hop, microbatches, order)
        of_way = outline.with_added(ends, placed.added, microbatches) * (1 - SLACK)
        of_way = np.maximum(np.where(fits, of_way, np.inf), branch.least)  # which the host may decide
        least = float(of_way.min())
        return BoundedBranch(least, branch, of_way, placed) if least <= self.limit else None

    def _play(self, together: Sequence[BoundedBranch]) -> None:
        """Play the layouts of some branches of one program, and keep the best of those that fit."""
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
            layout = layout_of(self.space, *found[i].levels)
            if self._wanted(layout, steps[i]):  # else nobody asks how much memory it needs, which takes long to say
                each = (found[i].stages.memory_of(*of) for of in found[i].alive)
                memory = max(each, key=lambda memory: memory.reserved)
                if memory.reserved <= self.room:
                    self._keep(PricedLayout(steps[i], layout, memory))

    def _step(self, candidate: Candidate, least: float) -> float:
        """Seconds of a step, where devices may be fewer cores than there are ranks."""
        if self.run.cluster.at_once is None or least > self.limit:
            return least
        run = replace(self.run, layout=layout_of(self.space, *candidate.levels))
        return Estimate(run, known=self.known).step_seconds

    def _candidates(self, bounded: BoundedBranch, columns: Columns) -> Iterator[Candidate]:
        """Layouts of a branch that no bound excludes."""
        (_, branch, of_way, placed), (degrees, way, microbatches, plain) = bounded, bounded.branch.work
        ways = np.flatnonzero(of_way <= self.limit).tolist()
        if not ways:
            return
        outline, between = branch.pipe.outline, branch.pipe.outline.each(plain.between_of)
        alive = outline.alive(before_backwards(columns, placed.kept, between, plain.message))
        fits = np.array([placed.replicas.at_worst(plain, *of) for of in alive]).max(axis=0)
        through = outline.through(microbatches)[0]
        for shards in (placed.replicas.ways[i] for i in ways if fits[i] <= self.room * (1 + SLACK)):
            stages = self._priced(degrees, way, shards)
            priced = [stages.stage_of(part) for part in outline.kinds]
            times = np.array([each.passes for each in priced]).T[:, outline.kind]
            reduce, step, gather = finishing = outline.each(stages.finish_of)
            host = through * np.array([each.launched for each in priced])[outline.kind] + finishing.sum(axis=0)
            longest = np.full_like(step, outline.sum_by_rank(step).max())
            levels = (degrees, way, branch.pipe.fields, branch.pipe.split, shards)
            seconds, launched = np.stack([*times, reduce, longest, gather]), outline.sum_by_rank(host).max()
            yield Candidate(levels, stages, seconds, float(launched), alive)

    def _player(self, branch: Branch) -> Player:
        """The branch's program, written down once."""
        if branch.program not in self.plan.players:
            pp, microbatches, schedule, virtual = branch.program
            program = build_program(
                SCHEDULES[schedule], pp, microbatches, virtual_stages=virtual or 1, zero=1, transfers=False
            )
            self.plan.players[branch.program] = Player(program)
        return self.plan.players[branch.program]

    def _wanted(self, layout: Layout, seconds: float) -> bool:
        """Whether a layout that takes so long would be listed, if it fits."""
        known = self.families.get(family(layout))
        return seconds <= self.limit and (known is None or seconds * (1 - SLACK) <= known.seconds)

    def _keep(self, found: PricedLayout) -> None:
        which = family(found.layout)
        known = self.families.get(which)
        if known and order(known) <= order(found):
            return
        self.families[which] = found
        others = [other for other in self.plan.best if family(other.layout) != which]
        self.plan.best = sorted([*others, found], key=order)[: self.count]
        if len(self.plan.best) == self.count:
            self.limit = self.plan.best[-1].seconds * (1 + SLACK)


def order(found: PricedLayout) -> tuple:
    """Equally fast ones by the memory that they need, then by name."""
    names = tuple(str(getattr(found.layout, name)) for name in LEVELS)
    return (float(f"{found.seconds:.9g}"), float(f"{found.memory.reserved:.9g}"), names)
