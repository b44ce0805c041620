"""What the methods work on: a replica's weights and gradients, flat, and numbers that lie like them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.zero.rank_parameters import HeldParameters


@dataclass(frozen=True)
class FlatPart:
    """One parameter's place in what is flat.

    Attributes:
        split: what this rank holds of the parameter.
        bucket: which of the flat tensors it lies in.
        start, stop: where.
    """

    split: ParamPlacement
    bucket: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.split.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank holds of it."""
        return tuple(self.split.local)

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        """Its part of some flat tensors, as a view."""
        return flats[self.bucket][self.start : self.stop].view(self.shape)


class Flat:
    """A replica's parameters, none of which is sharded (ZeRO 0).

    Attributes:
        weights: that the optimizer updates, one flat tensor for each bucket.
        gradients: the same of the gradients.
        parts: where each parameter lies in both.
    """

    def __init__(self, parameters: HeldParameters):
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
        """Numbers that lie like the weights."""
        return [torch.zeros_like(weights) for weights in self.weights]

    def slices(self, whole: Tensor) -> list[Tensor]:
        """One tensor [numel] as one view for each bucket."""
        return list(whole.split([weights.numel() for weights in self.weights]))

    def pieces(self, flats: Sequence[Tensor]) -> dict[str, list[Piece]]:
        """Numbers that lie like the weights, by the names of the parameters, for a checkpoint."""
        return self.parameters.pieces(self._runs(flats))

    def _runs(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        for bucket, flat in zip(self.parameters.buckets, flats, strict=True):
            for run in bucket.runs:
                yield flat[run.slice]
