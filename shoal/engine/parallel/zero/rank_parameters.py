"""Parameters, gradients and weights of one rank, across its pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.parallel.placement import ENDS
from shoal.engine.parallel.zero.bucket import ShardSegment
from shoal.engine.parallel.zero.zero_engine import ShardedParameters


class RankParameters:
    """Parameters of all pipeline stages of this rank.

    Args:
        ends: the ranks of the first and last model parts if these share a tied embedding.
    """

    def __init__(self, stages: Sequence[ShardedParameters], ends: Group | None = None):
        self.stages, self.ends = stages, ends
        self.buckets = [bucket for stage in stages for bucket in stage.buckets]
        self.gradients = [gradients for stage in stages for gradients in stage.gradients]

    def shards(self) -> Iterator[tuple[ShardSegment, Tensor, Tensor]]:
        """Yield (segment, flat weights, flat gradients) of this rank's shards, as views for the optimizer."""
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for segment in bucket.segments:
                yield segment, bucket.master[segment.slice], gradients.update[segment.slice]

    def sum_ends(self) -> None:
        """Sum the gradient of a tied embedding over the model's first and last stages.

        All holders shard it identically, on one rank or two, and get bitwise equal sums.
        """
        parts = [gradient for segment, _, gradient in self.shards() if ENDS in segment.sum_over]
        if not parts:
            return
        total, *others = parts
        for other in others:
            total += other
        all_reduce(total, self.ends)
        for other in others:
            other.copy_(total)

    def square_norm(self) -> Tensor:
        """Return this rank's share of the squared gradient norm, float64; all ranks' shares sum to the global value.

        Elements held by several ranks are divided by their number, so each counts once.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.stages[0].mesh.device)
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for segment in bucket.segments:
                total += gradients.square(segment).to(total.device) / (segment.copies * bucket.groups.copies)
        return total

    def scale(self, factor: float) -> None:
        """Multiply every gradient by a factor."""
        for gradients in self.gradients:
            gradients.update.mul_(factor)

    def gather(self) -> None:
        """Gather persistent full parameters after their shards changed."""
        for stage in self.stages:
            stage.gather()

    def pieces(self, tensors: Iterable[Tensor]) -> dict[str, list[Piece]]:
        """Return, by parameter name, the pieces of flat tensors laid out like each of `shards`, in order.

        An embedding that two stages share occurs twice.
        """
        named: dict[str, list[Piece]] = {}
        tensors = iter(tensors)
        for bucket in self.buckets:
            for segment in bucket.segments:
                for name, piece in bucket.pieces(next(tensors), segment.start):
                    piece.primary &= bucket.groups.copy == 0
                    named.setdefault(name, []).append(piece)
        return named

    def weights(self) -> dict[str, list[Piece]]:
        """Return the weights that this rank updates, as pieces by name."""
        return self.pieces(bucket.master[part.slice] for bucket in self.buckets for part in bucket.segments)

    def reduced_gradients(self) -> dict[str, list[Piece]]:
        """Return the gradients of these weights, complete at the optimizer step, as pieces by name."""
        return self.pieces(gradients for _, _, gradients in self.shards())

    def bytes(self) -> dict[str, int]:
        """Return the bytes allocated between steps: parameters (full, shards, master) and gradients on the device, and
        offloaded tensors on the host.
        """
        storages: dict[str, dict[int, int]] = {"parameters": {}, "gradients": {}, "host": {}}
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            held: dict[str, list[Tensor]] = {"parameters": [bucket.full], "gradients": [gradients.shard], "host": []}
            held["parameters"] += [] if bucket.shard is None else [bucket.shard]
            held["host" if bucket.offloaded else "parameters"].append(bucket.master)
            held["host"] += [] if bucket.shadow is None else [bucket.shadow]
            held["host" if bucket.offloaded else "gradients"].append(gradients.update)
            for kind, tensors in held.items():
                for tensor in tensors:
                    storage = tensor.untyped_storage()
                    storages[kind][storage._cdata] = storage.nbytes()
        return {kind: sum(sizes.values()) for kind, sizes in storages.items()}
