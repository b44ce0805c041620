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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from shoal.base.errors import UsageError
from shoal.pipeline.program import build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulator.columns import Columns, before_backwards, of_program
from shoal.pipeline.simulator.player import Player
from shoal.planning.cost.memory.activations import of_layers
from shoal.planning.cost.memory.stage import PeakMemory, StageMemory
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.bounds import first_rank
from shoal.planning.search.branches import SLACK, Branch, WorkItem, branches
from shoal.planning.search.closer import Candidate, Closer, Placed
from shoal.planning.search.outline import Alike, Outline
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
        programs: that were written down, by pipeline ranks, micro-batches, schedule and stages on each rank.
        players: of those that were played.
        known: what was counted of their stages, as `StagePrices` has it.
        played: how many layouts were.
        branches, pruned: works by pipelines, and how many of them were left out by their time.
        seconds: that the search took.
    """

    run: EstimatedRun
    best: list[PricedLayout] = field(default_factory=list)
    programs: dict[tuple, Columns] = field(default_factory=dict)
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
    with uncollected():
        searching.all(progress)
    searching.plan.seconds = time.perf_counter() - begin
    return searching.plan


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's collector of cycles, which would go through all that is known again and again, for none."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Search:
    """A search under way.

    Args:
        run: its layout is ignored.
        space: what is chosen from.
        count: how many to find.
        within: seconds that a step may take.
    """

    def __init__(self, run: EstimatedRun, space: LayoutSpace, count: int, within: float = np.inf):
        self.run, self.space, self.count = run, space, count
        self.plan = Plan(run)
        self.known = self.plan.known
        self.priced: dict[tuple, StagePrices] = {}
        self.replicas: dict[tuple, ReplicaChoices] = {}
        self.placed: dict[tuple[StagePrices, Outline], Placed] = {}
        self.families: dict[tuple, PricedLayout] = {}
        self.limit = within
        self.room = StageMemory(run, self.known).capacity

    def all(self, progress: Progressing | None = None) -> None:
        """Go through everything, the most promising first."""
        every = branches(self.run, self.space, self._works())
        self.plan.branches = len(every)
        waiting: list[tuple[float, int]] = []
        closer: dict[int, Closer] = {}
        of_program: dict[tuple, set[int]] = {}
        place = 0
        while (place < len(every) and every.least[place] <= self.limit) or (waiting and waiting[0][0] <= self.limit):
            if place < len(every) and (not waiting or every.least[place] <= waiting[0][0]):
                if found := self._closer(every[place]):
                    closer[place] = found
                    heappush(waiting, (found.least, place))
                    of_program.setdefault(found.branch.program, set()).add(place)
                place += 1
                continue
            first = heappop(waiting)[1]
            if first not in closer:
                continue
            # Once there is a limit, whatever else the same program may be wanted for is played at once.
            same = of_program[closer[first].branch.program]
            now = [n for n in sorted(same) if n == first or closer[n].least <= self.limit < np.inf]
            same.difference_update(now)
            self._look([closer.pop(n) for n in now])
            if progress:
                progress(place, len(every), self.plan)
        self.plan.pruned = len(every) - place

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
            self.priced[key] = StagePrices(
                replace(self.run, layout=layout_of(self.space, degrees, way, shards)), self.known
            )
        return self.priced[key]

    # ---- one program ---------------------------------------------------------------------------------------------

    def _closer(self, branch: Branch) -> Closer | None:
        """None where it does not fit, or takes too long."""
        (degrees, _, microbatches, plain), outline = branch.work, branch.outline
        placed = self._placed(branch)
        begun = first_rank(branch.pipe["schedule"], degrees["pp"], microbatches, len(outline.first))
        alive = float((begun @ placed.kept_first).max())
        if not placed.may_fit(alive, self.room):
            return None
        fits = placed.fits(alive + placed.working, self.room)  # which takes longer to know
        if not fits.any():
            return None
        ends = outline.ends(placed.times[:, None], plain.hop, microbatches, branch.order)
        of_way = np.where(fits, outline.least(ends, placed.added, microbatches) * (1 - SLACK), np.inf)
        of_way = np.maximum(of_way, branch.least)  # which the host may decide
        least = float(of_way.min())
        return Closer(least, branch, of_way, placed) if least <= self.limit else None

    def _placed(self, branch: Branch) -> Placed:
        (degrees, way, _, plain), outline = branch.work, branch.outline
        if (plain, outline) not in self.placed:
            self.placed[plain, outline] = Placed(plain, outline, self._replicas(degrees, way))
        return self.placed[plain, outline]

    def _look(self, together: Sequence[Closer]) -> None:
        """Play the layouts of some branches of one program, and keep the best of those that fit."""
        found = [pair for closer in together for pair in self._perhaps(closer)]
        if not found:
            return
        player = self._player(together[0].branch)
        times = np.stack([_table(candidate) for candidate, _ in found], axis=2)
        played = player.step_times(times, [candidate.stages.link for candidate, _ in found])
        seconds = np.maximum(played, [candidate.launched for candidate, _ in found])
        self.plan.played += len(found)
        steps = [self._step(candidate, float(least)) for least, (candidate, _) in zip(seconds, found, strict=True)]
        for i in np.argsort(steps, kind="stable"):
            candidate, alive = found[i]
            layout = layout_of(self.space, *candidate.levels)
            if self._wanted(layout, steps[i]):  # else nobody asks how much memory it needs, which takes long to say
                memory = _fullest(candidate.stages, alive)
                if memory.reserved <= self.room:
                    self._keep(PricedLayout(steps[i], layout, memory))

    def _step(self, candidate: Candidate, least: float) -> float:
        """Seconds of a step, where devices may be fewer cores than there are ranks."""
        if self.run.cluster.at_once is None or least > self.limit:
            return least
        run = replace(self.run, layout=layout_of(self.space, *candidate.levels))
        return Estimate(run, known=self.known).step_seconds

    def _perhaps(self, closer: Closer) -> list[tuple[Candidate, list[Alike]]]:
        """Layouts of a branch that no bound excludes, and what is alive in them (`Outline.alike`)."""
        branch, outline = closer.branch, closer.branch.outline
        ways = np.flatnonzero(closer.of_way <= self.limit)
        if not len(ways):
            return []
        plain, between = branch.work.plain, outline.between(branch.work.plain)
        alive = outline.alike(before_backwards(self._program(branch), closer.placed.kept, between, plain.message))
        fits = np.array([closer.placed.replicas.at_worst(plain, *of) for of in alive]).max(axis=0)
        found = self._candidates(closer, ways[fits[ways] <= self.room * (1 + SLACK)])
        return [(candidate, alive) for candidate in found]

    def _candidates(self, closer: Closer, which: np.ndarray) -> list[Candidate]:
        """Layouts of a branch that no bound of time excludes, among some ways to shard."""
        branch, outline = closer.branch, closer.branch.outline
        degrees, way, microbatches, plain = branch.work
        shards = [closer.placed.replicas.ways[i] for i in which]
        if not shards:
            return []
        every = [self._priced(degrees, way, of) for of in shards]
        times = np.stack([outline.times(stages) for stages in every], axis=1)
        finishing = np.stack([outline.finishing(stages) for stages in every], axis=1)
        added = outline.added(np.concatenate([np.zeros_like(finishing[:1]), finishing]))
        ends = outline.ends(times, plain.hop, microbatches, branch.order)
        left = np.flatnonzero(outline.least(ends, added, microbatches) * (1 - SLACK) <= self.limit)
        levels = (degrees, way, branch.pipe, branch.split)
        return [
            Candidate(
                (*levels, shards[i]), every[i], times[:, i], finishing[:, i][:, outline.kind],
                outline.launched(every[i], finishing[:, i], microbatches), outline,
            )
            for i in left
        ]

    def _program(self, branch: Branch) -> Columns:
        programs = self.plan.programs
        if branch.program not in programs:
            schedule, virtual = SCHEDULES[branch.pipe["schedule"]], branch.pipe["virtual_stages"] or 1
            pp, microbatches = branch.work.degrees["pp"], branch.work.microbatches
            program = build_program(schedule, pp, microbatches, virtual_stages=virtual, zero=1, transfers=False)
            programs[branch.program] = of_program(program)
        return programs[branch.program]

    def _player(self, branch: Branch) -> Player:
        if branch.program not in self.plan.players:
            self.plan.players[branch.program] = Player(self._program(branch))
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


def _table(candidate: Candidate) -> np.ndarray:
    """[6, stages] as `Player.step_times` takes them."""
    reduce, step, gather = candidate.finishing
    longest = candidate.outline.longest(step)
    return np.stack([*candidate.times, reduce, np.full_like(step, longest), gather])


def _fullest(stages: StagePrices, alive: Sequence[Alike]) -> PeakMemory:
    """Of ranks that hold alike, the one with the most activations is priced."""
    return max((stages.memory_of(*of) for of in alive), key=lambda memory: memory.reserved)
