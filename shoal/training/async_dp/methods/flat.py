"""A replica's weights and gradients as flat tensors, and other tensors of the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.zero.rank_parameters import RankParameters


class FlatPart(NamedTuple):
    """One parameter's place in flat tensors: what this rank holds of it, which of the tensors, and where."""

    split: ParamPlacement
    bucket: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.split.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape."""
        return tuple(self.split.local)

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        """Return its part of flat tensors, as a view."""
        return flats[self.bucket][self.start : self.stop].view(self.shape)


class Flat:
    """A replica's parameters, none of which is sharded (ZeRO 0).

    Attributes:
        weights: that the optimizer updates, one flat tensor for each bucket.
        gradients: likewise.
        parts: the place of each parameter in both.
    """

    def __init__(self, parameters: RankParameters):
        self.parameters = parameters
        self.weights = [bucket.master for bucket in parameters.buckets]
        self.gradients = [gradients.shard for stage in parameters.stages for gradients in stage.gradients]
        self.parts = [
            FlatPart(slot.split, b, slot.start, slot.stop)
            for b, bucket in enumerate(parameters.buckets)
            for slot in bucket.slots
        ]

    @property
    def numel(self) -> int:
        """Elements of all buckets."""
        return sum(weights.numel() for weights in self.weights)

    def zeros(self) -> list[Tensor]:
        """Zeros in the layout of the weights."""
        return [torch.zeros_like(weights) for weights in self.weights]

    def slices(self, whole: Tensor) -> list[Tensor]:
        """One tensor [numel] as one view for each bucket."""
        return list(whole.split([weights.numel() for weights in self.weights]))

    def pieces(self, flats: Sequence[Tensor]) -> dict[str, list[Piece]]:
        """Pieces of flat tensors by the names of the parameters, for a checkpoint."""
        buckets = zip(self.parameters.buckets, flats, strict=True)
        return self.parameters.pieces(flat[run.slice] for bucket, flat in buckets for run in bucket.runs)
