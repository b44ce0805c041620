"""Many runs at once: one array for each thing that decides the time and the memory of a step.

What the closed forms of `shoal.cost.step` and `shoal.cost.footprint` take, so that a hundred thousand layouts are
priced in one pass of numpy. Letters as everywhere: b, s, h, a, L, v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

RECOMPUTE = ("none", "selective", "full")
ATTENTION = ("unfused", "fused-softmax", "flash-1", "flash-2", "flash-3")
"""Of kernels, in the order in which they came."""


@dataclass
class Runs:
    """One entry of each array is one run; fields with a default may be left out.

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
        software, generation, network: indices into what the constants are known by (`shoal.catalog.calibration`).
        attention: index into `ATTENTION`.
        peak, hbm, memory: FLOP/s, bytes/s, bytes of the accelerator.
        inside, nic: bytes/s of one accelerator to its node, and its share of what leaves the node.
        per_node: accelerators.
        attainable: part of ``peak`` that the best-shaped product attains.
        fp8: 1 where the layers' matrix products run in 8 bits, at ``peak8`` FLOP/s.
        gradient_bytes, reduce_bytes, overlap_data, overlap_tensor, overlap_pipeline, balanced, dropout, unit_messages,
            crowded, bucket_copies, shard_copies, reduced_apart, gathers_kept, logits_whole, kept_ffn:
            facts of the software.
        ties_first: 1 where stages are cut by cost and a layer that meets a share exactly is not the last of its stage.
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
    gated: np.ndarray = 1
    tied: np.ndarray = 0
    experts: np.ndarray = 1
    active: np.ndarray = 1
    tp: np.ndarray = 1
    tp_x: np.ndarray = 1
    pp: np.ndarray = 1
    virtual: np.ndarray = 1
    dp: np.ndarray = 1
    cp: np.ndarray = 1
    ep: np.ndarray = 1
    zero: np.ndarray = 0
    shard: np.ndarray = 1
    sequence_parallel: np.ndarray = 0
    recompute: np.ndarray = 0
    warmup: np.ndarray = 1
    alive: np.ndarray = 1
    software: np.ndarray = 0
    generation: np.ndarray = 2
    attention: np.ndarray = 3
    fp8: np.ndarray = 0
    peak8: np.ndarray = 0
    attainable: np.ndarray = 1
    inside: np.ndarray = np.inf
    nic: np.ndarray = np.inf
    network: np.ndarray = 0
    per_node: np.ndarray = 8
    gradient_bytes: np.ndarray = 4
    reduce_bytes: np.ndarray = 4
    overlap_data: np.ndarray = 1
    overlap_tensor: np.ndarray = 0
    overlap_pipeline: np.ndarray = 0
    balanced: np.ndarray = 0
    dropout: np.ndarray = 0
    unit_messages: np.ndarray = 1
    crowded: np.ndarray = 0
    bucket_copies: np.ndarray = 0
    shard_copies: np.ndarray = 0
    reduced_apart: np.ndarray = 0
    gathers_kept: np.ndarray = 0
    logits_whole: np.ndarray = 0
    fused_norm: np.ndarray = 1
    ties_first: np.ndarray = 0
    kept_ffn: np.ndarray = 4

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Runs:
        """From one mapping for each run; names that are no field are left out."""
        defaults = {f.name: f.default for f in fields(cls)}
        return cls(**{
            name: np.array([float(row.get(name, default)) for row in rows])
            for name, default in defaults.items()
        })

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
        return Runs(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def code(self, name: str) -> np.ndarray:
        """A field as integers."""
        return getattr(self, name).astype(int)
