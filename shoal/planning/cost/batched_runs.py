"""Many runs at once: one array for each thing that decides the time and the memory of a step; or one run, in numbers.

What the closed forms of `shoal.planning.cost.time.step` and `shoal.planning.cost.memory.published_software` take, so
that a hundred thousand layouts are priced in one pass of numpy. Letters as everywhere: b, s, h, a, L, v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, overload

from shoal.planning.cost.either import V

if TYPE_CHECKING:
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
class Runs(Generic[V]):
    """One entry of each array is one run, or each field is a number; those of `DEFAULTS` may be left out.

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

    layers: V
    hidden: V
    heads: V
    kv_heads: V
    head_dim: V
    ffn: V
    vocab: V
    s: V
    b: V
    microbatches: V
    peak: V
    hbm: V
    memory: V
    gated: V
    tied: V
    experts: V
    active: V
    tp: V
    tp_x: V
    pp: V
    virtual: V
    dp: V
    cp: V
    ep: V
    zero: V
    shard: V
    sequence_parallel: V
    recompute: V
    warmup: V
    alive: V
    software: V
    generation: V
    attention: V
    fp8: V
    peak8: V
    attainable: V
    inside: V
    nic: V
    network: V
    per_node: V
    through_memory: V
    gradient_bytes: V
    reduce_bytes: V
    overlap_data: V
    overlap_tensor: V
    overlap_pipeline: V
    balanced: V
    dropout: V
    unit_messages: V
    crowded: V
    bucket_copies: V
    shard_copies: V
    reduced_apart: V
    gathers_kept: V
    logits_whole: V
    fused_norm: V
    ties_first: V
    ahead: V
    kept_ffn: V

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]]) -> Runs[np.ndarray]:
        """From one mapping for each run; names that are no field are left out."""
        import numpy as np

        rows = [{**DEFAULTS, **row} for row in rows]
        return Runs(*(np.array([float(row[name]) for row in rows]) for name in FIELDS))

    @staticmethod
    def one(values: Mapping[str, Any]) -> Runs[float]:
        """A single run, in numbers."""
        values = {**DEFAULTS, **values}
        return Runs(*(float(values[name]) for name in FIELDS))

    @property
    def size(self: Runs[np.ndarray]) -> int:
        """How many."""
        return len(self.layers)

    @property
    def tp_y(self) -> V:
        """See above."""
        return self.tp / self.tp_x

    @property
    def ranks(self) -> V:
        """World sizes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> V:
        """Of a micro-batch on one rank: b s / cp."""
        return self.b * self.s / self.cp

    def take(self: Runs[np.ndarray], chosen: np.ndarray) -> Runs[np.ndarray]:
        """Some of them, by index or mask."""
        return Runs(*(getattr(self, name)[chosen] for name in FIELDS))

    @overload
    def code(self: Runs[float], name: str) -> int: ...

    @overload
    def code(self: Runs[np.ndarray], name: str) -> np.ndarray: ...

    def code(self, name: str) -> int | np.ndarray:
        """A field as integers."""
        value: float | np.ndarray = getattr(self, name)
        return int(value) if isinstance(value, float) else value.astype(int)


FIELDS = tuple(field.name for field in fields(Runs))
