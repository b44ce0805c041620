"""Many runs at once: one array per property that affects the time and memory of a step.

Input of the closed forms in `shoal.planning.cost.time.step` and `shoal.planning.cost.memory.published_software`, which
price a hundred thousand layouts in one pass of numpy. Letters are the usual ones: b, s, h, a, L, v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

RECOMPUTE = ("none", "selective", "full", "operators")
"""What a backward recomputes: nothing; the attention core; a layer; or a layer except every second product and
attention."""
ATTENTION = ("unfused", "fused-softmax", "flash-1", "flash-2", "flash-3")
"""Attention kernels, oldest first."""
DEFAULTS: Mapping[str, float] = {
    "gated": 1, "tied": 0, "experts": 1, "active": 1, "tp": 1, "tp_x": 1, "pp": 1, "virtual": 1, "dp": 1, "cp": 1,
    "ep": 1, "zero": 0, "shard": 1, "sequence_parallel": 0, "recompute": 0, "warmup": 1, "alive": 1, "software": 0,
    "generation": 2, "attention": 3, "fp8": 0, "peak8": 0, "attainable": 1, "inside": float("inf"), "nic": float("inf"),
    "network": 0, "per_node": 8, "through_memory": 0, "gradient_bytes": 4, "reduce_bytes": 4, "overlap_data": 1,
    "overlap_tensor": 0, "overlap_pipeline": 0, "balanced": 0, "dropout": 0, "unit_messages": 1, "crowded": 0,
    "bucket_copies": 0, "shard_copies": 0, "reduced_apart": 0, "gathers_kept": 0, "logits_whole": 0, "fused_norm": 1,
    "ties_first": 0, "ahead": 0, "kept_ffn": 4,
}  # fmt: skip
"""Default values of the optional fields of `Runs`."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Arrays with one entry per run; rows may omit the fields of `DEFAULTS`.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: L, h, a and so on.
        gated: 1 if the feed-forward block has two input matrices (SwiGLU), else 0.
        tied: 1 if the head is the embedding.
        experts, active: experts of a layer, and experts per token; 1 and 1 without a router.
        s, b: tokens per sequence, and sequences per micro-batch.
        microbatches: micro-batches of one replica per step.
        tp, pp, virtual, dp, cp, ep: parallel degrees; tp_x, tp_y: grid dimensions of 2D tensor parallelism.
        shard: ranks over which the ZeRO stage ``zero`` shards.
        sequence_parallel: 0 or 1.
        recompute: index into `RECOMPUTE`.
        warmup: bubble of the schedule relative to 1F1B's; interleaving additionally divides by ``virtual``.
        alive: micro-batches kept by the first stage, relative to 1F1B's.
        software, generation, network: indices of the calibration constants (`shoal.spec.catalog.calibration`).
        attention: index into `ATTENTION`.
        peak, hbm, memory: FLOP/s, bytes/s, bytes of the accelerator.
        inside, nic: bytes/s of one accelerator within its node, and its share of the bandwidth out of the node.
        per_node: accelerators per node.
        through_memory: 1 if ranks communicate through shared memory, else 0.
        attainable: fraction of ``peak`` that the best-shaped product attains.
        fp8: 1 if the layers' matrix products run in 8 bits, at ``peak8`` FLOP/s.
        gradient_bytes, reduce_bytes, overlap_data, overlap_tensor, overlap_pipeline, balanced, dropout, unit_messages,
            crowded, bucket_copies, shard_copies, reduced_apart, gathers_kept, logits_whole, kept_ffn: properties of the
            software.
        ties_first: 1 if stages are cut by cost, and a layer that meets a share exactly starts the next stage.
        ahead: 1 if the host does not wait for messages between stages.
        fused_norm: 1 if a norm is one kernel.
    """

    layers: np.ndarray
    hidden: np.ndarray
    heads: np.ndarray
    kv_heads: np.ndarray
    head_dim: np.ndarray
    ffn: np.ndarray
    vocab: np.ndarray
    s: np.ndarray
    b: np.ndarray
    microbatches: np.ndarray
    peak: np.ndarray
    hbm: np.ndarray
    memory: np.ndarray
    gated: np.ndarray
    tied: np.ndarray
    experts: np.ndarray
    active: np.ndarray
    tp: np.ndarray
    tp_x: np.ndarray
    pp: np.ndarray
    virtual: np.ndarray
    dp: np.ndarray
    cp: np.ndarray
    ep: np.ndarray
    zero: np.ndarray
    shard: np.ndarray
    sequence_parallel: np.ndarray
    recompute: np.ndarray
    warmup: np.ndarray
    alive: np.ndarray
    software: np.ndarray
    generation: np.ndarray
    attention: np.ndarray
    fp8: np.ndarray
    peak8: np.ndarray
    attainable: np.ndarray
    inside: np.ndarray
    nic: np.ndarray
    network: np.ndarray
    per_node: np.ndarray
    through_memory: np.ndarray
    gradient_bytes: np.ndarray
    reduce_bytes: np.ndarray
    overlap_data: np.ndarray
    overlap_tensor: np.ndarray
    overlap_pipeline: np.ndarray
    balanced: np.ndarray
    dropout: np.ndarray
    unit_messages: np.ndarray
    crowded: np.ndarray
    bucket_copies: np.ndarray
    shard_copies: np.ndarray
    reduced_apart: np.ndarray
    gathers_kept: np.ndarray
    logits_whole: np.ndarray
    fused_norm: np.ndarray
    ties_first: np.ndarray
    ahead: np.ndarray
    kept_ffn: np.ndarray

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]]) -> Runs:
        """Build from one mapping per run; names that are not fields are ignored."""
        rows = [{**DEFAULTS, **row} for row in rows]
        return Runs(*(np.array([float(row[name]) for row in rows]) for name in FIELDS))

    @property
    def size(self) -> int:
        return len(self.layers)

    @property
    def tp_y(self) -> np.ndarray:
        """Second grid dimension, tp / tp_x."""
        return self.tp / self.tp_x

    @property
    def ranks(self) -> np.ndarray:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of a micro-batch on one rank: b s / cp."""
        return self.b * self.s / self.cp

    def take(self, chosen: np.ndarray) -> Runs:
        return Runs(*(getattr(self, name)[chosen] for name in FIELDS))

    def code(self, name: str) -> np.ndarray:
        """Return a field as integers."""
        return getattr(self, name).astype(int)


FIELDS = tuple(field.name for field in fields(Runs))
