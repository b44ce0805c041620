"""Memory of a relaxed method, per replica and shared by all replicas of a host."""

from __future__ import annotations

from typing import NamedTuple

from shoal.planning.cost.memory.state import StateBytes
from shoal.spec.config import RunConfig
from shoal.spec.number_formats import Formats
from shoal.training.async_dp.methods.gossip import hops
from shoal.training.async_dp.methods.server import staleness_bound


class MethodBytes(NamedTuple):
    """Bytes of one rank, including an equal share of what the replicas hold jointly.

    Attributes:
        weights, optimizer: see `StateBytes`.
        method: memory in addition to the synchronous run's.
    """

    weights: int
    optimizer: int
    method: int


def count_method_bytes(config: RunConfig, state: StateBytes, policy: Formats) -> MethodBytes:
    """Return the memory of one rank, without small items: counters, scales, block padding, PowerSGD's factors.

    Args:
        state: memory of one replica by itself.
        policy: number formats of the run.
    """
    relaxed, n = config.relaxed, config.parallel.dp
    item, compute = policy.storage.itemsize, policy.compute.itemsize
    elements = state.parameters // (item if item == compute else item + compute)
    copy = elements * item
    coded = elements + copy // n  # of `CodedSum`: mask of used elements, and server error
    weights, optimizer, method = state.parameters, state.optimizer, 0
    match config.parallel.sync:
        case "powersgd" | "topk":
            method = copy
        case "onebit" | "int8":
            method = copy + coded
        case "local-sgd" | "diloco" as sync:
            momentum = sync == "diloco" and relaxed.outer_momentum > 0
            method = (1 + momentum + relaxed.outer_int8) * copy + relaxed.outer_int8 * coded
        case "ps-bsp" | "ps-ssp" | "ps-async":
            bulk = staleness_bound(config) == 0
            optimizer //= n  # held by the server
            method = elements * (item + bulk * policy.reduce.itemsize) // n
        case "hogwild":
            weights -= copy * (n - 1) // n
        case "sgp":
            method = (1 + hops(n)) * copy
        case "wagma":
            method = 2 * copy
    return MethodBytes(weights, optimizer, method)
