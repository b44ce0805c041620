"""Hash the choice of experts of all tokens to one number per layer, independent of ranks and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal.engine.models.experts.router import Router, RoutingContext, find_modules
from shoal.engine.models.initial import uniform
from shoal.spec.catalog import ModelShape

WORD = 1 << 64


class Choices:
    """Recorder of the routers of a model or parts of one.

    Each (sample, position, expert) is hashed to 53 bits, and the hashes are summed as integers. Two tokens that swap
    experts change the sum with probability 1 - 2^-53.
    """

    def __init__(self, modules: Iterable[nn.Module], shape: ModelShape, sequence_length: int):
        self._shape, self._length = shape, sequence_length
        self._sums: dict[tuple[int, tuple[int, ...]], int] = {}  # by layer and samples, as recomputation repeats them
        self._hooks = [
            router.register_forward_hook(self._watch) for module in modules for router in find_modules(module, Router)
        ]

    def _watch(self, router: Router, args: tuple[Tensor, RoutingContext], output: tuple[Tensor, Tensor]) -> None:
        samples, chosen = args[1].samples, output[1]
        assert samples is not None, "training passes the numbers of its samples"
        places = torch.arange(self._shape.taken(router.layer, self._length), device=chosen.device)
        tokens = router.places.own(samples.unsqueeze(1) * self._length + places)  # [b, s], numbered over all samples
        pairs = tokens.unsqueeze(-1) * chosen.shape[-1] + torch.arange(chosen.shape[-1], device=chosen.device)
        hashes = (uniform(router.layer, pairs[chosen]) * 2.0**53).long()
        self._sums[router.layer, tuple(samples.tolist())] = int(hashes.sum())

    def taken(self) -> dict[int, int]:
        """End the recording; return each layer's number, a term of the sum over all ranks."""
        for hook in self._hooks:
            hook.remove()
        return sum_by_layer((layer, number) for (layer, _), number in self._sums.items())


def sum_by_layer(numbers: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Add the numbers of each layer, from (layer, number)."""
    sums: Counter[int] = Counter()
    for layer, number in numbers:
        sums[layer] = (sums[layer] + number) % WORD
    return dict(sums)
