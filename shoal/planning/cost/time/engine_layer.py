"""Calibrated times of one layer in shoal's own engine, and attained rates of the cluster."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import NamedTuple

import numpy as np

from shoal.planning.cost.batched_runs import E, Runs, describe_row, network_name
from shoal.planning.cost.time.communication import CommunicationGroup, ring_group
from shoal.planning.cost.time.kernels import Kernels
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import Cluster


class LayerTimes(NamedTuple):
    """Seconds of one layer of one micro-batch on one rank."""

    # products, attention, elements: parts of its forward
    products: float
    attention: float
    elements: float
    exchange: float  # one sum over tensor-parallel ranks; a forward has two
    # exposed, exposed_gathers: exchanges in its backward that products do not hide, and gathers of blocks' inputs
    exposed: float
    exposed_gathers: float
    # launches, launches_backward: the host's time to launch a forward and a backward
    launches: float
    launches_backward: float
    head: float  # forward of the output matrix, on the last stage
    loss: float  # forward and backward of the loss


def attained(cluster: Cluster) -> Cluster:
    """Return the cluster with attained link bandwidths and latencies."""
    c, network, generation = cluster_calibration(cluster), network_name(cluster), cluster.accelerator.generation
    inside, nic = cluster.inside, cluster.nic
    if inside:
        latency = c.at("latency_inside", generation=generation) if not cluster.torus else inside.latency
        wide = inside.bandwidth * c.at("inside", generation=generation)
        inside = inside.model_copy(update={"bandwidth": wide, "latency": latency})
    if nic:
        part, latency = c.at("outside", network=network), c.at("latency_outside", network=network)
        nic = nic.model_copy(update={"bandwidth": nic.bandwidth * part, "latency": latency})
    return replace(cluster, inside=inside, nic=nic, thin=c.at("thin", network=network), all_to_all=c.at("all_to_all"))


def attained_group(cluster: Cluster, ranks: int, stride: int = 1) -> CommunicationGroup[float]:
    """Return a group at attained links, whose collectives also take the time to launch and to wait for the last rank.

    As `Kernels.group` prices them; a message to the next rank has a constant of its own ("hop").
    """
    ring, c = ring_group(attained(cluster), ranks, stride), cluster_calibration(cluster).numbers
    meeting = c["collective_launch"] + c["wait"] * log2(ranks) if ranks > 1 else 0.0
    return replace(
        ring, gather_latency=ring.gather_latency + meeting, sum_latency=ring.sum_latency + meeting,
        exchange_latency=ring.exchange_latency + meeting,
    )


def memory_rate(cluster: Cluster, software: str = "other") -> float:
    """Return the memory bandwidth in bytes/s that kernels attain, of a software with constants of its own."""
    machine = cluster.accelerator
    return machine.memory_bandwidth * cluster_calibration(cluster, software).at("hbm", generation=machine.generation)


def product_rate(cluster: Cluster, kind: str) -> float:
    """Return the FLOP/s that a large product attains in 16 or 32 bits, for a format of the accelerator's peaks."""
    machine = cluster.accelerator
    part = cluster_calibration(cluster).at("product", generation=machine.generation)
    return machine.dense_flops(kind) * min(part, machine.matmul_efficiency)


def layer_times(run: EstimatedRun, shape: ModelShape, s: int, gathers: float) -> LayerTimes:
    """Return the times of a layer of a run.

    Args:
        shape: the run's, with the width of the layer's feed-forward block; experts are ignored.
        s: tokens of a sequence that pass through the layer.
        gathers: how often its backward gathers the input of a block; its codes count in part.
    """
    cluster, layout = run.cluster, run.layout
    wide, ring = run.policy.compute.itemsize / E, layout.cp > 1
    unfused = run.attention == "explicit" and not ring  # never in a ring
    runs = Runs.from_rows([
        describe_row(run) | {"ffn": shape.ffn, "dense": 1, "routed": 0, "s": s, "microbatches": 1}
    ])
    calibration = cluster_calibration(cluster, run.software.name)
    c, k = calibration.numbers, Kernels(runs, calibration)
    longer = 2 - 1 / layout.cp_ring if layout.cp_order == "contiguous" else 1.0  # on the last place of an uneven ring
    masked = run.document_mask and not run.by_lengths
    if masked and not unfused and not ring:  # a kernel that reads a mask does not skip the causal half
        longer = 2 * longer
    exchanged = 2 * k.exchange + gathers * k.gather
    hidden = np.minimum(exchanged * c["hide_tensor"], k.products) / np.maximum(exchanged, 1e-30)
    exposed, exposed_gathers = 2 * k.exchange * (1 - hidden), gathers * k.gather * (1 - hidden)
    launches_again = {"none": 0.0, "selective": c["launch_selective"], "full": 1.0}[layout.recompute]
    launches_backward = k.launches * (c["launch_backward"] + launches_again)
    loss = 4 * k.constant("passes_loss") * runs.tokens * runs.vocab / runs.tp / (k.hbm * wide)
    found = (
        k.products, k.attention[0] * longer, k.elements, k.exchange, exposed, exposed_gathers, k.launches,
        launches_backward, k.output, loss,
    )  # fmt: skip
    return LayerTimes(*(float(seconds[0]) for seconds in found))
