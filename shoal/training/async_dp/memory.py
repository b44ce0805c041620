"""Bytes that a method of the relaxed family keeps: what each replica has for itself, and what all of a host share."""

from __future__ import annotations

from typing import NamedTuple

from shoal.planning.cost.memory.state import StateBytes
from shoal.spec.config import RunConfig
from shoal.spec.number_formats import Formats
from shoal.spec.sync_methods import LOCAL, SERVED
from shoal.training.async_dp.methods.average import LocalSteps
from shoal.training.async_dp.methods.compress import Compressed
from shoal.training.async_dp.methods.gossip import Push
from shoal.training.async_dp.methods.quantised import Quantised
from shoal.training.async_dp.methods.server import Server
from shoal.training.async_dp.methods.wagma import GroupAverage


class Room(NamedTuple):
    """Bytes of one rank, its equal part of what the replicas share included.

    Attributes:
        weights, optimizer: as of `StateBytes`.
        method: all that it would not have in the synchronous run.
    """

    weights: int
    optimizer: int
    method: int


def room(config: RunConfig, state: StateBytes, policy: Formats) -> Room:
    """What a rank keeps, but for a few numbers: counters, scales, what fills up blocks, PowerSGD's factors.

    Args:
        state: of a replica for itself.
        policy: the formats of the run.
    """
    sync, relaxed, n = config.parallel.sync, config.relaxed, config.parallel.dp
    item, compute = policy.storage.itemsize, policy.compute.itemsize
    elements = state.parameters // (item if item == compute else item + compute)
    here = (elements, item, n)
    weights, optimizer, method = state.parameters, state.optimizer, 0
    if sync in ("powersgd", "topk"):
        method = Compressed.bytes(*here)
    elif sync in ("onebit", "int8"):
        method = Quantised.bytes(*here)
    elif sync in LOCAL:
        outer = sync == "diloco" and relaxed.outer_momentum > 0
        method = LocalSteps.bytes(*here, momentum=outer, int8=relaxed.outer_int8)
    elif sync in SERVED:
        bulk = sync == "ps-bsp" or (sync == "ps-ssp" and relaxed.staleness == 0)
        optimizer //= n  # the server's
        method = Server.bytes(*here, sums=policy.reduce.itemsize if bulk else 0)
    elif sync == "hogwild":
        weights -= elements * item * (n - 1) // n
    elif sync == "sgp":
        method = Push.bytes(*here)
    elif sync == "wagma":
        method = GroupAverage.bytes(*here)
    return Room(weights, optimizer, method)
