"""Many runs at once: one array for each thing that decides the time and the memory of a step.

What the closed forms of `shoal.planning.cost.time.step` and `shoal.planning.cost.memory.published_software` take, so
that a hundred thousand layouts are priced in one pass of numpy. Letters as everywhere: b, s, h, a, L, v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

RECOMPUTE = ("none", "selective", "full", "operators")
"""What a backward computes again: attention's core; a layer; or all of it but every second product and attention."""
ATTENTION = ("unfused", "fused-softmax", "flash-1", "flash-2", "flash-3")
"""Of kernels, in the order in which they came."""
DEFAULTS: Mapping[str, float] = {
    "gated": 1, "tied": 0, "experts": 1, "active": 1, "tp": 1, "tp_x": 1, "pp": 1, "virtual": 1, "dp": 1, "cp": 1,
    "ep": 1, "zero": 0, "shard": 1, "sequence_parallel": 0, "recompute": 0, "warmup": 1, "alive": 1, "software": 0,
    "generation": 2, "attention": 3, "fp8": 0, "peak8": 0, "attainable": 1, "inside": float("inf"), "nic": float("inf"),
    "network": 0, "per_node": 8, "through_memory": 0, "gradient_bytes": 4, "reduce_bytes": 4, "overlap_data": 1,
    "overlap_tensor": 0, "overlap_pipeline": 0, "balanced": 0, "dropout": 0, "unit_messages": 1, "crowded": 0,
    "bucket_copies": 0, "shard_copies": 0, "reduced_apart": 0, "gathers_kept": 0, "logits_whole": 0, "fused_norm": 1,
    "ties_first": 0, "ahead": 0, "kept_ffn": 4,
}  # fmt: skip
"""Of the fields of `Runs` that may be left out."""


@dataclass(frozen=True, eq=False)
class Runs:
    """One entry of each array is one run; rows may leave out those of `DEFAULTS`.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: L, h, a and so on.
        gated: 1 where the feed-forward block has two matrices in (SwiGLU), else 0.
        tied: 1 where the head is the embedding.
        experts, active: of a layer, and how many a token goes through; 1 and 1 without a router.
        s, b: tokens of a sequence, and sequences of a micro-batch.
        microbatches: of one replica in a step.
        tp, pp, virtual, dp, cp, ep: degrees; tp_x, tp_y: of the grid that tp is in two dimensions.
        shard: ranks over which ZeRO's stage of ``zero`` shards.
        sequence_parallel: 0 or 1.
        recompute: index into `RECOMPUTE`.
        warmup: part of 1F1B's bubble that the schedule has; interleaving counts by ``virtual`` besides.
        alive: micro-batches that the first stage keeps, over those that 1F1B does.
        software, generation, network: indices into what the constants are known by (`shoal.spec.catalog.calibration`).
        attention: index into `ATTENTION`.
        peak, hbm, memory: FLOP/s, bytes/s, bytes of the accelerator.
        inside, nic: bytes/s of one accelerator to its node, and its share of what leaves the node.
        per_node: accelerators.
        through_memory: 1 where ranks communicate through memory that they share, else 0.
        attainable: part of ``peak`` that the best-shaped product attains.
        fp8: 1 where the layers' matrix products run in 8 bits, at ``peak8`` FLOP/s.
        gradient_bytes, reduce_bytes, overlap_data, overlap_tensor, overlap_pipeline, balanced, dropout, unit_messages,
            crowded, bucket_copies, shard_copies, reduced_apart, gathers_kept, logits_whole, kept_ffn:
            facts of the software.
        ties_first: 1 where stages are cut by cost and a layer that meets a share exactly is not the last of its stage.
        ahead: 1 where the host does not wait for messages between stages.
        fused_norm: 1 where a norm is one kernel.
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
        """From one mapping for each run; names that are no field are left out."""
        rows = [{**DEFAULTS, **row} for row in rows]
        return Runs(*(np.array([float(row[name]) for row in rows]) for name in FIELDS))

    @property
    def size(self) -> int:
        """How many."""
        return len(self.layers)

    @property
    def tp_y(self) -> np.ndarray:
        """See above."""
        return self.tp / self.tp_x

    @property
    def ranks(self) -> np.ndarray:
        """World sizes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> np.ndarray:
        """Of a micro-batch on one rank: b s / cp."""
        return self.b * self.s / self.cp

    def take(self, chosen: np.ndarray) -> Runs:
        """Some of them, by index or mask."""
        return Runs(*(getattr(self, name)[chosen] for name in FIELDS))

    def code(self, name: str) -> np.ndarray:
        """A field as integers."""
        return getattr(self, name).astype(int)


FIELDS = tuple(field.name for field in fields(Runs))
