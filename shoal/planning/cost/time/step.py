"""A step's time of many runs at once: layers, stages, the pipeline's bubble, data parallelism, the update.

What `shoal.planning.estimate` plays action by action for one layout is here in closed form: with t_i the time of a
micro-batch on stage i, 1F1B takes sum_i t_i + (m - 1) max_i t_i (Narayanan et al. 2021, section 2.2, for stages that
are not alike); interleaving divides what is not the largest stage's by the stages of a rank.

The host launches kernels while its device computes. Where it waits for each message between stages, as Megatron-LM's
does, the longer of computing and launching counts in each pass, and in the bubble once more; elsewhere it is ahead of
its device by up to a whole step, and launches in the bubble, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.planning.cost.batched_runs import Runs
from shoal.planning.cost.time.kernels import E, Kernels, soft_max
from shoal.spec.catalog.calibration import Calibration

LAST_BUCKET = 0.05  # of the gradients: what is reduced when nothing is left to hide it behind


@dataclass(frozen=True)
class RankLayers:
    """Layers of the pipeline ranks that matter.

    Attributes:
        first, most, last: of the first rank, of the second (with the most), and of the last, which has the head.
    """

    first: np.ndarray
    most: np.ndarray
    last: np.ndarray


def layer_weights(r: Runs) -> np.ndarray:
    """Parameters of a layer's matrices that each token meets, on all tensor-parallel ranks."""
    q, kv = r.heads * r.head_dim, r.kv_heads * r.head_dim
    return r.hidden * (2 * q + 2 * kv + (2 + r.gated) * r.ffn * r.active)


def stages_of(r: Runs) -> RankLayers:
    """Equal numbers of layers (the ends have one less where these do not come out even), or equal costs."""
    even = np.mod(r.layers, r.pp) == 0
    each = np.ceil(r.layers / r.pp)
    target = np.round((r.layers + r.vocab * r.hidden / layer_weights(r)) / r.pp, 6)
    most = np.minimum(np.where(r.balanced > 0, _up_to(target, r), each), r.layers)
    rest = np.maximum(r.layers - _up_to(np.round((r.pp - 1) * target, 6), r), 0)
    last = np.where(r.balanced > 0, rest, np.where(even, each, each - 1))
    first = np.where((r.balanced > 0) | even, most, np.maximum(each - 1, 1))
    return RankLayers(*(np.where(r.pp == 1, r.layers, layers) for layers in (first, most, last)))


def _up_to(share: np.ndarray, r: Runs) -> np.ndarray:
    """Layers until their cost reaches a share of all, or exceeds it where ties go to the first."""
    return np.where(r.ties_first > 0, np.floor(share) + 1, np.ceil(share))


def weights_on_rank(r: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Parameters on one rank of a layer, and of what a stage at an end of the model has besides its layers."""
    q, kv = r.heads * r.head_dim, r.kv_heads * r.head_dim
    layer = r.hidden * (2 * q + 2 * kv + (2 + r.gated) * r.ffn * r.experts / r.ep)
    ends = np.where((r.pp > 1) | (r.tied > 0), 1.0, 2.0)
    return layer / r.tp, ends * r.vocab * r.hidden / r.tp


def weights_of_stage(r: Runs, layers: np.ndarray) -> np.ndarray:
    """The same of a stage with some layers and one of the two ends, or both."""
    layer, end = weights_on_rank(r)
    return layers * layer + end


def share_of(r: Runs, weights: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Parameters of a rank's shard, of all that it has of some layers and ends: of experts, which fewer ranks have
    alike, more."""
    experts = layers * r.hidden * (2 + r.gated) * r.ffn * r.experts / r.ep / r.tp
    experts = np.where(r.experts > 1, experts, 0.0)
    return (weights - experts) / np.maximum(r.shard, 1) + experts / np.maximum(r.shard / r.ep, 1)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, by what takes them: arrays with one entry for each run.

    Attributes:
        busy: of all micro-batches on the slowest pipeline rank, messages between stages included; or of launching them.
        bubble: that rank's waiting, beyond what launching takes anyway.
        sharding: gathers and reductions of ZeRO-3 that computation does not hide.
        reduction: of gradients, and gathers of parameters, after the last backward.
        update: the optimizer's.
        fixed: what every step takes besides.
    """

    busy: np.ndarray
    bubble: np.ndarray
    sharding: np.ndarray
    reduction: np.ndarray
    update: np.ndarray
    fixed: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """All of it."""
        return sum(vars(self).values())


def step(runs: Runs, constants: Calibration) -> StepTimes:
    """Price every run."""
    r, c, k = runs, constants.numbers, Kernels(runs, constants)
    stages, waits = stages_of(r), (r.pp > 1) & (r.ahead == 0)
    device, launching, host = k.forward + k.backward, k.launches_of_both, c["micro_batch"]

    def passing(layers: np.ndarray, head: np.ndarray | float, host: np.ndarray | float) -> np.ndarray:
        """A micro-batch through some layers: the longer of computing and launching, if the host waits after it."""
        computing = layers * device + head
        return np.where(waits, soft_max(computing, layers * launching + host, c["sharp"]), computing)

    most = np.where(r.pp > 1, passing(stages.most, 0.0, host), 0.0)
    hop = np.where(r.pp > 1, _hop(k), 0.0)
    shown = np.where(r.overlap_pipeline > 0, 1 - c["hide_pipeline"], 1.0)
    slowest = np.maximum(most, passing(stages.last, k.head, host)) + 2 * hop * shown * r.virtual
    through = passing(r.layers, k.head, r.pp * host)  # of all stages
    bubble = np.maximum(through - slowest, 0.0) / r.virtual * r.warmup + 2 * (r.pp - 1) * hop
    # A host that does not wait goes on launching while its device does: the longer of the two whole steps counts.
    launched = r.microbatches * (np.maximum(stages.most, stages.last) * launching + host)
    launched, computed = np.where(waits, 0.0, launched), r.microbatches * slowest
    busy = np.maximum(computed, launched)
    bubble = np.maximum(computed + bubble, launched) - busy
    weights = weights_of_stage(r, stages.most)
    forward, backward = k.layer
    sharding = _sharding(k, weights, stages.most * forward + k.head / 3, stages.most * backward + k.head * 2 / 3)
    slower = 1 + c["stragglers"] * np.log2(np.maximum(r.ranks / r.per_node, 1))
    added = c["accumulate"] * (E + 2 * r.gradient_bytes) * weights  # bytes: read, and its sum read and written
    accumulate = np.where(r.zero < 3, added * r.microbatches / k.hbm, 0.0)
    update = share_of(r, weights, stages.most) * c["update"] / k.hbm
    return StepTimes(
        busy=(busy + accumulate) * slower,
        bubble=bubble * slower,
        sharding=r.microbatches * sharding * slower,
        reduction=_reduction(k, weights, stages.most * k.backward),
        update=update,
        fixed=k.of("fixed", "software"),
    )


def _hop(k: Kernels) -> np.ndarray:
    """A message from one stage to the next."""
    r = k.runs
    far = r.ranks > r.per_node
    bandwidth = np.where(far, r.nic * k.of("outside", "network"), r.inside * k.of("inside", "generation"))
    return k.constants["hop"] + E * k.tokens_between * r.hidden / bandwidth


def _reduction(k: Kernels, weights: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """What is left of reducing gradients once backward is over, and ZeRO-1's and 2's gather of the parameters.

    With ZeRO-3 only shards are left to be reduced, between the groups that each hold all of them (hybrid sharding).
    """
    r = k.runs
    size, ranks = weights * r.reduce_bytes, r.dp * r.cp
    group = k.group(ranks, r.tp)
    whole = np.where(r.zero > 0, group.gather(size), group.reduce(size))
    between = k.group(np.maximum(ranks / r.shard, 1), r.tp * r.shard).reduce(size / r.shard)
    whole = np.where(r.zero == 3, between, whole)
    hidden = np.where(r.overlap_data > 0, k.constants["hide_data"] * backward, 0.0)
    left = np.maximum(whole - hidden, LAST_BUCKET * whole)
    gather = k.group(r.shard, r.tp).gather(weights * E)
    return left + np.where((r.zero > 0) & (r.zero < 3), gather, 0.0)


def _sharding(k: Kernels, weights: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """ZeRO-3, for each micro-batch: two gathers and a reduction behind computation, whose memory they slow down."""
    r, c = k.runs, k.constants
    group = k.group(r.shard, r.tp)
    messages = r.layers / r.pp * r.unit_messages
    gather = group.gather(weights * E, messages)
    reduce = group.gather(weights * r.reduce_bytes, messages)
    late = soft_max(forward, gather, 6.0) - forward + soft_max(backward, gather + reduce, 6.0) - backward
    return np.where((r.zero == 3) & (r.shard > 1), late + c["contention"] * (2 * gather + reduce), 0.0)
