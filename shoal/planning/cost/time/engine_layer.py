"""Calibrated times of one layer in shoal's own engine, and attained rates of the cluster."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from shoal.planning.cost.batched_runs import ATTENTION, RECOMPUTE, Runs
from shoal.planning.cost.time.kernels import E, Kernels
from shoal.planning.run import KINDS, EstimatedRun
from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.calibration import GENERATIONS, NETWORKS, SPREADS, cluster_calibration
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.software import software_table


class LayerTimes(NamedTuple):
    """Seconds of one layer of one micro-batch on one rank.

    Attributes:
        products, attention, elements: parts of its forward.
        attention_backward: backward of the attention core.
        exchange: one sum over tensor-parallel ranks; a forward has two.
        exposed: sums in its backward that products do not hide.
        launches, launches_backward: the host's time to launch a forward and a backward.
        head: forward of the output matrix, on the last stage.
        loss: forward and backward of the loss.
    """

    products: float
    attention: float
    elements: float
    attention_backward: float
    exchange: float
    exposed: float
    launches: float
    launches_backward: float
    head: float
    loss: float


def network_name(cluster: Cluster) -> str:
    """Return the name of a cluster's network in the calibration: InfiniBand, RoCE (Ethernet) or EFA."""
    name = cluster.nic.name if cluster.nic else ""
    return "roce" if "ethernet" in name else "efa" if "efa" in name else "infiniband"


def attained(cluster: Cluster) -> Cluster:
    """Return the cluster with attained link bandwidths and latencies."""
    c = cluster_calibration(cluster).tables
    generation, network = GENERATIONS.index(cluster.accelerator.generation), NETWORKS.index(network_name(cluster))
    inside, nic = cluster.inside, cluster.nic
    if inside:
        latency = c["latency_inside"][generation] if not cluster.torus else inside.latency
        inside = inside.model_copy(
            update={"bandwidth": inside.bandwidth * c["inside"][generation], "latency": latency}
        )
    if nic:
        part, latency = c["outside"][network], c["latency_outside"][network]
        nic = nic.model_copy(update={"bandwidth": nic.bandwidth * part, "latency": latency})
    return replace(cluster, inside=inside, nic=nic, thin=c["thin"][network])


def memory_rate(cluster: Cluster) -> float:
    """Return the attained memory bandwidth of kernels in bytes/s."""
    attains = cluster_calibration(cluster).tables["hbm"]
    return cluster.accelerator.memory_bandwidth * attains[GENERATIONS.index(cluster.accelerator.generation)]


def product_rate(cluster: Cluster, kind: str) -> float:
    """Return the FLOP/s that a large product attains in 16 or 32 bits, for a format of the accelerator's peaks."""
    machine = cluster.accelerator
    part = cluster_calibration(cluster).tables["product"][GENERATIONS.index(machine.generation)]
    return machine.dense_flops(kind) * min(part, machine.matmul_efficiency)


def layer_times(run: EstimatedRun, shape: ModelShape, s: int) -> LayerTimes:
    """Return the times of a layer of a run.

    Args:
        shape: the run's, with the width of the layer's feed-forward block; experts are ignored.
        s: tokens of a sequence that pass through the layer.
    """
    cluster, layout, itemsize = run.cluster, run.layout, run.policy.compute.itemsize
    machine, wide, kind = cluster.accelerator, itemsize / E, KINDS[run.policy.compute.name]
    ring = layout.cp > 1
    unfused = run.attention == "explicit" and not ring  # never in a ring
    share = cluster.nics * cluster.nic.bandwidth / cluster.per_node / wide if cluster.nic else inf
    runs = Runs.from_rows([{
        "layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "ffn": shape.ffn, "vocab": shape.vocab, "gated": shape.family == "llama",
        "s": s, "b": layout.micro_batch, "microbatches": 1, "tp": layout.tp, "tp_x": layout.tp_x, "cp": layout.cp,
        "sequence_parallel": layout.sequence_parallel, "recompute": RECOMPUTE.index(layout.recompute),
        "overlap_tensor": 1, "attention": ATTENTION.index("unfused" if unfused else "flash-2"),
        "peak": machine.dense_flops(kind), "attainable": machine.matmul_efficiency,
        "fp8": run.eight_bits, "peak8": machine.dense_flops("fp8") if run.eight_bits else 0.0,
        "hbm": machine.memory_bandwidth / wide, "memory": cluster.memory_bytes,
        "inside": cluster.inside.bandwidth / wide if cluster.inside else inf, "nic": share,
        "per_node": cluster.per_node, "generation": GENERATIONS.index(machine.generation),
        "through_memory": cluster.at_once is not None, "network": NETWORKS.index(network_name(cluster)),
        "software": list(software_table()).index("shoal"),
    }])  # fmt: skip
    calibration = cluster_calibration(cluster)
    c, k = calibration.numbers, Kernels(runs, calibration)
    longer = 2 - 1 / layout.cp_ring if layout.cp_order == "contiguous" else 1.0  # on the last place of an uneven ring
    masked = run.document_mask and not run.by_lengths
    if masked and not unfused and not ring:  # a kernel that reads a mask does not skip the causal half
        longer = 2 * longer
    attention, attention_backward = k.attention[0] * longer, k.attention[1] * longer
    hidden = np.minimum(2 * k.exchange * c["hide_tensor"], k.products)
    exposed = 2 * k.exchange - hidden
    launches_again = {"none": 0.0, "selective": c["launch_selective"], "full": 1.0}[layout.recompute]
    launches_backward = k.launches * (c["launch_backward"] + launches_again)
    head = k.product(runs.tokens, runs.hidden, runs.vocab / runs.tp, k.rate)
    loss = 4 * k.constant("passes_loss", "software") * runs.tokens * runs.vocab / runs.tp / (k.hbm * wide)
    found = (
        k.products, attention, k.elements, attention_backward, k.exchange, exposed, k.launches, launches_backward, head,
        loss,
    )  # fmt: skip
    return LayerTimes(*(float(seconds[0]) for seconds in found))


def spread(cluster: Cluster, kind: str = "time") -> float:
    """Return half of the 80 % interval of an estimate's logarithm."""
    c = cluster_calibration(cluster).tables
    scale = "node" if cluster.nodes == 1 else "small" if cluster.size <= 128 else "large"
    width = c[f"spread_{kind}"][list(software_table()).index("shoal")]
    return width * c["spread_scale"][SPREADS.index(scale)] if kind == "time" else width
