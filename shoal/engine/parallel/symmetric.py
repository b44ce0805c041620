"""Products fused with collectives over symmetric memory, which torch calls asynchronous tensor parallelism.

Ranks of one host map each other's buffers. A part is then copied by the copy engines while another is multiplied,
without NCCL's kernels, which take multiprocessors from the product (torch.distributed._symmetric_memory). The parts
are stored and summed as around the ring (`shoal.engine.parallel.overlap`), but all partial sums of a part are added at
once. The entry's backward, which has several factors, stays on the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.json_collectives import all_gather
from shoal.engine.collectives.shm.region import host_identity
from shoal.engine.parallel.overlap import SEQUENCE, RingEntry, RingExit


def is_available(group: Group, device: torch.device) -> bool:
    """Return whether a group's ranks can map each other's memory: GPUs of one host on one NVSwitch. Collective."""
    if device.type != "cuda" or group.shared is not None:
        return False
    import torch.distributed._symmetric_memory  # registers the operators
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    mine = [host_identity(), _SymmetricMemory.has_multicast_support(DeviceType.CUDA, torch.cuda.current_device())]
    return all(mine) and all(one == mine for one in all_gather(mine, group.backend))


def gather_products(
    x: Tensor, factors: Sequence[Tensor], group: Group, tokenwise: bool
) -> tuple[Tensor, list[Tensor]]:
    """Do what `shoal.engine.parallel.overlap.gather_products` does: [b, s/n, k], [k, m_i] -> [b, s, k], [b, s, m_i]."""
    part = x.contiguous()
    group.count("send", part, group.size() - 1)
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(
        part.flatten(0, 1) if tokenwise else part, list(factors), 0 if tokenwise else SEQUENCE, _name(group)
    )
    shape = len(x), group.size() * x.shape[1], -1
    return gathered.contiguous().view(shape), [product.contiguous().view(shape) for product in products]


def scatter_product(x: Tensor, factor: Tensor, group: Group, tokenwise: bool) -> Tensor:
    """Return this rank's part of the sum over all ranks of x F: [b, s, k], [k, m] -> [b, s/n, m]."""
    x = x.contiguous()
    part = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x.flatten(0, 1) if tokenwise else x, factor, "sum", 0 if tokenwise else SEQUENCE, _name(group)
    )
    group.count("send", part, group.size() - 1)
    return part.contiguous().view(len(x), x.shape[1] // group.size(), -1)


def _name(group: Group) -> str:
    return cast(str, group.backend.group_name)


@dataclass(frozen=True)
class SymmetricEntry(RingEntry):
    """Entry of a region with sequence parallelism: all-gather, then multiply."""

    gather = staticmethod(gather_products)


@dataclass(frozen=True)
class SymmetricExit(RingExit):
    """Exit of a region with sequence parallelism: multiply, then reduce-scatter."""

    gather = staticmethod(gather_products)

    def forward(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        return x, [scatter_product(x, weights[0].t(), self.group, self.tokenwise)]
