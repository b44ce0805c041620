"""All that one rank holds: the parameters of its pipeline stages, as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import add

from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.ops import Group, all_reduce
from shoal.engine.parallel.placement import ENDS
from shoal.engine.parallel.zero.bucket import Bucket, ShardSegment
from shoal.engine.parallel.zero.zero_engine import ShardedParameters


class RankParameters:
    """The parameters of every stage of this rank.

    Args:
        stages: in order.
        ends: the ranks that hold the first or the last part of the model, where these share a tied embedding.
    """

    def __init__(self, stages: Sequence[ShardedParameters], ends: Group | None = None):
        self.stages, self.ends = stages, ends

    @property
    def buckets(self) -> list[Bucket]:
        """Of all stages, in order."""
        return [bucket for stage in self.stages for bucket in stage.buckets]

    def runs(self) -> Iterator[tuple[ShardSegment, Tensor, Tensor]]:
        """What the optimizer updates: (run, flat weights, flat gradients) of this rank's shards, as views."""
        for stage in self.stages:
            yield from stage.runs()

    def sum_ends(self) -> None:
        """Complete the gradient of a tied embedding: add what the model's first and last stages have of it.

        They lie alike on all of them, on two ranks or on one, and all get the same bits.
        """
        shares = [gradient for run, _, gradient in self.runs() if ENDS in run.sum_over]
        if not shares:
            return
        total, *others = shares
        for other in others:
            total += other
        all_reduce(total, self.ends)
        for other in others:
            other.copy_(total)

    def square_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, float64; summed over all ranks it is the model's."""
        return reduce(add, (stage.square_norm() for stage in self.stages))

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for stage in self.stages:
            stage.scale(factor)

    def gather(self) -> None:
        """Make the parameters whole again where they stay whole, after their shards were changed."""
        for stage in self.stages:
            stage.gather()

    def pieces(self, tensors: Iterable[Tensor]) -> dict[str, list[Piece]]:
        """Name the parts of flat tensors, one for each of `runs`."""
        tensors = iter(tensors)
        return _merged(stage.pieces(tensors) for stage in self.stages)

    def weights(self) -> dict[str, list[Piece]]:
        """The pieces of the parameters that this rank updates."""
        return _merged(stage.weights() for stage in self.stages)

    def reduced_gradients(self) -> dict[str, list[Piece]]:
        """The pieces of their gradients, complete when the optimizer steps."""
        return _merged(stage.reduced_gradients() for stage in self.stages)

    def bytes(self) -> dict[str, int]:
        """Bytes alive between steps, by what they hold: parameters (whole and master) and gradients."""
        each = [stage.bytes() for stage in self.stages]
        return {kind: sum(bytes[kind] for bytes in each) for kind in each[0]}


def _merged(stages: Iterable[dict[str, list[Piece]]]) -> dict[str, list[Piece]]:
    """By name; an embedding that two stages share is there twice."""
    merged: dict[str, list[Piece]] = {}
    for stage in stages:
        for name, pieces in stage.items():
            merged.setdefault(name, []).extend(pieces)
    return merged
