"""Many runs together: one array per property that affects the time and memory of a step.

Input of the closed forms in `shoal.planning.cost.time.step` and `shoal.planning.cost.memory.published_software`, which
price a hundred thousand layouts in one pass of numpy. Letters are the usual ones: b, s, h, a, L, v.
"""

# ruff: noqa: RUF009 (`_optional` is `dataclasses.field`)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from typing import Any

import numpy as np

RECOMPUTE = ("none", "selective", "full", "operators")
"""What a backward recomputes: nothing; the attention core; a layer; or a layer except every second product and
attention."""
ATTENTION = ("unfused", "fused-softmax", "flash-1", "flash-2", "flash-3")
"""Attention kernels, oldest first."""


def _optional(default: float) -> Any:
    """Declare a field that rows may omit."""
    return field(default=default)


@dataclass(frozen=True, eq=False)
class Runs:
    """Arrays with one entry per run."""

    layers: np.ndarray  # L
    hidden: np.ndarray  # h
    heads: np.ndarray  # a
    kv_heads: np.ndarray
    head_dim: np.ndarray
    ffn: np.ndarray
    vocab: np.ndarray  # v
    s: np.ndarray  # tokens of a sequence
    b: np.ndarray  # sequences of a micro-batch
    microbatches: np.ndarray  # of one replica in a step
    peak: np.ndarray  # FLOP/s of the accelerator
    hbm: np.ndarray  # bytes/s of its memory
    memory: np.ndarray  # bytes
    gated: np.ndarray = _optional(1)  # 1 if the feed-forward block has two input matrices (SwiGLU), else 0
    tied: np.ndarray = _optional(0)  # 1 if the head is the embedding
    experts: np.ndarray = _optional(1)  # of a layer; 1 without a router
    active: np.ndarray = _optional(1)  # experts of a token
    tp: np.ndarray = _optional(1)
    tp_x: np.ndarray = _optional(1)  # first grid dimension of 2D tensor parallelism
    pp: np.ndarray = _optional(1)
    virtual: np.ndarray = _optional(1)  # stages of a pipeline rank
    dp: np.ndarray = _optional(1)
    cp: np.ndarray = _optional(1)
    ep: np.ndarray = _optional(1)
    zero: np.ndarray = _optional(0)
    shard: np.ndarray = _optional(1)  # ranks over which ZeRO shards
    sequence_parallel: np.ndarray = _optional(0)
    recompute: np.ndarray = _optional(0)  # index into `RECOMPUTE`
    warmup: np.ndarray = _optional(1)  # bubble relative to 1F1B's; interleaving also divides it by `virtual`
    alive: np.ndarray = _optional(1)  # micro-batches kept by the first stage, relative to 1F1B's
    software: np.ndarray = _optional(0)  # index of calibration constants, like `generation` and `network`
    generation: np.ndarray = _optional(2)
    attention: np.ndarray = _optional(3)  # index into `ATTENTION`
    fp8: np.ndarray = _optional(0)  # 1 if the layers' products are in 8 bits
    peak8: np.ndarray = _optional(0)  # FLOP/s of these products
    attainable: np.ndarray = _optional(1)  # fraction of `peak` that the best-shaped product attains
    inside: np.ndarray = _optional(inf)  # bytes/s of one accelerator within its node
    nic: np.ndarray = _optional(inf)  # its share of the bandwidth out of the node
    network: np.ndarray = _optional(0)
    per_node: np.ndarray = _optional(8)  # accelerators
    through_memory: np.ndarray = _optional(0)  # 1 if ranks communicate through shared memory
    # Properties of the software, as in `shoal.spec.catalog.software`.
    gradient_bytes: np.ndarray = _optional(4)
    reduce_bytes: np.ndarray = _optional(4)
    overlap_data: np.ndarray = _optional(1)
    overlap_tensor: np.ndarray = _optional(0)
    overlap_pipeline: np.ndarray = _optional(0)
    balanced: np.ndarray = _optional(0)
    dropout: np.ndarray = _optional(0)
    unit_messages: np.ndarray = _optional(1)
    crowded: np.ndarray = _optional(0)
    bucket_copies: np.ndarray = _optional(0)
    shard_copies: np.ndarray = _optional(0)
    reduced_apart: np.ndarray = _optional(0)
    gathers_kept: np.ndarray = _optional(0)
    unsplit_logits: np.ndarray = _optional(0)
    fused_norm: np.ndarray = _optional(1)  # 1 if a norm is one kernel
    ties_first: np.ndarray = _optional(0)  # 1 if stages are cut by cost, and a tie starts the next stage
    ahead: np.ndarray = _optional(0)  # 1 if the host does not wait for messages between stages
    kept_ffn: np.ndarray = _optional(4)

    @staticmethod
    def from_rows(rows: Sequence[Mapping[str, Any]]) -> Runs:
        """Build from one mapping per run; it may omit optional fields, and names that are not fields are ignored."""
        defaults = {each.name: each.default for each in fields(Runs) if each.default is not MISSING}
        rows = [{**defaults, **row} for row in rows]
        return Runs(*(np.array([float(row[each.name]) for row in rows]) for each in fields(Runs)))

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
        return Runs(*(column[chosen] for column in vars(self).values()))

    def code(self, name: str) -> np.ndarray:
        """Return a field as integers."""
        return getattr(self, name).astype(int)
