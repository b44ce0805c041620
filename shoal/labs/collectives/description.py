"""A collective as plain data: who sends which blocks to whom in each round.

The data of a collective are cut into numbered blocks. A collective is defined by the blocks that each rank holds before
and after it; a `Description` is one algorithm for it, as rounds of messages.

    broadcast, reduce, all-reduce   the vector is cut into B blocks, as the algorithm needs it; or each rank has N
                                    copies of its vector, which are the blocks, and rank i keeps block i
    scatter, gather                 block i belongs to rank i
    all-gather, reduce-scatter      block i belongs to rank i
    all-to-all                      block i * N + j goes from rank i to rank j
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple


class Collective(StrEnum):
    """A collective operation."""

    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"


HELD = {
    Collective.BROADCAST: ("root", "all"),
    Collective.REDUCE: ("all", "root"),
    Collective.SCATTER: ("root", "own"),
    Collective.GATHER: ("own", "root"),
    Collective.ALL_GATHER: ("own", "all"),
    Collective.REDUCE_SCATTER: ("all", "own"),
    Collective.ALL_REDUCE: ("all", "all"),
    Collective.ALL_TO_ALL: ("row", "column"),
}
"""The blocks that a rank holds before and after: all of them, all on the root and none elsewhere, its own, or its row
or column of the matrix of blocks."""

VECTORS = frozenset({Collective.BROADCAST, Collective.REDUCE, Collective.ALL_REDUCE})
"""Collectives whose blocks are cut from one vector by the algorithm; in the others the caller defines the blocks."""

ROOTED = frozenset({Collective.BROADCAST, Collective.REDUCE, Collective.SCATTER, Collective.GATHER})
REDUCING = frozenset({Collective.REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE})


class Message(NamedTuple):
    """Blocks that one rank sends to another; the target adds them to its own (``reduce``) or stores them."""

    source: int
    target: int
    blocks: tuple[int, ...]
    reduce: bool = False


Round = tuple[Message, ...]


@dataclass(frozen=True)
class Description:
    """One algorithm for one collective on a number of ranks.

    All messages of a round are in flight together, and a rank begins a round when its own messages of the round before
    are done. In a round a rank sends at most one message and receives at most one (the one-port model).

    Attributes:
        root: of a broadcast, reduce, scatter or gather.
        blocks: number of blocks.
        copies: whether each block of an all-reduce is a copy of the vector.
    """

    collective: Collective
    algorithm: str
    ranks: int
    root: int
    blocks: int
    rounds: tuple[Round, ...]
    copies: bool = False

    @property
    def messages(self) -> Iterator[Message]:
        """The messages of all rounds."""
        return (message for messages in self.rounds for message in messages)

    def initial(self, rank: int) -> tuple[int, ...]:
        """Return the blocks that a rank holds at the start, its input."""
        return self._held(rank, HELD[self.collective][0])

    def final(self, rank: int) -> tuple[int, ...]:
        """Return the blocks that a rank must hold at the end, its output."""
        return self._held(rank, "own" if self.copies else HELD[self.collective][1])

    def _held(self, rank: int, which: str) -> tuple[int, ...]:
        if which == "own":
            return (rank,)
        if which == "row":
            return tuple(range(rank * self.ranks, (rank + 1) * self.ranks))
        if which == "column":
            return tuple(range(rank, self.blocks, self.ranks))
        return tuple(range(self.blocks)) if which == "all" or rank == self.root else ()

    # ---- counts, in units of S: the bytes of the largest input or output of one rank -----------------------------

    @property
    def share(self) -> Fraction:
        """One block as a fraction of S, if all blocks are equal."""
        parts = self.ranks if self.collective is Collective.ALL_TO_ALL else self.blocks
        return Fraction(1, 1 if self.copies else parts)

    @cached_property
    def volume(self) -> Fraction:
        """Sum over rounds of the largest message: the factor of beta on a network without contention."""
        return self.share * sum(max(len(message.blocks) for message in messages) for messages in self.rounds)

    @cached_property
    def reduced(self) -> Fraction:
        """Sum over rounds of the largest reduced message: the factor of gamma."""
        sizes = ([len(message.blocks) for message in messages if message.reduce] for messages in self.rounds)
        return self.share * sum(max(round_sizes, default=0) for round_sizes in sizes)

    @cached_property
    def total(self) -> Fraction:
        """Volume sent by all ranks together."""
        return self.share * sum(len(message.blocks) for message in self.messages)

    @cached_property
    def busiest(self) -> Fraction:
        """Largest volume that one rank sends or receives."""
        sent, received = [0] * self.ranks, [0] * self.ranks
        for message in self.messages:
            sent[message.source] += len(message.blocks)
            received[message.target] += len(message.blocks)
        return self.share * max(sent + received)


def even(total: int, parts: int) -> list[int]:
    """Split a total into parts that differ by at most 1, the larger ones first.

    >>> even(10, 4)
    [3, 3, 2, 2]
    """
    small, larger = divmod(total, parts)
    return [small + 1] * larger + [small] * (parts - larger)
