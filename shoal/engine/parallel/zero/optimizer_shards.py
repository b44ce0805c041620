"""Build the optimizer's `Shards` from a rank's sharded parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.json_collectives import all_gather
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_gather_flat, all_reduce, reduce_scatter_flat
from shoal.engine.optim.build import rate_factor, weight_decay
from shoal.engine.optim.shards import Alone, Holders, Shard, ShardPart, Shards
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.spec.config import OptimizerConfig


class ShardGroup:
    """`Holders` along a mesh axis; the group is created on first use, because element-wise rules need none."""

    def __init__(self, mesh: Mesh, axis: str):
        self.mesh, self.axis, self.ranks, self.index = mesh, axis, mesh.size(axis), mesh.index(axis)

    @property
    def group(self) -> Group:
        """Return the group of ranks that hold shards of the same parameters."""
        return self.mesh.group_of_several(self.axis)

    def sum(self, x: Tensor) -> None:
        """See `Holders`."""
        all_reduce(x, self.group)

    def maximum(self, x: Tensor) -> None:
        """See `Holders`."""
        all_reduce(x, self.group, dist.ReduceOp.MAX)

    def collect(self, x: Any) -> list[Any]:
        """See `Holders`."""
        if self.group.is_dry_run:
            return [x if i == self.index else type(x)() for i in range(self.ranks)]
        return all_gather(x, self.group.backend)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """See `Holders`."""
        reduce_scatter_flat(part, whole, self.group).wait()

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """See `Holders`."""
        all_gather_flat(whole, part, self.group).wait()


def build_optimizer_shards(
    parameters: RankParameters, mesh: Mesh, config: OptimizerConfig, dtype: torch.dtype, *, mixed: bool = False
) -> Shards:
    """Return the shards of all stages of a rank, split where the learning rate factor changes.

    Args:
        mixed: whether the model has experts. Their sharding differs from that of other parameters, so all ranks of the
            stage, including replicas, are holders.
        dtype: dtype of the weights that the optimizer updates.
    """
    axis = "stage" if mixed else "holders"
    holders: Holders = ShardGroup(mesh, axis) if mesh.size(axis) > 1 else Alone()
    replica = mesh.index("replicate") == 0
    slots = [slot for bucket in parameters.buckets for slot in bucket.slots]
    here = Counter(slot.split.name for slot in slots)  # 2 if the first and the last stage share an embedding
    first = replica and holders.index == 0
    saves = {slot.split.name for slot in slots if first and (slot.split.primary or slot.split.replicas == "edp")}
    shards = []
    for stage in parameters.stages:
        runs = stage.runs()
        for bucket in stage.buckets:
            among = stage.replicas[bucket.replicas]
            copies = among.copies if mixed else 1
            for run in bucket.runs:
                _, weights, gradient = next(runs)
                parts = tuple(
                    ShardPart(
                        slot.split.name, slot.split.whole, box, start,
                        copies * slot.split.copies // slot.split.stages * here[slot.split.name],
                        slot.split.primary and among.copy == 0,
                    )
                    for slot, start, box in bucket.boxes(run.start, run.stop)
                )
                whole = Shard(weights, gradient, parts)
                shards += [
                    replace(shard, rate=rate, decay=decay)
                    for (rate, decay), shard in whole.cut(
                        lambda part: (rate_factor(config, part.name), weight_decay(config, part.whole))
                    )
                ]
    shapes = {slot.split.name: slot.split.whole for slot in slots}
    device = torch.device("cpu") if mesh.layout.offload != "none" else mesh.device
    return Shards(shapes, shards, dtype, device, holders, frozenset(saves))
