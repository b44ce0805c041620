"""Batches of a model of one's own, the same on every layout and after every resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shoal.base.errors import UsageError
from shoal.engine.data.order import SampleOrder
from shoal.engine.own.definition import OwnModel
from shoal.engine.streams import to_device


@dataclass(frozen=True)
class OwnBatch:
    """One micro-batch.

    Attributes:
        values: any nesting of tensors.
        first: global index of its first sample, which seeds what the module draws.
    """

    values: Any
    first: int

    def unmasked(self) -> int:
        """Return 1: the loss counts its terms when it is computed."""
        return 1

    def to(self, device: torch.device) -> OwnBatch:
        """Return the batch on a device, without waiting."""
        return self.map(lambda tensor: to_device(tensor, device))

    def map(self, change: Callable[[Tensor], Tensor]) -> OwnBatch:
        """Return the batch with each tensor changed."""
        values = tree_map(lambda value: change(value) if isinstance(value, Tensor) else value, self.values)
        return replace(self, values=values)


class OwnDataset:
    """Samples of a definition in the order of a seed; validation has one fixed order.

    Raises:
        UsageError: there is no sample.
    """

    vocab_size = 2

    def __init__(self, own: OwnModel, split: str, seed: int):
        self._source, self._collate = own.samples(split), own.collate
        self.samples = len(self._source)
        if self.samples < 1:
            raise UsageError(f"model.module: its {split} data is empty.")
        self.fingerprint = f"{type(self._source).__name__} of {self.samples} samples"
        self._order = SampleOrder(self.samples, seed if split == "train" else 0)

    def batch(self, indices: Sequence[int]) -> OwnBatch:
        """Return the samples at these indices, which continue across epochs without end."""
        return OwnBatch(self._collate([self._source[i] for i in self._order(indices).tolist()]), indices[0])
