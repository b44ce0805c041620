"""All parameters on one rank, across its pipeline stages."""

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
    """Parameters of all pipeline stages of this rank.

    Args:
        stages: the parameters of each stage, in order.
        ends: the ranks of the first and last model parts if these share a tied embedding.
    """

    def __init__(self, stages: Sequence[ShardedParameters], ends: Group | None = None):
        self.stages, self.ends = stages, ends

    @property
    def buckets(self) -> list[Bucket]:
        """Return the buckets of all stages, in order."""
        return [bucket for stage in self.stages for bucket in stage.buckets]

    def runs(self) -> Iterator[tuple[ShardSegment, Tensor, Tensor]]:
        """Yield (segment, flat weights, flat gradients) of this rank's shards, as views for the optimizer."""
        for stage in self.stages:
            yield from stage.runs()

    def sum_ends(self) -> None:
        """Sum the gradient of a tied embedding over the model's first and last stages.

        All holders shard it identically, on one rank or two, and get bitwise equal sums.
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
        """Return this rank's share of the squared gradient norm, float64; all ranks' shares sum to the global value."""
        return reduce(add, (stage.square_norm() for stage in self.stages))

    def scale(self, factor: float) -> None:
        """Multiply every gradient by a factor."""
        for stage in self.stages:
            stage.scale(factor)

    def gather(self) -> None:
        """Gather persistent full parameters after their shards changed."""
        for stage in self.stages:
            stage.gather()

    def pieces(self, tensors: Iterable[Tensor]) -> dict[str, list[Piece]]:
        """Return the pieces of flat tensors by parameter name; one tensor per item of `runs`."""
        tensors = iter(tensors)
        return _merged(stage.pieces(tensors) for stage in self.stages)

    def weights(self) -> dict[str, list[Piece]]:
        """Return the weights that this rank updates, as pieces by name."""
        return _merged(stage.weights() for stage in self.stages)

    def reduced_gradients(self) -> dict[str, list[Piece]]:
        """Return the gradients of these weights, complete at the optimizer step, as pieces by name."""
        return _merged(stage.reduced_gradients() for stage in self.stages)

    def bytes(self) -> dict[str, int]:
        """Return the bytes allocated between steps for parameters (full and master) and gradients."""
        each = [stage.bytes() for stage in self.stages]
        return {kind: sum(bytes[kind] for bytes in each) for kind in each[0]}


def _merged(stages: Iterable[dict[str, list[Piece]]]) -> dict[str, list[Piece]]:
    """Merge by name; an embedding shared by two stages occurs twice."""
    merged: dict[str, list[Piece]] = {}
    for stage in stages:
        for name, pieces in stage.items():
            merged.setdefault(name, []).extend(pieces)
    return merged
