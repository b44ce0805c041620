"""What a search finds out about a branch, step by step: its work on a pipeline's stages, bounds of time and memory, and
the layouts that are left."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.search.branches import SLACK, Branch
from shoal.planning.search.outline import Outline
from shoal.planning.search.replicas import ReplicaChoices
from shoal.planning.search.space import Fields


@dataclass(frozen=True, eq=False)
class Placed:
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
        return self.outline.kept(self.plain)

    @cached_property
    def kept_first(self) -> np.ndarray:
        """[stages of the first rank] the same, with what passes between two of them there once."""
        kept = [self.plain.kept_of(part) for part in self.outline.first]
        return np.array(kept) - self.plain.message * self.outline.chain.beside[self.outline.chain.holder == 0]

    @cached_property
    def working(self) -> int:
        """Bytes that come and go in a backward on the first rank, at least."""
        return self.plain.working(self.outline.first)

    @cached_property
    def empty(self) -> np.ndarray:
        """[ways] bytes that the first rank needs at least, with nothing alive."""
        return self.replicas.reserved(self.plain, self.outline.first, 0.0)

    @cached_property
    def emptiest(self) -> float:
        """The least of these."""
        return float(self.empty.min())

    def may_fit(self, alive: float, room: float) -> bool:
        """Whether the first rank may fit with so many bytes alive, in any way."""
        return self.emptiest + self.plain.with_holes(alive) <= room * (1 + SLACK)

    def fits(self, alive: float, room: float) -> np.ndarray:
        """[ways] whether it may in each."""
        return self.empty + self.plain.with_holes(alive) <= room * (1 + SLACK)

    @cached_property
    def times(self) -> np.ndarray:
        """[3, stages] seconds, without what ZeRO adds, but for rounding."""
        return self._by_kind[:, self.outline.kind]

    @cached_property
    def _by_kind(self) -> np.ndarray:
        return self.plain.linear[:3] @ self.outline.counts.T

    @cached_property
    def added(self) -> tuple[np.ndarray, np.ndarray]:
        """What each way to shard adds at least, as `Outline.added` has it."""
        return self.outline.added(self.replicas.adding(self.plain, self.outline.kinds, self._by_kind))


class Closer(NamedTuple):
    """A branch, looked at more closely.

    Attributes:
        least: seconds that a step of any of its layouts takes at least.
        branch: which.
        of_way: [ways] the same of each way to shard; infinite where it does not fit.
        placed: its work.
    """

    least: float
    branch: Branch
    of_way: np.ndarray
    placed: Placed


class Candidate(NamedTuple):
    """A layout that no bound excludes.

    Attributes:
        levels: its fields.
        stages: of its layout, priced.
        times, finishing: [3, stages] as the outline has them.
        launched: seconds that a host needs for a step at least.
        outline: its pipeline's.
    """

    levels: tuple[Fields, ...]
    stages: StagePrices
    times: np.ndarray
    finishing: np.ndarray
    launched: float
    outline: Outline
