"""Step time of many runs together, in closed form: layers, stages, pipeline bubble, data parallelism, update.

`shoal.planning.estimate` simulates each action of one layout; this module uses closed forms. With t_i the time of a
micro-batch on stage i, 1F1B takes sum_i t_i + (m - 1) max_i t_i (Narayanan et al. 2021, section 2.2, for unequal
stages); interleaving divides the part outside the largest stage by the stages per rank.

The host launches kernels while its device computes. If it waits for each message between stages, as in Megatron-LM, the
longer of computing and launching counts in each pass, and once more in the bubble. Where it waits for each kernel, both
count. Otherwise it is ahead of its device by up to a full step, and also launches during the bubble.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.planning.cost.batched_runs import E, Runs
from shoal.planning.cost.memory.published_software import returns_blocks
from shoal.planning.cost.shares import experts_on_rank, experts_shard, shard_parameters, split_layers, weights_on_rank
from shoal.planning.cost.time.kernels import Kernels, soft_max
from shoal.spec.catalog.calibration import Calibration

LAST_BUCKET = 0.05  # share of the gradients that is reduced last, with nothing to hide it


class StepTimes(NamedTuple):
    """Seconds of a step by cause: arrays with one entry per run."""

    # all micro-batches on the slowest pipeline rank, messages between stages included; or their launches
    busy: np.ndarray
    bubble: np.ndarray  # that rank's waiting time, beyond launch time
    sharing: np.ndarray  # ZeRO-3's exposed collectives, reductions and gathers after the last backward
    update: np.ndarray  # optimizer
    allocator: np.ndarray  # blocks of memory that are returned to the device and asked for again
    fixed: np.ndarray  # constant time

    @property
    def seconds(self) -> np.ndarray:
        return self.busy + self.bubble + self.sharing + self.update + self.allocator + self.fixed


def step(runs: Runs, constants: Calibration) -> StepTimes:
    """Return the step times of all runs."""
    r, c, k = runs, constants.numbers, Kernels(runs, constants)
    (first_layers, most_layers, last_layers), waits = split_layers(r), (r.pp > 1) & (r.ahead == 0) | k.alternates
    device, launching, host = k.forward + k.backward, k.launches_of_both, c["micro_batch"]
    ends = k.head + k.further

    def passing(layers: np.ndarray, head: np.ndarray | float, host: np.ndarray | float) -> np.ndarray:
        """Return the time of a micro-batch through some layers: computing, or launching if longer and awaited."""
        computing, launched = layers * device + head, layers * launching + host
        return np.where(waits, k.longer(computing, launched), computing)

    most = np.where(r.pp > 1, passing(most_layers, 0.0, host), 0.0)
    hop, shown = _messages(k)
    last = passing(last_layers, ends, host)
    last = np.where(_paired(r), (passing(first_layers, 0.0, host) + last) / 2, last)
    slowest = np.maximum(most, last) + 2 * hop * shown * r.virtual
    through = passing(r.layers, ends, r.pp * host)  # through all stages
    bubble = np.maximum(through - slowest, 0.0) / r.virtual * r.warmup + 2 * (r.pp - 1) * hop
    # A host that does not wait launches while its device computes: the longer of the two full step times counts.
    launched = r.microbatches * (np.maximum(most_layers, last_layers) * launching + host)
    launched, computed = np.where(waits, 0.0, launched), r.microbatches * slowest
    busy = np.maximum(computed, launched)
    bubble = np.maximum(computed + bubble, launched) - busy
    layer, end = weights_on_rank(r)
    weights = most_layers * layer + end
    forward, backward = k.layer
    parts = _parts(r, weights, most_layers)
    sharding = _sharding(k, parts, most_layers * forward + ends / 3, most_layers * backward + ends * 2 / 3)
    slower = 1 + c["stragglers"] * np.log2(np.maximum(r.ranks / r.per_node, 1))
    added = c["accumulate"] * (E + 2 * r.gradient_bytes) * weights  # bytes: gradient read, its sum read and written
    apart = (r.fused_accumulation == 0) & ((r.zero < 3) | r.unsharded)
    accumulate = np.where(apart, added * r.microbatches / k.hbm, 0.0)
    update = shard_parameters(r, weights, most_layers) * c["update"] / k.hbm
    reduction = _reduction(k, parts, most_layers * k.forward, most_layers * k.backward)
    sharing = sharding * slower + reduction
    allocator = np.where(returns_blocks(k), c["return_blocks"] * r.microbatches, 0.0)
    return StepTimes((busy + accumulate) * slower, bubble * slower, sharing, update, allocator, k.constant("fixed"))


def explain_step(k: Kernels, times: StepTimes) -> dict[str, np.ndarray]:
    """Return the seconds of a step by cause, on the slowest pipeline rank; they add up to the step.

    What computing does not explain is the host's: launches, and what every step takes besides.
    """
    r = k.runs
    (first, most, last), m = split_layers(r), r.microbatches
    last, share = np.where(_paired(r), (first + last) / 2, last), np.where(_paired(r), 0.5, 1.0)
    device = k.forward + k.backward
    ends = last * device + share * (k.head + k.further) >= most * device
    layers, head = np.where(ends, last, most) * m, np.where(ends, share * m, 0.0)
    projections = head * (k.further - r.further * (k.head + device))
    layers, head = layers + head * r.further, head * (1 + r.further)  # a module has a layer and the head
    (hop, shown), product = _messages(k), 3 * k.output
    messages, travel = 2 * hop * (m * shown * r.virtual), 4 * k.routing - k.hidden_rows
    waits = sum(k.experts_waits)  # the host's
    found = {
        "matrix products": layers * 3 * k.products + head * product + projections,
        "attention": layers * sum(k.attention),
        "element by element": layers * 3 * k.elements + head * (k.head - product - k.exchange),
        "recomputation": layers * k.again,
        "tensor parallelism": layers * (device - 3 * k.products - sum(k.attention) - 3 * k.elements
                                        - travel - waits - sum(k.context) - k.again) + head * k.exchange,
        "context parallelism": layers * sum(k.context),
        "expert parallelism": layers * travel,
        "messages between stages": messages,
    }  # fmt: skip
    found |= {"gathers and reductions": times.sharing, "optimizer": times.update, "bubble": times.bubble}
    found |= {"allocator": times.allocator}
    found = {name: np.maximum(seconds, 0.0) for name, seconds in found.items()}  # differences may round below it
    return found | {"launches": np.maximum(times.seconds - sum(found.values()), 0.0)}


def _paired(r: Runs) -> np.ndarray:
    """Return where a pipeline rank has two stages, as far from the first as from the last."""
    return (r.paired > 0) & (r.pp > 1)


def _messages(k: Kernels) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of a message between stages, and the part of them that nothing hides."""
    r, c = k.runs, k.constants
    bandwidth = np.where(r.ranks > r.per_node, k.outside, r.inside * k.constant("inside"))
    hop = c["hop"] + E * k.tokens_between * r.hidden / bandwidth
    return np.where(r.pp > 1, hop, 0.0), np.where(r.overlap_pipeline > 0, 1 - c["hide_pipeline"], 1.0)


class _Part(NamedTuple):
    """Parameters with the same replicas: of layers without routed experts, or of routed experts."""

    elements: np.ndarray  # on one rank
    ranks: np.ndarray  # replicas
    shard: np.ndarray  # ranks among them that ZeRO shards over
    stride: np.ndarray  # distance between these


def _parts(r: Runs, weights: np.ndarray, layers: np.ndarray) -> list[_Part]:
    """Split a rank's parameters by their replicas; no second part if no run has a router."""
    experts, ranks, spread = layers * experts_on_rank(r), r.dp * r.cp, r.ep * r.etp
    found = [_Part(weights - experts, ranks, r.shard, r.tp)]
    if r.routed.any():
        found.append(_Part(experts, np.maximum(ranks * r.tp / spread, 1), experts_shard(r), spread))
    return found


def _reduction(k: Kernels, parts: list[_Part], forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the exposed gradient reduction after the backward, and the parameter gather of ZeRO-1 and 2.

    With ZeRO-3 only shards remain to be reduced, between the groups that each hold a full copy (hybrid sharding).
    """
    r = k.runs
    total, gather = np.zeros((2, r.size))
    for part in parts:
        some, size = part.elements > 0, part.elements * r.reduce_bytes
        group = k.group(part.ranks, part.stride)
        reduced = np.where(r.zero > 0, group.all_gather(size), group.all_reduce(size))
        groups = k.group(np.maximum(part.ranks / part.shard, 1), part.stride * part.shard)
        total += some * np.where(r.zero == 3, groups.all_reduce(size / part.shard), reduced)
        gather += some * k.group(part.shard, part.stride).all_gather(part.elements * E)
    hidden = np.where(r.overlap_data > 0, k.constants["hide_data"] * backward, 0.0)
    left = np.maximum(total - hidden, LAST_BUCKET * total)
    gather = np.where(
        r.overlap_gather > 0, np.maximum(gather - k.constants["hide_data"] * forward, LAST_BUCKET * gather), gather
    )
    copies = k.constants["launch_copy"] * r.sliced * r.layers / r.pp * r.shard * (r.shard > 1)
    return left + np.where((r.zero > 0) & (r.zero < 3), gather + copies, 0.0)


def _sharding(k: Kernels, parts: list[_Part], forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the exposed ZeRO-3 time of a step: two gathers and a reduction per micro-batch, which slow down what hides
    them.

    If parameters stay unsharded, the first micro-batch waits for the gathers of all stages in turn, and the first stage
    reduces after its last backward.
    """
    r = k.runs
    gather, reduce = np.zeros((2, r.size))
    for part in parts:
        group = k.group(part.shard, part.stride)
        messages = (part.elements > 0) * r.layers / r.pp * r.unit_messages
        gather += group.all_gather(part.elements * E, messages)
        reduce += group.all_gather(part.elements * r.reduce_bytes, messages)
    before = soft_max(forward, gather, 6.0) - forward
    late = before + soft_max(backward, gather + reduce, 6.0) - backward
    hidden = np.minimum(gather, forward) + np.minimum(gather + reduce, backward)
    slowed = np.where(r.axes > 1, 0.0, k.constants["contention"])  # a TPU's transfers take none of its compute units
    once, each = r.pp * before + reduce, r.microbatches * (late + slowed * hidden)
    return np.where((r.zero == 3) & (r.shard > 1), np.where(r.unsharded, once, each), 0.0)
