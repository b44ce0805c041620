"""Which experts each token was given to, as one number for each layer, whoever routed it and in whatever order."""

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
    """Watches the routers of some modules.

    Every (sample, place in the sequence, expert) is hashed to 53 bits, and the hashes are summed as whole numbers: any
    two tokens that change experts with each other change the sum, but for one chance in 2^53.

    Args:
        modules: a model, or parts of one.
        sequence_length: of the samples.
    """

    def __init__(self, modules: Iterable[nn.Module], shape: ModelShape, sequence_length: int):
        self._shape, self._length = shape, sequence_length
        self._sums: dict[tuple[int, tuple[int, ...]], int] = {}  # by layer and samples: recomputation comes once more
        self._hooks = [
            router.register_forward_hook(self._watch) for module in modules for router in find_modules(module, Router)
        ]

    def _watch(self, router: Router, args: tuple[Tensor, RoutingContext], output: tuple[Tensor, Tensor]) -> None:
        samples, chosen = args[1].samples, output[1]
        assert samples is not None, "training passes on which samples its sequences are"
        places = torch.arange(self._shape.taken(router.layer, self._length), device=chosen.device)
        tokens = router.places.own(samples.unsqueeze(1) * self._length + places)  # [b, s], in all the data
        pairs = tokens.unsqueeze(-1) * chosen.shape[-1] + torch.arange(chosen.shape[-1], device=chosen.device)
        hashes = (uniform(router.layer, pairs[chosen]) * 2.0**53).long()
        self._sums[router.layer, tuple(samples.tolist())] = int(hashes.sum())

    def taken(self) -> dict[int, int]:
        """The number of each layer that was passed, which those of other ranks add up to. Ends the watching."""
        for hook in self._hooks:
            hook.remove()
        return added((layer, number) for (layer, _), number in self._sums.items())


def added(numbers: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The sum of the numbers of each layer."""
    sums: Counter[int] = Counter()
    for layer, number in numbers:
        sums[layer] = (sums[layer] + number) % WORD
    return dict(sums)
