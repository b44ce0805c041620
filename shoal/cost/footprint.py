"""The memory of many runs at once, in closed form, as training software of some kind keeps it.

Of shoal's own engine `shoal.cost.state` and `shoal.cost.activations` say it to the byte; this is for what others
publish, and for searches: states by ZeRO's accounting, activations by Korthikanti et al. 2022 with the terms of the
software.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.catalog.calibration import Calibration
from shoal.cost.kernels import E, Kernels
from shoal.cost.outside import GB, outside
from shoal.cost.runs import Runs
from shoal.cost.step import share_of, stages_of, weights_on_rank

OPTIMIZER = 12.0  # bytes of each parameter: weights in fp32 and Adam's two moments


@dataclass(frozen=True)
class Footprint:
    """Bytes on a rank at the worst time of a step; arrays with one entry for each run.

    Attributes:
        allocated: by tensors, on the fullest pipeline rank.
        reserved: by torch's allocator, with what it leaves unused.
        first_reserved: the same of the first pipeline rank.
        process: reserved, with the context and libraries: what `nvidia-smi` shows.
        capacity: of the accelerator, as far as a process can have it.
    """

    allocated: np.ndarray
    reserved: np.ndarray
    first_reserved: np.ndarray
    process: np.ndarray
    capacity: np.ndarray

    @property
    def fits(self) -> np.ndarray:
        """Whether it runs."""
        return self.process <= self.capacity


def footprint(runs: Runs, constants: Calibration) -> Footprint:
    """The memory of every run."""
    r, c = runs, constants
    k, stages, alone = Kernels(r, c), stages_of(r), r.pp == 1
    kept, again = _layer(k)
    chunks = 1 + np.where(r.virtual > 1, (r.pp - 1) / (r.pp * r.virtual), 0.0)
    alive = np.where(alone, 1.0, np.minimum(r.microbatches, r.pp) * chunks * r.alive)
    after = np.where(alone, 1.0, np.minimum(r.microbatches, np.maximum(r.pp - 1, 1)) * chunks * r.alive)
    waiting = np.where(alone, 1.0, np.minimum(r.microbatches, np.where(r.alive > 1, r.pp, 1.0)))
    logits = r.tokens * r.vocab / np.where(r.logits_whole > 0, 1, r.tp) * k.of("logit_bytes", "software")
    loss = np.where(alone, logits, 0.0)
    held = again + k.constants["gather_buffers"] * _gathered(k)
    first = _rank(k, stages.first, 1, _in_flight(k, alive, stages.first, kept) + held + loss)
    second = np.where(r.pp > 2, _in_flight(k, after, stages.most, kept) + held, 0.0)
    second = _rank(k, stages.most, r.pp == 2, second)
    last = _rank(k, stages.last, 1, _in_flight(k, waiting, stages.last, kept) + held + logits)
    allocated, reserved = (np.maximum(np.maximum(*ends), more) for *ends, more in zip(first, last, second, strict=True))
    return Footprint(allocated, reserved, first[1], reserved + outside(r.memory, c), r.memory * c["usable"])


def _gathered(k: Kernels) -> np.ndarray:
    """Bytes of one whole tensor of [b, s, h] where sequence parallelism splits those between its collectives."""
    r = k.runs
    return np.where((r.tp > 1) & (r.sequence_parallel > 0), E * r.tokens * r.hidden, 0.0)


def _in_flight(k: Kernels, alive: np.ndarray, layers: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Bytes that micro-batches hold in the layers of a stage: what is kept, and what collectives are still to read.

    Tensors that go to another stream are no one's until the device has come to them (`torch.Tensor.record_stream`), and
    the host goes on allocating meanwhile. It is ahead of the device by all that a stage launches before it first waits
    for another, which is all but two of the micro-batches in flight, and by what the device takes longer for than the
    host.
    """
    ahead = np.maximum(1 - k.launches / k.forward, 0.0)
    unread = np.maximum(alive - 2, 0.0) + np.minimum(alive, 2.0) * ahead
    return layers * (alive * kept + unread * k.runs.reduced_apart * _gathered(k))


def _layer(k: Kernels) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that one micro-batch keeps of a layer, and those that come back while its backward computes them again."""
    r, (q, kv) = k.runs, k.widths
    between, inputs = k.tokens_between, np.where(r.gathers_kept > 0, r.tokens, k.tokens_between)
    norms = k.of("kept_hidden", "software") + k.constants["kept_norm"] * (1 - r.fused_norm)
    hidden = r.hidden * (norms * between * E + 2 * r.dropout * between + 2 * inputs * E)
    heads = r.tokens * (E * (2 * q + 2 * kv) + 4 * r.heads / r.tp)
    scores = r.b / r.cp * r.heads / r.tp * r.s**2
    each = 2 + 3 * r.dropout + k.constants["kept_scores"] * (r.attention == 0)
    softmax = np.where(k.scores_in_memory, scores * each, 0.0)
    inside = np.where(r.gated > 0, r.kept_ffn, 2.0)
    whole = hidden + heads + softmax + E * inside * r.tokens * r.ffn * r.active / r.tp
    mode = r.code("recompute")
    start = E * between * r.hidden
    # Of queries, keys, values, output, gate, up, down every second one from the first; and what attention's core made.
    products = E * (r.tokens * (2 * q + kv + r.ffn * r.active / r.tp) + r.gated * between * r.hidden)
    kept = np.choose(mode, [whole, whole - softmax, start, start + products + 4 * r.tokens * r.heads / r.tp])
    return kept, np.where(mode >= 2, whole, 0.0)


def _rank(k: Kernels, layers: np.ndarray, ends: np.ndarray | int, working: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes allocated and reserved on a rank of a stage."""
    r, c = k.runs, k.constants
    layer, end = weights_on_rank(r)
    ends = ends * end
    weights = layers * layer + ends
    share, sharded = share_of(r, weights, layers), r.zero > 0
    whole = E + r.gradient_bytes + r.bucket_copies * (r.dp > 1)
    cut = OPTIMIZER + r.shard_copies * sharded
    states = np.where(r.zero == 3, share * (cut + 4), weights * whole + share * cut)
    gathered = np.where(r.zero == 3, E * (k.of("gathered_layers", "software") * layer + ends / 2), 0.0)
    work = np.maximum(working, share * c["update_bytes"])
    allocated = states + gathered + work
    base = c["base"] * GB
    return allocated, states + gathered + work * (1 + k.of("fragmentation", "software")) + base
