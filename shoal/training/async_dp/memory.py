"""Memory of a relaxed method, per replica and shared by all replicas of a host."""

from __future__ import annotations

from shoal.planning.cost.memory.state import StateBytes
from shoal.spec.config import RunConfig
from shoal.spec.number_formats import Formats
from shoal.training.async_dp.methods.gossip import hops
from shoal.training.async_dp.methods.server import staleness_bound


def count_method_bytes(config: RunConfig, state: StateBytes, policy: Formats) -> tuple[int, int, int]:
    """Return a rank's bytes of weights, optimizer states, and what the method adds to the synchronous run.

    They include an equal share of what the replicas hold jointly, but no small items: counters, scales, block padding,
    PowerSGD's factors.

    Args:
        state: memory of one replica by itself.
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
    return weights, optimizer, method
