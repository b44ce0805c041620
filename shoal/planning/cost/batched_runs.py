"""Many runs at once: one array for each thing that decides the time and the memory of a step; or one run, in numbers.

What the closed forms of `shoal.planning.cost.time.step` and `shoal.planning.cost.memory.published_software` take, so
that a hundred thousand layouts are priced in one pass of numpy. Letters as everywhere: b, s, h, a, L, v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from shoal.planning.cost.either import Value

RECOMPUTE = ("none", "selective", "full", "operators")
"""What a backward computes again: attention's core; a layer; or all of it but every second product and attention."""
ATTENTION = ("unfused", "fused-softmax", "flash-1", "flash-2", "flash-3")
"""Of kernels, in the order in which they came."""


class Runs(NamedTuple):
    """One entry of each array is one run, or each field is a number; those with a default may be left out.

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

    layers: Value
    hidden: Value
    heads: Value
    kv_heads: Value
    head_dim: Value
    ffn: Value
    vocab: Value
    s: Value
    b: Value
    microbatches: Value
    peak: Value
    hbm: Value
    memory: Value
    gated: Value = 1
    tied: Value = 0
    experts: Value = 1
    active: Value = 1
    tp: Value = 1
    tp_x: Value = 1
    pp: Value = 1
    virtual: Value = 1
    dp: Value = 1
    cp: Value = 1
    ep: Value = 1
    zero: Value = 0
    shard: Value = 1
    sequence_parallel: Value = 0
    recompute: Value = 0
    warmup: Value = 1
    alive: Value = 1
    software: Value = 0
    generation: Value = 2
    attention: Value = 3
    fp8: Value = 0
    peak8: Value = 0
    attainable: Value = 1
    inside: Value = float("inf")
    nic: Value = float("inf")
    network: Value = 0
    per_node: Value = 8
    through_memory: Value = 0
    gradient_bytes: Value = 4
    reduce_bytes: Value = 4
    overlap_data: Value = 1
    overlap_tensor: Value = 0
    overlap_pipeline: Value = 0
    balanced: Value = 0
    dropout: Value = 0
    unit_messages: Value = 1
    crowded: Value = 0
    bucket_copies: Value = 0
    shard_copies: Value = 0
    reduced_apart: Value = 0
    gathers_kept: Value = 0
    logits_whole: Value = 0
    fused_norm: Value = 1
    ties_first: Value = 0
    ahead: Value = 0
    kept_ffn: Value = 4

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Runs:
        """From one mapping for each run; names that are no field are left out."""
        import numpy as np

        rows = [cls._field_defaults | row for row in rows]
        return cls(*(np.array([float(row[name]) for row in rows]) for name in cls._fields))

    @classmethod
    def one(cls, values: Mapping[str, Any]) -> Runs:
        """A single run, in numbers."""
        values = cls._field_defaults | values
        return cls(*(float(values[name]) for name in cls._fields))

    @property
    def size(self) -> int:
        """How many."""
        return len(self.layers)

    @property
    def tp_y(self) -> Value:
        """See above."""
        return self.tp / self.tp_x

    @property
    def ranks(self) -> Value:
        """World sizes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> Value:
        """Of a micro-batch on one rank: b s / cp."""
        return self.b * self.s / self.cp

    def take(self, chosen: np.ndarray) -> Runs:
        """Some of them, by index or mask."""
        return Runs(*(values[chosen] for values in self))

    def code(self, name: str) -> Value:
        """A field as integers."""
        value = getattr(self, name)
        return int(value) if isinstance(value, float) else value.astype(int)
