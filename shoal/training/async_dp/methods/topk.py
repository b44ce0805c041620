"""Top-k compression: send only the largest elements of each gradient (Lin et al. 2018; Stich et al. 2018, algorithm 1).

Every replica sends the k elements of its gradient plus error that are largest in magnitude, with their indices. As the
indices differ between replicas, each rank gathers all of them and adds them in the order of the replicas. It receives
2 k (N - 1) numbers, fewer than in an all-reduce if the density is well below 1 / N.
"""

from __future__ import annotations

import math

import torch

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_gather
from shoal.training.async_dp.methods.compress import Compressed
from shoal.training.async_dp.methods.flat import Flat


class TopK(Compressed):
    """Top-k compression that sends the fraction ``density`` of the elements (1 sends all). See `Compressed`."""

    def __init__(self, flat: Flat, group: Group | None, density: float):
        super().__init__(flat, group)
        self.counts = [math.ceil(density * tensor.numel()) for tensor in self.tensors]

    def exchange(self) -> None:
        places, values = [], []
        for tensor, error, k in zip(self.tensors, self.error_views, self.counts, strict=True):
            mine = tensor.view(-1)
            place = mine.abs().topk(k, sorted=False).indices
            places.append(place.to(torch.int32))
            values.append(mine[place])
            error.copy_(tensor)
            error.view(-1)[place] = 0
        place, value = torch.cat(places), torch.cat(values)
        every_place = all_gather(place, self.group).view(-1, place.numel())
        every_value = all_gather(value, self.group).view(-1, place.numel())
        for tensor in self.tensors:
            tensor.zero_()
        for place, value in zip(every_place, every_value, strict=True):
            for tensor, at, what in zip(
                self.tensors, place.split(self.counts), value.split(self.counts), strict=True
            ):
                tensor.view(-1).index_add_(0, at, what)
