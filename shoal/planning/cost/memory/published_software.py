"""Memory of many runs together, in closed form, for published training software.

`shoal.planning.cost.memory.state` and `shoal.planning.cost.memory.activations` have the exact bytes of shoal's own
engine. This module covers published results of other software, and searches: states by ZeRO's accounting, activations
by Korthikanti et al. 2022 with software-specific terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.planning.cost.batched_runs import E, Runs
from shoal.planning.cost.memory.stage import GB
from shoal.planning.cost.shares import shard_parameters, split_layers, weights_on_rank
from shoal.planning.cost.time.kernels import Kernels
from shoal.spec.catalog.calibration import Calibration

FULL = 0.95  # part of the memory above which an allocator finds no free block
FITS = 1.1  # the same above which a run does not fit: 90 % of estimates of memory are within 10 %


@dataclass(frozen=True)
class Footprint:
    """Peak bytes on a rank during a step; arrays with one entry per run."""

    allocated: np.ndarray  # allocated by tensors, on the fullest pipeline rank
    reserved: np.ndarray  # reserved by torch's allocator, including unused blocks, on the fullest pipeline rank
    first_reserved: np.ndarray  # reserved on the first pipeline rank
    process: np.ndarray  # reserved plus context and libraries, late in a run: the value in `nvidia-smi`
    # all that must be there at once: tensors, holes that cannot be filled, context and libraries. A run whose `needed`
    # exceeds `capacity` runs out of memory. Unused blocks and tensors that are only read count elsewhere
    needed: np.ndarray
    capacity: np.ndarray  # accelerator memory available to a process
    # the first pipeline rank, the second (the largest in the middle), and the last
    ranks: tuple[RankBytes, RankBytes, RankBytes]
    beside: np.ndarray  # bytes outside torch's allocator

    @property
    def fits(self) -> np.ndarray:
        return self.needed <= self.capacity

    def counted(self, kinds: np.ndarray) -> np.ndarray:
        """Return the bytes as publications count them: allocated, first (reserved there), process, else reserved."""
        found = {"allocated": self.allocated, "first": self.first_reserved, "process": self.process}
        return np.select([kinds == kind for kind in found], [*found.values()], self.reserved)


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one pipeline rank by use; arrays with one entry per run."""

    # parameters, gradients, optimizer: states
    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    activations: np.ndarray  # kept for the backward
    gathered: np.ndarray  # unsharded parameters and gradients of ZeRO-3
    working: np.ndarray  # transient in a pass
    updating: np.ndarray  # transient in an update
    holes: np.ndarray  # unused between blocks
    split_holes: np.ndarray  # the same where tensor parallelism splits tensors, when little memory is left
    unread: np.ndarray  # freed, but still read by pending collectives
    base: np.ndarray  # workspaces

    @property
    def states(self) -> np.ndarray:
        return self.parameters + self.gradients + self.optimizer + self.gathered

    @property
    def allocated(self) -> np.ndarray:
        return self.states + np.maximum(self.activations + self.working, self.updating)

    @property
    def filled(self) -> np.ndarray:
        return self.states + self.activations + self.working + self.updating + self.holes + self.base

    @property
    def needed(self) -> np.ndarray:
        return self.filled + self.split_holes

    def reserved(self, available: np.ndarray, holes: np.ndarray | float = 0.0) -> np.ndarray:
        """Return the bytes that torch's allocator reserves, of those available to it, some more in holes."""
        return np.minimum(self.filled + self.unread + holes, np.maximum(self.filled, available))


def footprint(runs: Runs, constants: Calibration) -> Footprint:
    """Return the memory of every run."""
    ranks, (capacity, beside) = _ranks(Kernels(runs, constants)), _limits(runs, constants)
    allocated, needed = (np.maximum.reduce([getattr(rank, name) for rank in ranks]) for name in ("allocated", "needed"))
    reserves = [rank.reserved(capacity - beside) for rank in ranks]
    process = np.maximum.reduce([rank.reserved(capacity - beside, rank.split_holes) for rank in ranks]) + beside
    return Footprint(
        allocated, np.maximum.reduce(reserves), reserves[0], process, needed + beside, capacity, ranks, beside
    )


def returns_blocks(k: Kernels) -> np.ndarray:
    """Return where torch's allocator returns blocks to the device in each micro-batch, to ask for others.

    It does so where a request finds all memory reserved and no free block that is large enough: it waits for the
    device, returns all unused blocks and asks for one. Nanotron's runs did above `FULL`: pipelines, and others if
    collectives still read some tensors (`RankBytes.unread`). Runs that are far from fitting have no such time.
    """
    reads = (k.runs.reduced_apart > 0) & (k.runs.is_gpu > 0)
    if not reads.any():
        return reads
    ranks, (capacity, beside) = _ranks(k), _limits(k.runs, k.calibration)
    unread, needed = (np.maximum.reduce([getattr(rank, name) for rank in ranks]) for name in ("unread", "needed"))
    full = np.maximum.reduce([rank.filled + rank.unread for rank in ranks]) > FULL * (capacity - beside)
    return reads & full & ((k.runs.pp > 1) | (unread > 0)) & (needed <= FITS * (capacity - beside))


def _limits(r: Runs, constants: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of an accelerator, and how many of them no allocator has; none on a TPU."""
    c, gpu = constants.numbers, r.is_gpu > 0
    return r.memory * np.where(gpu, c["usable"], 1.0), np.where(gpu, c["context"] * GB, 0.0)


def _ranks(k: Kernels) -> tuple[RankBytes, RankBytes, RankBytes]:
    """Return the bytes on the first pipeline rank, the second and the last."""
    r, (first_layers, most_layers, last_layers), alone = k.runs, split_layers(k.runs), k.runs.pp == 1
    kept, again = _layer(k)
    chunks = 1 + np.where(r.virtual > 1, (r.pp - 1) / (r.pp * r.virtual), 0.0)
    alive = np.where(alone, 1.0, np.minimum(r.microbatches, r.pp * chunks * r.alive))
    after = np.where(r.pp > 2, np.minimum(r.microbatches, np.maximum(r.pp - 1, 1) * chunks * r.alive), 0.0)
    waiting = np.where(alone, 1.0, np.minimum(r.microbatches, np.where(r.alive > 1, r.pp, 1.0)))
    unsplit = r.unsplit_logits > 0  # the gathered copy in fp32, and its gradient
    each = np.where(r.fused_loss > 0, E, k.constant("logit_bytes"))
    logits = r.tokens * r.vocab * np.where(unsplit, each + 8, each / r.tp)
    held = again + k.constants["gather_buffers"] * _gathered(k)
    first = _rank(k, first_layers, 1, alive, kept, held + np.where(alone, logits, 0.0))
    second = _rank(k, most_layers, r.pp == 2, after, kept, np.where(r.pp > 2, held, 0.0))
    return first, second, _rank(k, last_layers, 1, waiting, kept, held + logits)


def _gathered(k: Kernels) -> np.ndarray:
    """Return the bytes of one full [b, s, h] tensor, if sequence parallelism splits it between collectives."""
    r = k.runs
    return np.where((r.tp > 1) & (r.sequence_parallel > 0), E * r.tokens * r.hidden, 0.0)


def _unread(k: Kernels, layers: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Return the bytes of freed tensors in a stage's layers that pending collectives still read.

    Tensors used by another stream can be reused only when the device has finished with them
    (`torch.Tensor.record_stream`), while the host keeps allocating. The host is ahead of the device by everything that
    a stage launches before its first wait for another stage, which is all but two of the micro-batches in flight, and
    by the excess of device time over host time: after a full micro-batch, four times that of a forward. The launch
    queue limits the lead.
    """
    r = k.runs
    lead = np.maximum(1 - k.host / k.forward, 0.0) * np.where(r.microbatches > r.pp, 4.0, 1.0)
    ahead = np.maximum(alive - 2, 0.0) + np.minimum(alive, 2.0) * np.minimum(lead, 1.0)
    return np.minimum(layers * ahead, k.constants["queue"]) * r.reduced_apart * _gathered(k)


def _layer(k: Kernels) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that one micro-batch saves per layer, and the bytes recomputed during its backward."""
    r, (q, kv) = k.runs, k.widths
    between = k.tokens_between
    norms = k.constant("kept_hidden") + k.constants["kept_norm"] * (1 - r.fused_norm)
    normed = 1 - r.recomputes_norms  # whether outputs of norms are stored
    narrow = r.keeps_quantised * r.quantised  # attention stores its result in 16 bits, the next product in 8
    each = np.where(narrow > 0, 1.0, r.kept_bytes)  # bytes of an input of a product
    hidden = r.hidden * (norms * between * E + 2 * r.dropout * between + normed * 2 * between * each)
    out, made = r.heads * r.values / r.tp, E * r.tokens * (q + 2 * kv)
    heads = r.tokens * ((E + narrow) * out + 4 * r.heads / r.tp) + (1 - r.recomputes_heads) * made
    heads = heads + E * r.latents * (between + normed * r.tokens)  # latents, and normalised
    scores = r.b / r.cp * r.heads / r.tp * r.s**2
    score_bytes = 2 + 3 * r.dropout + k.constants["kept_scores"] * (r.attention == 0)
    softmax = np.where(k.scores_in_memory, scores * score_bytes, 0.0)
    inside = r.kept_bytes * (np.where(r.gated > 0, r.kept_ffn, 2.0) - 1) + each  # the last product's input is one
    inside = inside - r.recomputes_activation * each
    block = r.tokens * r.ffn * r.active / r.tp  # elements of a tensor inside a feed-forward block
    full = hidden + heads + softmax + inside * block
    mode = r.code("recompute")
    start = E * between * r.hidden
    # Every second product of (q, k, v, output, gate, up, down), starting with q; and the attention core's output.
    second = E * (r.tokens * (2 * q + kv) + block + r.gated * between * r.hidden)
    second = second + 4 * r.tokens * r.heads / r.tp
    # The results of q, k, v, the output and the block's first matrices: no gradient needs the last product's.
    products = made + E * (1 + r.gated) * block + start
    kept = np.choose(mode, [full, full - softmax, start, start + second, start + products])
    return kept, np.where(mode >= 2, full, r.recomputes_heads * made)


def _rank(
    k: Kernels, layers: np.ndarray, ends: np.ndarray | int, alive: np.ndarray, kept: np.ndarray,
    beside: np.ndarray,
) -> RankBytes:  # fmt: skip
    """Return the bytes on a rank of a stage.

    Fragmentation occurs if forwards follow backwards; before that, memory is freed in allocation order. When memory
    runs out, the allocator waits for all pending reads (pytorch/pytorch#19222).

    Args:
        ends: model ends on the rank.
        alive: micro-batches.
        kept: bytes saved per layer and micro-batch.
        beside: transient bytes.
    """
    r, c = k.runs, k.constants
    layer, end = weights_on_rank(r)
    ends = ends * end
    weights = layers * layer + ends
    share, sharded = shard_parameters(r, weights, layers), r.zero > 0
    replicated = r.zero < 3
    gradients = np.where(replicated, weights * (r.gradient_bytes + r.bucket_copies * (r.dp > 1)), share * 4)
    gathered = E * np.where(r.unsharded, weights, k.constant("gathered_layers") * layer + ends / 2)
    gathered = np.where(replicated, 0.0, gathered + r.unsharded * weights * r.gradient_bytes)
    activations, unread = np.maximum(layers - r.offloaded_layers, 0) * alive * kept, _unread(k, layers, alive)
    holes = np.where(r.microbatches > r.pp, k.constant("fragmentation"), 0.0)
    return RankBytes(
        np.where(replicated, E * weights, 0.0), gradients, share * (r.optimizer_bytes + r.shard_copies * sharded),
        activations, gathered, beside, share * c["update_bytes"], holes * (activations + beside + unread),
        np.where((r.tp > 1) & (r.is_gpu > 0), r.split_holes, 0.0) * (activations + beside), unread,
        np.full(r.size, c["base"] * GB),
    )
