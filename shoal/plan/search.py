"""The best layouts of a cluster: branch and bound over `shoal.plan.space`, with the estimate's own times and bytes.

Level by level, what cannot be among the best is left out: a work (micro-batch and what is recomputed) by the time that
its FLOPs take without any bubble; a pipeline by `shoal.plan.bounds` and by the micro-batches that it must keep; a
layout by its reductions besides, and by its memory. What is left is played (`shoal.simulate`), all layouts of a program
at once. No bound is above the estimate, so the answer is that of pricing every layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shoal.cost.state import ALIGN, StagePart
from shoal.layout import Layout
from shoal.pipeline.program import Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.plan.bounds import Chain, first_rank
from shoal.plan.estimate import Estimate, Memory, Run
from shoal.plan.parts import stage_parts
from shoal.plan.space import LEVELS, Fields, Space, depth_of, layout_of, meshes, pipelines, shardings, splits, works
from shoal.simulate.columns import BACKWARD, FORWARD, WEIGHT, Columns, of_schedule
from shoal.simulate.many import Replay

SLACK = 1e-9  # relative: a bound and a time may differ by as much in rounding
PADDING = 32 * ALIGN  # bytes, at most, by which each bucket of a rank is rounded up, for each of its shards
TOLD_APART = (
    "dp", "tp", "cp", "ulysses", "ep", "etp", "pp", "schedule", "virtual_stages", "micro_batch", "recompute",
)  # fmt: skip
Progressing = Callable[[int, int, "Plan"], None]


class Found(NamedTuple):
    """A layout, priced.

    Attributes:
        seconds: of a step.
        layout: complete.
        memory: of its fullest rank.
    """

    seconds: float
    layout: Layout
    memory: Memory


@dataclass
class Plan:
    """What a search found.

    Attributes:
        run: what it was for; its layout says nothing.
        best: the fastest that fits of each mesh, pipeline, micro-batch and recomputation, the fastest first.
        programs, played: programs that were written down, and layouts that were played.
        works, pruned: degrees with a micro-batch, and how many of them were left out unseen.
        seconds: that the search took.
    """

    run: Run
    best: list[Found] = field(default_factory=list)
    programs: int = 0
    played: int = 0
    works: int = 0
    pruned: int = 0
    seconds: float = 0.0


def family(layout: Layout) -> tuple:
    """What tells two layouts of a list apart; in the rest each is the best of its kind."""
    return tuple(getattr(layout, name) for name in TOLD_APART)


def search(run: Run, space: Space | None = None, *, count: int = 10, progress: Progressing | None = None) -> Plan:
    """The fastest layouts that fit.

    Args:
        run: its layout is ignored.
        count: how many to list, each of another mesh, pipeline, micro-batch or recomputation.
        progress: called with works done, all works, and what is found so far.
    """
    begin = time.perf_counter()
    searching = Search(run, space or Space(), count)
    searching.all(progress)
    searching.plan.seconds = time.perf_counter() - begin
    return searching.plan


class Work(NamedTuple):
    """Degrees and a micro-batch: what has the same FLOPs on each rank.

    Attributes:
        least: seconds that its fastest way takes, at least.
        degrees: dp, tp, cp, ulysses, ep, etp, pp.
        microbatches: of each replica.
        ways: what is recomputed and split, with the least seconds of each, in rising order.
    """

    least: float
    degrees: Fields
    microbatches: int
    ways: list[tuple[float, Fields]]

    @property
    def promise(self) -> float:
        """What it takes with some of the bubble of a pipeline: no bound, but what to look at first."""
        return self.least * (1 + (self.degrees["pp"] - 1) / (2 * self.microbatches))


@dataclass(frozen=True)
class Outline:
    """A pipeline without any order: where its stages are and what they hold. Stages that are alike are of one kind.

    Attributes:
        chain: the program's outline.
        kinds: one stage of each kind.
        kind: [stages] the kind of each.
        ranks: of ranks that hold alike, (which ones, their stages).
    """

    chain: Chain
    kinds: list[StagePart]
    kind: np.ndarray
    ranks: list[tuple[list[int], list[StagePart]]]

    @staticmethod
    def of(run: Run, program: Program, schedule: str) -> Outline:
        """Of a program."""
        parts = stage_parts(run.shape, program)
        kinds: dict[tuple, int] = {}
        sparse = [sum(run.shape.sparse(layer) for layer in part.layers) for part in parts]
        alike = [(len(p.layers), experts, p.first, p.last) for p, experts in zip(parts, sparse, strict=True)]
        kind = np.array([kinds.setdefault(key, len(kinds)) for key in alike])
        ranks: dict[tuple, list[int]] = {}
        for rank in range(program.ranks):
            ranks.setdefault(tuple(kind[program.stages_of(rank)]), []).append(rank)
        held = [(same, [parts[stage] for stage in program.stages_of(same[0])]) for same in ranks.values()]
        return Outline(Chain(program, schedule), [parts[int(np.argmax(kind == k))] for k in kinds.values()], kind, held)

    def times(self, estimate: Estimate) -> np.ndarray:
        """[3, stages] seconds of forwards and of both halves of backwards."""
        priced = [estimate.stage_of(part) for part in self.kinds]
        return np.array([(s.forward, s.backward_input, s.backward_weight) for s in priced]).T[:, self.kind]

    def finishing(self, estimate: Estimate) -> np.ndarray:
        """[3, stages] seconds: reduction, optimizer, gather."""
        return np.array([estimate.finish_of(part) for part in self.kinds]).T[:, self.kind]

    def kept(self, estimate: Estimate) -> np.ndarray:
        """[stages] bytes that a micro-batch keeps alive."""
        return np.array([estimate.kept_of(part) for part in self.kinds], float)[self.kind]

    @cached_property
    def holds(self) -> np.ndarray:
        """[ranks, stages] 1 where a rank holds a stage."""
        return (np.arange(self.chain.ranks)[:, None] == self.chain.holder).astype(float)

    def least(self, ends: tuple[np.ndarray, float], finishing: np.ndarray) -> float:
        """Seconds that a step takes at least."""
        reduce, step, gather = finishing @ self.holds.T
        after = reduce + step.max() + gather
        firsts = self.chain.holder[:: self.chain.program.depth]
        return max(float((ends[0] + after).max()), ends[1] + float(after[firsts].min()))


class Candidate(NamedTuple):
    """A layout that no bound excludes.

    Attributes:
        levels: its fields.
        estimate: of single stages.
        outline: its pipeline's.
        times, finishing: [3, stages] as the outline has them.
        memory: of the fullest rank.
    """

    levels: tuple[Fields, ...]
    estimate: Estimate
    times: np.ndarray
    finishing: np.ndarray
    outline: Outline
    memory: Memory


class Search:
    """A search under way.

    Args:
        run: its layout is ignored.
        space: what is chosen from.
        count: how many to find.
    """

    def __init__(self, run: Run, space: Space, count: int):
        self.run, self.space, self.count = run, space, count
        self.plan = Plan(run)
        self.known: dict = {}
        self.estimates: dict[tuple, Estimate] = {}
        self.programs: dict[tuple, tuple[Columns, Replay]] = {}
        self.outlines: dict[tuple, Outline] = {}
        self.states: dict[tuple, np.ndarray] = {}
        self.families: dict[tuple, Found] = {}
        self.limit = np.inf
        self.room = run.cluster.accelerator.memory_bytes

    def all(self, progress: Progressing | None = None) -> None:
        """Go through everything, the most promising first."""
        found = sorted(self._works(), key=lambda work: work.promise)
        self.plan.works = len(found)
        for work in self._first(found):
            self._look(work, quick=True)
        for done, work in enumerate(found):
            if work.least > self.limit:
                self.plan.pruned += 1
                continue
            self._look(work)
            if progress:
                progress(done + 1, len(found), self.plan)

    def _first(self, found: list[Work]) -> Iterator[Work]:
        """A work of each mesh, until the list is full: a first limit."""
        seen = set()
        for work in found:
            if len(self.families) >= self.count:
                return
            mesh = tuple(work.degrees.values())
            if mesh not in seen:
                seen.add(mesh)
                yield work

    def _works(self) -> Iterator[Work]:
        for degrees in meshes(self.run, self.space):
            every = works(self.run, degrees, self.space)
            for micro_batch, same in groupby(every, key=lambda way: way["micro_batch"]):
                ways = [(self._least(degrees, way), way) for way in same if self._may_fit(degrees, way).any()]
                if ways:
                    ways.sort(key=lambda entry: entry[0])
                    microbatches = self.run.global_batch // (degrees["dp"] * micro_batch)
                    yield Work(ways[0][0], degrees, microbatches, ways)

    def _least(self, degrees: Fields, way: Fields) -> float:
        """All FLOPs of a step, spread evenly."""
        estimate = self._estimate(degrees, way, {"zero": 0})
        once = estimate.stage_of(StagePart(range(self.run.shape.layers)))
        seconds = once.forward + once.backward_input + once.backward_weight
        return estimate.run.microbatches * seconds / degrees["pp"] * (1 - SLACK)

    def _may_fit(self, degrees: Fields, way: Fields, alive: float = 0.0) -> np.ndarray:
        """[shardings] whether a rank's share of the layers could be held, with some activations: some rank has it.

        Where some layers have experts and others not, nobody knows which layers these are, and all may.
        """
        key = tuple(degrees.values())
        if key not in self.states and self.run.shape.experts:
            self.states[key] = np.zeros(len(shardings(degrees, self.space)))
        if key not in self.states:
            layers = -(-self.run.shape.layers // degrees["pp"])
            part = [StagePart(range(layers), first=False, last=False)]
            every = shardings(degrees, self.space)
            resting = np.array([self._resting(degrees, way, shards, part) for shards in every], float)
            shards = np.array([self._estimate(degrees, way, shards).run.layout.shards for shards in every])
            self.states[key] = resting - (layers + 2) * PADDING * shards
        return self.states[key] + alive <= self.room

    def _first_fits(
        self, degrees: Fields, way: Fields, outline: Outline, alive: float, which: np.ndarray
    ) -> np.ndarray:
        """For some of the shardings, whether the first rank could hold its stages and its activations."""
        held = outline.ranks[0][1]
        key = (*degrees.values(), *((part.layers, part.first, part.last) for part in held))
        every = shardings(degrees, self.space)
        resting = self.states.setdefault(key, np.full(len(every), np.nan))
        for i in which[np.isnan(resting[which])]:
            resting[i] = self._resting(degrees, way, every[i], held)
        return resting[which] + alive <= self.room

    def _resting(self, degrees: Fields, way: Fields, shards: Fields, held: Sequence[StagePart]) -> int:
        """Bytes that a rank holds between steps, which no micro-batch or recomputation changes."""
        state = self._estimate(degrees, way, shards).state_of(held)
        return state.parameters + state.gradients + state.optimizer

    def _estimate(self, degrees: Fields, way: Fields, shards: Fields) -> Estimate:
        """Of stages one by one: for every schedule and every split."""
        key = (*degrees.values(), *way.values(), *shards.values())
        if key not in self.estimates:
            run = replace(self.run, layout=layout_of(self.space, degrees, way, shards))
            self.estimates[key] = Estimate(run, Program(((),), (0,), 1), self.known)
        return self.estimates[key]

    # ---- one work, by every pipeline -----------------------------------------------------------------------------

    def _look(self, work: Work, *, quick: bool = False) -> None:
        """Every pipeline of a work; or a quick look at some layouts with the first schedule alone."""
        for pipe in pipelines(self.run, work.degrees, work.ways[0][1], self.space):
            candidates = list(self._candidates(work, pipe, quick))
            if candidates:
                self._play(work, pipe, candidates)
            if quick:
                return

    def _candidates(self, work: Work, pipe: Fields, quick: bool) -> Iterator[Candidate]:
        """Layouts of a pipeline that fit, and that no bound of time excludes."""
        degrees, pp = work.degrees, work.degrees["pp"]
        every = splits(self.run.shape, pp, depth_of(pp, pipe), self.space)[: 1 if quick else None]
        replicas = shardings(degrees, self.space)
        wanted = np.array([not quick or shards.get("zero_shard") is None for shards in replicas])
        for least, way in work.ways:
            if least > self.limit:
                return
            plain = self._estimate(degrees, way, {"zero": 0})
            for split in every:
                outline = self._outline(work, pipe, split)
                times = outline.times(plain)
                ends = outline.chain.ends(*times, plain.hop)
                if max(ends[0].max(), ends[1]) * (1 - SLACK) > self.limit:
                    continue
                kept = outline.kept(plain)
                begun = first_rank(pipe["schedule"], pp, work.microbatches, len(outline.kind) // pp)
                first = float((begun @ kept[outline.chain.holder == 0]).max())
                may_fit = np.flatnonzero(wanted & self._may_fit(degrees, way))
                may_fit = may_fit[self._first_fits(degrees, way, outline, first, may_fit)]
                if not len(may_fit):
                    continue
                alive = _peaks(self._program(work, pipe)[0], kept)
                may_fit = np.intersect1d(may_fit, np.flatnonzero(self._may_fit(degrees, way, alive.min())))
                found = []
                for shards in [replicas[i] for i in may_fit]:
                    estimate = self._estimate(degrees, way, shards)
                    own, reached = times, ends
                    finishing = outline.finishing(estimate)
                    if outline.least(reached, finishing) * (1 - SLACK) > self.limit:
                        continue
                    if shards["zero"] >= 2:
                        own = outline.times(estimate)
                        reached = outline.chain.ends(*own, plain.hop)
                        if outline.least(reached, finishing) * (1 - SLACK) > self.limit:
                            continue
                    memory = _fullest(estimate, outline, alive)
                    if memory.reserved <= self.room:
                        levels = (degrees, way, pipe, split, shards)
                        found.append(Candidate(levels, estimate, own, finishing, outline, memory))
                yield from _not_dominated(found)

    def _outline(self, work: Work, pipe: Fields, split: Fields) -> Outline:
        pp = work.degrees["pp"]
        key = (pp, work.microbatches, *pipe.values(), split["stage_layers"])
        if key not in self.outlines:
            schedule = SCHEDULES[pipe["schedule"]]
            placement = schedule.placement(pp, schedule.virtual or pipe["virtual_stages"])
            layers = split["stage_layers"] or ()
            program = Program(((),) * pp, placement, work.microbatches, copies=schedule.copies, layers=layers)
            self.outlines[key] = Outline.of(self.run, program, pipe["schedule"])
        return self.outlines[key]

    # ---- one program ---------------------------------------------------------------------------------------------

    def _play(self, work: Work, pipe: Fields, candidates: Sequence[Candidate]) -> None:
        """Play layouts of one program at once, and keep the best."""
        _, replay = self._program(work, pipe)
        times = np.stack([_table(candidate) for candidate in candidates], axis=2)
        seconds = replay.step_times(times, [candidate.estimate.link for candidate in candidates])
        self.plan.played += len(candidates)
        for step, candidate in zip(seconds, candidates, strict=True):
            self._keep(Found(float(step), layout_of(self.space, *candidate.levels), candidate.memory))

    def _program(self, work: Work, pipe: Fields) -> tuple[Columns, Replay]:
        pp = work.degrees["pp"]
        key = (pp, work.microbatches, *pipe.values())
        if key not in self.programs:
            schedule, virtual = SCHEDULES[pipe["schedule"]], pipe["virtual_stages"] or 1
            columns = of_schedule(schedule, pp, work.microbatches, virtual, gathers=True)
            self.programs[key] = columns, Replay(columns)
            self.plan.programs += 1
        return self.programs[key]

    def _keep(self, found: Found) -> None:
        which = family(found.layout)
        known = self.families.get(which)
        if found.seconds > self.limit or (known and known.seconds < found.seconds * (1 - SLACK)):
            return
        if known and order(known) <= order(found):
            return
        self.families[which] = found
        others = [other for other in self.plan.best if family(other.layout) != which]
        self.plan.best = sorted([*others, found], key=order)[: self.count]
        if len(self.plan.best) == self.count:
            self.limit = self.plan.best[-1].seconds * (1 + SLACK)


def order(found: Found) -> tuple:
    """Equally fast ones by the memory that they need, then by name."""
    names = tuple(str(getattr(found.layout, name)) for name in LEVELS)
    return (float(f"{found.seconds:.9g}"), float(f"{found.memory.reserved:.9g}"), names)


def _table(candidate: Candidate) -> np.ndarray:
    """[6, stages] as `Replay.step_times` takes them."""
    reduce, step, gather = candidate.finishing
    longest = (candidate.outline.holds @ step).max()
    return np.stack([*candidate.times, reduce, np.full_like(step, longest), gather])


def _not_dominated(found: list[Candidate]) -> list[Candidate]:
    """Without those of which another takes no longer in anything: nor does then its step, whatever the program."""
    if len(found) < 2:
        return found
    order = sorted(found, key=lambda candidate: candidate.memory.reserved)
    times = np.array([[*candidate.times, *candidate.finishing] for candidate in order])  # [n, 6, stages]
    kept: list[int] = []
    for i in np.argsort(times.sum(axis=(1, 2)), kind="stable"):
        if not any((times[k] <= times[i]).all() for k in kept):
            kept.append(i)
    return [order[i] for i in kept]


def _peaks(columns: Columns, kept: np.ndarray) -> np.ndarray:
    """[ranks] bytes of activations at the worst time, as `Timeline.peak_bytes` has them."""
    change = np.zeros(columns.rows)
    for code, sign in ((FORWARD, 1.0), (BACKWARD, -1.0), (WEIGHT, -1.0)):
        rows = columns.op == code
        change[rows] = sign * kept[columns.stage[rows]]
    return np.array([np.cumsum(rank).max(initial=0.0) for rank in np.split(change, columns.offset[1:-1])])


def _fullest(estimate: Estimate, outline: Outline, alive: np.ndarray) -> Memory:
    """Of ranks that hold alike, the one with the most activations is priced."""
    memories = [estimate.memory_of(held, float(alive[alike].max())) for alike, held in outline.ranks]
    return max(memories, key=lambda memory: memory.reserved)
