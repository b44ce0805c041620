"""ZeRO-3 hooks: gather parameters before use and free them afterwards (Rajbhandari et al. 2020, section 7.2.2).

A unit (the embedding, a layer, or the final norm and head) is gathered in one operation, one or more units ahead of
forward and backward, so the collective overlaps with the computation of the previous unit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.engine.parallel.zero.bucket import Bucket
from shoal.engine.parallel.zero.zero_engine import ShardedParameters


class PrefetchHooks:
    """Hooks that hold a stage's full parameters only while they are needed.

    After backward, `ShardedParameters` frees a bucket as soon as all its gradients exist.

    Args:
        units: the modules of each unit and the parameters that they need, in forward order.
        keep: number of last units that stay gathered between forward and backward; None for all.

    Attributes:
        recomputing: whether forwards are now parts of a backward (`torch.utils.checkpoint` around or inside units).
    """

    recomputing = False

    def __init__(
        self,
        units: Iterable[tuple[list[nn.Module], Iterable[nn.Parameter]]],
        parameters: ShardedParameters,
        *,
        ahead: int,
        keep: int | None,
    ):
        every = [(modules, set(needed)) for modules, needed in units]
        self.buckets: list[list[Bucket]] = [
            [bucket for bucket in parameters.buckets if any(slot.parameter in needed for slot in bucket.slots)]
            for _, needed in every
        ]
        self.parameters, self.ahead = parameters, ahead
        used: set[Bucket] = set()
        self.owned_buckets: list[list[Bucket]] = []  # buckets of each unit that no earlier unit needs
        for buckets in self.buckets:
            self.owned_buckets.append([bucket for bucket in buckets if bucket not in used])
            used.update(buckets)
        self.kept = range(0 if keep is None else len(every) - keep, len(every))
        for i, (modules, _) in enumerate(every):
            modules[0].register_forward_pre_hook(lambda _, args, i=i: self._gather(self._from(i)))
            modules[-1].register_forward_hook(lambda _, args, output, i=i: self._after_forward(i, output))

    def _gather(self, units: range) -> None:
        """Wait for the first unit's parameters, and start gathering the units after it."""
        for unit in units:
            for bucket in self.buckets[unit]:
                bucket.gather()
        for bucket in self.buckets[units[0]]:
            bucket.wait()

    def _from(self, unit: int) -> range:
        """Return a unit and the units to prefetch with it in forward."""
        ahead = 0 if self.recomputing else self.ahead
        return range(unit, min(unit + ahead + 1, len(self.buckets)))

    def _before_backward(self, unit: int) -> None:
        # Backward has finished the next unit. Start its reductions before the next gather on every rank, even if they
        # are incomplete, because all ranks must start the group's collectives in the same order.
        if unit + 1 < len(self.buckets):
            self.parameters.complete(self.owned_buckets[unit + 1])
        self._gather(range(unit, max(-1, unit - self.ahead - 1), -1))

    def _after_forward(self, unit: int, output: object) -> None:
        outputs = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
        for each in outputs:
            each.register_hook(lambda _: self._before_backward(unit))
        if not (outputs and unit in self.kept) and not self.recomputing:
            following = [bucket for other in self._from(unit)[1:] for bucket in self.buckets[other]]
            for bucket in self.buckets[unit]:
                if bucket not in following:
                    bucket.free()
