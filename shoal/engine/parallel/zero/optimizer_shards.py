"""Build the optimizer's `Shards` from a rank's sharded parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.optim.build import rate_factor, weight_decay
from shoal.engine.optim.shards import Holders, Shard, ShardPart, Shards
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.spec.config import OptimizerConfig


def build_optimizer_shards(
    parameters: RankParameters, mesh: Mesh, config: OptimizerConfig, dtype: torch.dtype, *, mixed: bool = False
) -> Shards:
    """Return the shards of all stages of a rank, split where the learning rate factor changes.

    Args:
        mixed: whether the model has experts. Their sharding differs from that of other parameters, so all ranks of the
            stage, including replicas, are holders.
    """
    axis = "stage" if mixed else "holders"
    holders = Holders(mesh.size(axis), mesh.index(axis), lambda: mesh.group(axis))
    replica = mesh.index("replicate") == 0
    placements = [slot.placement for bucket in parameters.buckets for slot in bucket.slots]
    held = Counter(placement.name for placement in placements)  # 2 if the first and last stages share an embedding
    first = replica and holders.index == 0
    saves = {each.name for each in placements if first and (each.primary or each.replicas == "edp")}
    shards = []
    for bucket, gradients in zip(parameters.buckets, parameters.gradients, strict=True):
        replicas = bucket.groups
        for segment in bucket.segments:
            parts = tuple(
                ShardPart(
                    placement.name, placement.global_shape, box, start,
                    (replicas.copies if mixed else 1) * placement.copies // placement.stages * held[placement.name],
                    placement.primary and replicas.copy == 0,
                )
                for slot, start, box in bucket.boxes(segment.start, segment.stop) for placement in [slot.placement]
            )
            shard = Shard(bucket.master[segment.slice], gradients.update[segment.slice], parts)
            shards += [
                replace(cut, rate=rate, decay=decay)
                for (rate, decay), cut in shard.cut(
                    lambda part: (rate_factor(config, part.name), weight_decay(config, part.name, part.global_shape))
                )
            ]
    shapes = {placement.name: placement.global_shape for placement in placements}
    device = torch.device("cpu") if mesh.layout.offload != "none" else mesh.device
    return Shards(shapes, shards, dtype, device, holders, frozenset(saves))
