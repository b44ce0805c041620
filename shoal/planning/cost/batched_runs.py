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

from shoal.planning.run import KINDS, EstimatedRun
from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.calibration import GENERATIONS, NETWORKS
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.software import Software, software_table
from shoal.spec.layout import Layout

RECOMPUTE = ("none", "selective", "full", "operators", "products")
"""What a backward recomputes: nothing; the attention core; a layer; a layer except every second product and
attention; or a layer except its products with weights."""
ATTENTION = ("unfused", "fused-softmax", "flash-1", "flash-2", "flash-3")
"""Attention kernels, oldest first."""
SCHEDULES = {"1f1b": (1.0, 1.0), "interleaved-1f1b": (1.0, 1.0), "zb-h1": (1 / 3, 1.0), "zb-h2": (0.0, 2.0)}
"""Bubble and live micro-batches of schedules with a closed form, relative to 1F1B's (Qi et al. 2023, Zero Bubble
Pipeline Parallelism, table 1); interleaving also divides the bubble by the stages of a rank."""
E = 2.0  # bytes of an element during computation: bf16 or fp16


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
    further: np.ndarray = _optional(0)  # modules of multi-token prediction
    seen: np.ndarray = _optional(1)  # scores of fused attention, relative to all earlier tokens; the mean over layers
    value_dim: np.ndarray = _optional(0)  # of a head's values; 0 is head_dim
    query_rank: np.ndarray = _optional(0)  # widths of latent attention: of the latent of queries
    kv_rank: np.ndarray = _optional(0)  # of the latent of keys and values
    rotary_dim: np.ndarray = _optional(0)  # of the key that all heads share; 0 is attention without latents
    dense: np.ndarray = _optional(1)  # blocks of width `ffn` in a layer without a router; the mean over all layers
    routed: np.ndarray = _optional(0)  # part of the layers that have a router
    shared: np.ndarray = _optional(0)  # experts of such a layer that every token passes
    experts: np.ndarray = _optional(1)  # that it chooses from
    per_token: np.ndarray = _optional(0)  # experts that it chooses
    expert_biases: np.ndarray = _optional(0)  # 1 if their products have biases
    groups: np.ndarray = _optional(1)  # of experts
    groups_per_token: np.ndarray = _optional(1)  # that the experts of a token are chosen from
    tp: np.ndarray = _optional(1)
    tp_x: np.ndarray = _optional(1)  # first grid dimension of 2D tensor parallelism
    pp: np.ndarray = _optional(1)
    virtual: np.ndarray = _optional(1)  # stages of a pipeline rank
    dp: np.ndarray = _optional(1)
    cp: np.ndarray = _optional(1)
    ep: np.ndarray = _optional(1)
    etp: np.ndarray = _optional(1)  # ranks that split each expert
    zero: np.ndarray = _optional(0)
    shard: np.ndarray = _optional(1)  # ranks over which ZeRO shards
    sequence_parallel: np.ndarray = _optional(0)
    recompute: np.ndarray = _optional(0)  # index into `RECOMPUTE`
    warmup: np.ndarray = _optional(1)  # bubble relative to 1F1B's; interleaving also divides it by `virtual`
    alive: np.ndarray = _optional(1)  # micro-batches kept by the first stage, relative to 1F1B's
    software: np.ndarray = _optional(0)  # index of calibration constants, like `generation` and `network`
    generation: np.ndarray = _optional(2)
    attention: np.ndarray = _optional(3)  # index into `ATTENTION`
    quantised: np.ndarray = _optional(0)  # 1 if the layers' products are in 8 or 4 bits
    quantised_peak: np.ndarray = _optional(0)  # FLOP/s of these products
    attainable: np.ndarray = _optional(1)  # fraction of `peak` that the best-shaped product attains
    inside: np.ndarray = _optional(inf)  # bytes/s of one accelerator within its node
    nic: np.ndarray = _optional(inf)  # its share of the bandwidth out of the node
    network: np.ndarray = _optional(0)
    per_node: np.ndarray = _optional(8)  # accelerators
    axes: np.ndarray = _optional(1)  # dimensions of a torus of accelerators; 1 on a switch
    is_gpu: np.ndarray = _optional(1)  # of which `memory` is rounded down, and libraries take a part
    through_memory: np.ndarray = _optional(0)  # 1 if ranks communicate through shared memory
    # Properties of the software, as in `Software`.
    optimizer_bytes: np.ndarray = _optional(12)
    gradient_bytes: np.ndarray = _optional(4)
    reduce_bytes: np.ndarray = _optional(4)
    fused_accumulation: np.ndarray = _optional(0)
    overlap_data: np.ndarray = _optional(1)
    overlap_gather: np.ndarray = _optional(0)
    overlap_tensor: np.ndarray = _optional(0)
    overlap_pipeline: np.ndarray = _optional(0)
    balanced: np.ndarray = _optional(0)
    dropout: np.ndarray = _optional(0)
    unit_messages: np.ndarray = _optional(1)
    gathers_once: np.ndarray = _optional(0)
    bucket_copies: np.ndarray = _optional(0)
    shard_copies: np.ndarray = _optional(0)
    sliced: np.ndarray = _optional(0)
    reduced_apart: np.ndarray = _optional(0)
    split_holes: np.ndarray = _optional(0)
    hides_gathers: np.ndarray = _optional(0)
    unsplit_logits: np.ndarray = _optional(0)
    fused_norm: np.ndarray = _optional(1)  # 1 if a norm is one kernel
    ties_first: np.ndarray = _optional(0)  # 1 if stages are cut by cost, and a tie starts the next stage
    ahead: np.ndarray = _optional(0)  # 1 if the host does not wait for messages between stages
    fused_loss: np.ndarray = _optional(0)
    kept_ffn: np.ndarray = _optional(4)
    kept_bytes: np.ndarray = _optional(2)
    keeps_quantised: np.ndarray = _optional(0)
    recomputes_heads: np.ndarray = _optional(0)
    recomputes_norms: np.ndarray = _optional(0)
    recomputes_activation: np.ndarray = _optional(0)
    paired: np.ndarray = _optional(0)
    pads_values: np.ndarray = _optional(0)
    rows_once: np.ndarray = _optional(0)
    row_bytes: np.ndarray = _optional(2)
    overlap_rows: np.ndarray = _optional(0)
    overlap_experts: np.ndarray = _optional(0)
    expert_kernels: np.ndarray = _optional(0)
    graphs: np.ndarray = _optional(0)
    parallel_block: np.ndarray = _optional(0)
    drops_unused: np.ndarray = _optional(0)
    offloads_heads: np.ndarray = _optional(0)
    offloaded_layers: np.ndarray = _optional(0)
    blocking: np.ndarray = _optional(0)

    @staticmethod
    def from_rows(rows: Sequence[Mapping[str, Any]]) -> Runs:
        """Build from one mapping per run; it may omit optional fields, and names that are not fields are ignored."""
        defaults = {each.name: each.default for each in fields(Runs) if each.default is not MISSING}
        rows = [{**defaults, **row} for row in rows]
        return Runs(*(np.array([float(row[each.name]) for row in rows]) for each in fields(Runs)))

    @staticmethod
    def vary(row: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> Runs:
        """Build runs that differ from one row in some columns alone."""
        count = len(next(iter(columns.values())))
        one = Runs.from_rows([row])
        return Runs(*(
            np.asarray(columns[name], float) if name in columns else np.repeat(value, count)
            for name, value in vars(one).items()
        ))  # fmt: skip

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

    @property
    def unsharded(self) -> np.ndarray:
        """Whether ZeRO-3's parameters and gradients stay unsharded between micro-batches."""
        return (self.gathers_once > 0) & (self.zero == 3) & (self.pp > 1)

    @property
    def alone(self) -> np.ndarray:
        """Blocks of width `ffn` that every token passes in a layer; the mean over layers."""
        return self.dense + self.routed * self.shared

    @property
    def active(self) -> np.ndarray:
        """Blocks of width `ffn` that a token passes in a layer, routed experts included; the mean over layers."""
        return self.alone + self.routed * self.per_token

    @property
    def values(self) -> np.ndarray:
        """Width of a head's values."""
        return np.where(self.value_dim > 0, self.value_dim, self.head_dim)

    @property
    def latents(self) -> np.ndarray:
        """Elements per token that latent attention computes on every rank; 0 without."""
        return self.query_rank + self.kv_rank + self.rotary_dim

    @property
    def from_latents(self) -> np.ndarray:
        """Parameters of the matrices that make heads of latents, or of the hidden state if queries have no latent."""
        queries = np.where(self.query_rank > 0, self.query_rank, self.hidden) * self.heads * self.head_dim
        return queries + self.kv_rank * self.heads * (self.head_dim - self.rotary_dim + self.values)

    @property
    def attention_weights(self) -> np.ndarray:
        """Matrix parameters of a layer's attention that tensor parallelism splits; others are ``hidden x latents``."""
        into = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        out = self.heads * self.values * self.hidden
        return np.where(self.rotary_dim > 0, self.from_latents, into) + out

    def take(self, chosen: np.ndarray) -> Runs:
        return Runs(*(column[chosen] for column in vars(self).values()))

    def code(self, name: str) -> np.ndarray:
        """Return a field as integers."""
        return getattr(self, name).astype(int)


FACTS = [each.name for each in fields(Runs) if each.name in Software.model_fields]


def network_name(cluster: Cluster) -> str:
    """Return a cluster's kind of network in the calibration, by the name of its link; InfiniBand if it has none."""
    name = cluster.nic.name if cluster.nic else ""
    known = [kind for kind in NETWORKS if kind in name]
    return max(known, key=len) if known else "roce" if "ethernet" in name else "infiniband"


def describe_row(run: EstimatedRun) -> dict[str, Any]:
    """Return a run as a row of `Runs`: model, layout, cluster and software.

    Layers with and without experts count by their mean.
    """
    shape, layout, cluster, software = run.shape, run.layout, run.cluster, run.software
    machine, wide = cluster.accelerator, run.policy.compute.itemsize / E
    unfused = (run.attention == "explicit" and layout.cp == 1) or shape.softcap is not None
    kernel = "unfused" if unfused else run.flash
    network = network_name(cluster)
    row = {name: getattr(software, name) for name in FACTS} | describe_layout(layout, software, run.global_batch)
    return row | {
        "layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.query_dim, "value_dim": shape.value_dim, **_latent(shape),
        "vocab": shape.vocab, "further": shape.mtp_depth, "gated": shape.family == "llama", "tied": shape.tied,
        **_experts(run), "seen": run.computed_scores, "s": run.sequence_length,
        "software": list(software_table()).index(software.family), "attention": ATTENTION.index(kernel),
        "generation": GENERATIONS.index(machine.generation), "network": NETWORKS.index(network),
        "peak": machine.dense_flops(KINDS[run.policy.compute.name]), "attainable": machine.matmul_efficiency,
        "quantised": run.quantised, "quantised_peak": machine.dense_flops(run.products) if run.quantised else 0.0,
        "hbm": machine.memory_bandwidth / wide, "memory": cluster.memory_bytes,
        "is_gpu": machine.is_gpu,
        "inside": cluster.inside.bandwidth * (2 if cluster.torus else 1) / wide if cluster.inside else inf,
        "nic": cluster.nics * cluster.nic.bandwidth / cluster.per_node / wide if cluster.nic else inf,
        "per_node": cluster.per_node, "axes": max(1, len(cluster.torus)), "through_memory": cluster.at_once is not None,
    }  # fmt: skip


def describe_layout(layout: Layout, software: Software, global_batch: int) -> dict[str, float]:
    """Return the columns of `Runs` that depend on the layout alone, of the runs of one batch on one cluster."""
    again: str = layout.recompute
    of = ("tp", "tp_x", "pp", "dp", "cp", "ep", "zero", "sequence_parallel")
    if again == "selective" and software.selective != "core":
        again = software.selective
    warmup, alive = SCHEDULES.get(layout.schedule, (1.0, 1.0))
    virtual = (layout.virtual_stages or 2) if layout.schedule == "interleaved-1f1b" and layout.pp > 1 else 1
    return {name: getattr(layout, name) for name in of} | {
        "b": layout.micro_batch, "microbatches": max(1.0, global_batch / (layout.dp * layout.micro_batch)),
        "virtual": virtual, "etp": layout.expert_tensor, "shard": layout.shards,
        "recompute": RECOMPUTE.index(again), "warmup": warmup, "alive": alive,
    }  # fmt: skip


def _latent(shape: ModelShape) -> dict[str, int]:
    if (latent := shape.latent) is None:
        return {}
    return {"query_rank": latent.query_rank or 0, "kv_rank": latent.key_value_rank, "rotary_dim": latent.rotary_dim}


def _experts(run: EstimatedRun) -> dict[str, float]:
    """Return what `Runs` has of feed-forward blocks and experts; means over layers."""
    shape, experts = run.shape, run.shape.experts
    if experts is None:
        return {"ffn": shape.ffn}
    routed = len(experts.layers(shape.layers)) / shape.layers
    return {
        "ffn": experts.ffn, "dense": (1 - routed) * shape.ffn / experts.ffn, "routed": routed,
        "shared": experts.shared, "experts": experts.count, "per_token": experts.per_token, "groups": experts.groups,
        "groups_per_token": experts.groups_per_token, "expert_biases": experts.biases,
    }  # fmt: skip
