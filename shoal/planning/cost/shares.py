"""Layers and parameters of the ranks of many runs together, in closed form."""

from __future__ import annotations

import numpy as np

from shoal.planning.cost.batched_runs import Runs


def layer_weights(r: Runs) -> np.ndarray:
    """Return the matrix parameters of a layer that each token uses, over all tensor-parallel ranks."""
    return r.attention_weights + r.hidden * (r.latents + (2 + r.gated) * r.ffn * r.active)


def split_layers(r: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the layers of the first rank, of the second (the maximum), and of the last, which has the head.

    Stages have equal numbers of layers (one less at the ends if uneven), or equal costs.
    """
    even = np.mod(r.layers, r.pp) == 0
    each = np.ceil(r.layers / r.pp)
    target = np.round((r.layers + r.vocab * r.hidden / layer_weights(r)) / r.pp, 6)
    most = np.minimum(np.where(r.balanced > 0, _up_to(target, r), each), r.layers)
    rest = np.maximum(r.layers - _up_to(np.round((r.pp - 1) * target, 6), r), 0)
    last = np.where(r.balanced > 0, rest, np.where(even, each, each - 1))
    first = np.where((r.balanced > 0) | even | (r.pp == 2), most, np.maximum(each - 1, 1))
    first, most, last = (np.where(r.pp == 1, r.layers, layers) for layers in (first, most, last))
    return first, most, last


def _up_to(share: np.ndarray, r: Runs) -> np.ndarray:
    """Return the layers until their cost reaches a share of the total, or exceeds it with ``ties_first``."""
    return np.where(r.ties_first > 0, np.floor(share) + 1, np.ceil(share))


def weights_on_rank(r: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters on one rank of a layer, and of the extra part of an end stage."""
    layer = r.attention_weights + r.hidden * (2 + r.gated) * r.ffn * r.alone
    ends = np.where((r.pp > 1) | (r.tied > 0), 1.0, 2.0)
    return layer / r.tp + r.hidden * r.latents + experts_on_rank(r), ends * r.vocab * r.hidden / r.tp


def experts_on_rank(r: Runs) -> np.ndarray:
    """Return the parameters of a layer's experts on one rank; the mean over layers."""
    return r.routed * r.hidden * (2 + r.gated) * r.ffn * r.experts / (r.ep * r.etp)


def experts_shard(r: Runs) -> np.ndarray:
    """Return the ranks over which ZeRO shards an expert: of all its ranks, the ones with the same experts."""
    return np.maximum(r.shard * r.tp / (r.ep * r.etp), 1)


def shard_parameters(r: Runs, weights: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Return the parameters of a rank's shard of some layers and ends; experts have fewer replicas."""
    experts = layers * experts_on_rank(r)
    return (weights - experts) / np.maximum(r.shard, 1) + experts / experts_shard(r)
