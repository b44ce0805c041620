"""Batches of a model of one's own, the same on every layout and after every resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shoal.base.errors import UsageError
from shoal.engine.data.order import SampleOrder
from shoal.engine.models.initial import stream_key
from shoal.engine.own.definition import OwnModel, drawing, generator_states
from shoal.engine.own.user_code import explained
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

    def tensors(self) -> list[Tensor]:
        return [value for value in tree_leaves(self.values) if isinstance(value, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> OwnBatch:
        values = tree_map(lambda value: change(value) if isinstance(value, Tensor) else value, self.values)
        return replace(self, values=values)


class OwnDataset:
    """Samples of a definition in the order of a seed; validation has one fixed order.

    Attributes:
        draws: whether a sample or a batch uses random numbers. Then each batch is made with the numbers of the seed and
            of its first index, and not by a thread: the module draws from the same generators.

    Raises:
        UsageError: there is no sample, or a batch of samples cannot be made.
    """

    vocab_size = 2

    def __init__(self, own: OwnModel, split: str, seed: int):
        self._source, self._collate, self._seed, self._split = own.samples(split), own.collate, seed, split
        try:
            self.samples = len(self._source)
        except TypeError:
            raise UsageError(f"model.module: its {split} data is {type(self._source).__name__}, which has no length."
                             "\n  Give samples with len(data) and data[i], or a function that returns them.") from None
        if not hasattr(self._source, "__getitem__"):
            raise UsageError(f"model.module: its {split} data is {type(self._source).__name__}, which has no data[i]."
                             "\n  Give the samples themselves, such as the dataset of a DataLoader.")
        if self.samples < 1:
            raise UsageError(f"model.module: its {split} data is empty.")
        self._order = SampleOrder(self.samples, seed if split == "train" else 0)
        with drawing(seed):
            before = generator_states()
            first = self._make([0])
            self.draws = generator_states() != before
        self.fingerprint = f"{type(self._source).__name__} of {self.samples} samples, the first {_digest(first)}"

    def batch(self, indices: Sequence[int]) -> OwnBatch:
        """Return the samples at these indices, which continue across epochs without end."""
        with drawing(stream_key(self._seed, f"sample {indices[0]}")) if self.draws else nullcontext():
            values = self._make(self._order(indices).tolist())
        return OwnBatch(values, indices[0])

    def _make(self, numbers: list[int]) -> Any:
        with explained(f"its {self._split} batch of samples {', '.join(map(str, numbers))}"):
            return self._collate([self._source[i] for i in numbers])


def _digest(values: Any) -> str:
    """Return a hash of the tensors and plain values of a batch."""
    found = blake2b(digest_size=8)
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            found.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (int, float, str, bytes)):
            found.update(repr(leaf).encode())
    return found.hexdigest()
