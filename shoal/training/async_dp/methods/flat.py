"""Flat tensors of a replica's weights, gradients and other values in the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.zero.rank_parameters import RankParameters


class FlatPart(NamedTuple):
    """Location of one parameter's local part, without padding: which of the flat tensors, and the range in it."""

    split: ParamPlacement
    bucket: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.split.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.split.box.shape

    def view(self, flats: Sequence[Tensor]) -> Tensor:
        return flats[self.bucket][self.start : self.stop].view(self.shape)


class Flat:
    """Parameters of a replica as flat tensors; none is sharded (ZeRO 0).

    Attributes:
        weights: weights that the optimizer updates, one flat tensor per bucket.
        gradients: their gradients in the same layout.
    """

    def __init__(self, parameters: RankParameters):
        self.parameters = parameters
        self.weights = [bucket.master for bucket in parameters.buckets]
        self.gradients = [gradients.shard for gradients in parameters.gradients]
        self.parts = [
            FlatPart(slot.placement, b, slot.start, slot.start + slot.placement.box.numel)
            for b, bucket in enumerate(parameters.buckets)
            for slot in bucket.slots if slot.placement.box.numel
        ]

    @property
    def numel(self) -> int:
        return sum(weights.numel() for weights in self.weights)

    def zeros(self) -> list[Tensor]:
        return [torch.zeros_like(weights) for weights in self.weights]

    def slices(self, flat: Tensor) -> list[Tensor]:
        """Split one tensor [numel] into a view per bucket."""
        return list(flat.split([weights.numel() for weights in self.weights]))

    def pieces(self, flats: Sequence[Tensor]) -> dict[str, list[Piece]]:
        """Return checkpoint pieces of flat tensors by parameter name."""
        buckets = zip(self.parameters.buckets, flats, strict=True)
        return self.parameters.pieces(flat[segment.slice] for bucket, flat in buckets for segment in bucket.segments)
