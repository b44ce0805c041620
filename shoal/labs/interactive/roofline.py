"""Roofline panel: a model's operations under the roof of an accelerator, and points measured on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import PositiveInt

import shoal
from shoal.base.errors import UsageError, did_you_mean
from shoal.labs.explain.device.roofline import measure_products
from shoal.labs.interactive.model_choice import ModelChoice, list_models
from shoal.planning.cost.roofline import OperationCost, least_rows
from shoal.planning.estimate import Estimate
from shoal.report.planning.estimate_page import attainable, operations
from shoal.spec.catalog.accelerators import accelerators
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS


class RooflineRequest(ModelChoice):
    """A forward of a model's layer on one accelerator."""

    model: str = "llama-3-8b"
    """A model in the catalog."""

    accelerator: str = "h100-sxm"
    """An accelerator of the catalog."""

    precision: str = "bf16"
    """Number formats."""

    batch: PositiveInt = 1
    """Sequences in one forward pass."""

    sequence_length: PositiveInt = 1024
    """Tokens per sequence."""


def list_choices() -> dict[str, Any]:
    """Return the accelerators with their peaks in FLOP/s and bandwidths in bytes/s, and the models."""
    return {
        "models": list_models(),
        "precisions": list(FORMATS),
        "accelerators": [
            {"name": name, "peaks": machine.peak_flops, "bandwidth": machine.memory_bandwidth}
            for name, machine in accelerators().items()
        ],
    }  # fmt: skip


def place_operations(request: RooflineRequest) -> dict[str, Any]:
    """Return the roof, and each operation of a layer on it.

    Raises:
        UsageError: an unknown name, a format that the accelerator does not multiply in, or a model that cannot be
            estimated.
    """
    if request.accelerator not in accelerators():
        given = f"accelerator {request.accelerator}"
        raise UsageError(f"{given}: not in the catalog; {did_you_mean(request.accelerator, accelerators())}")
    found = shoal.estimate(
        Layout(micro_batch=request.batch), model=request.shape(request.sequence_length), cluster=request.accelerator,
        global_batch=request.batch, sequence_length=request.sequence_length, precision=request.precision,
    )  # fmt: skip
    assert isinstance(found, Estimate), "no other software was named"
    run, machine = found.run, found.run.cluster.accelerator
    peak, bandwidth, itemsize = found.peak, machine.memory_bandwidth, run.policy.compute.itemsize
    costs = {**operations(found), "attention": attention_cost(found)}
    rates = {name: attainable(found, name, cost) for name, cost in costs.items()}
    k, n = run.shape.hidden, run.shape.ffn
    return {
        "accelerator": machine.name, "format": run.products, "peak": peak, "bandwidth": bandwidth,
        "ridge": peak / bandwidth, "tokens": found.forward.tokens,
        "least": {"tokens": least_rows(k, n, peak / bandwidth, itemsize), "k": k, "n": n},
        "operations": [
            {"name": name, "flops": cost.flops, "bytes": cost.bytes, "intensity": cost.intensity,
             "rate": rates[name], "seconds": cost.flops / rates[name]}
            for name, cost in sorted(costs.items(), key=lambda item: -item[1].flops)
        ],
    }  # fmt: skip


def attention_cost(estimate: Estimate) -> OperationCost:
    """Return the cost of a layer's causal attention in one kernel: scores stay in its registers (Dao 2023).

    Queries, keys, values and outputs pass through memory once. Of b s^2 scores for each head half are computed.
    """
    run, shape, b = estimate.run, estimate.run.shape, estimate.run.layout.micro_batch
    s, wide = run.sequence_length, shape.query_dim + shape.value_dim
    flops = b * shape.heads * s * s * wide  # two products of 2 s^2 d, halved by the causal mask
    elements = b * s * (shape.heads * wide + shape.kv_heads * wide)
    return OperationCost(flops, run.policy.compute.itemsize * elements)


def measure_points() -> dict[str, Any]:
    """Time products and a copy on one core of this machine, in a few seconds."""
    peak, bandwidth, points = measure_products()
    return {
        "peak": peak, "bandwidth": bandwidth, "ridge": peak / bandwidth,
        "points": [
            {"name": name, "intensity": point.cost.intensity, "rate": point.rate}
            for name, point in points.items()
        ],
    }  # fmt: skip


FIRST: dict[str, Any] = {
    "model": "llama-3-8b", "accelerator": "h100-sxm", "precision": "bf16", "batch": 1, "sequence_length": 1024,
}
"""Request of the panel's first picture, as its script sends it."""
BATCHES, SEQUENCES = (2, 4, 8, 16), (1, 64, 128, 256, 512, 2048, 4096, 8192)
MACHINES = ("a100-sxm-80gb", "h200-sxm", "b200-sxm", "mi300x", "tpu-v5p")


def record_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of the first picture, and of each control's moves from it."""
    yield "roofline-choices", {}
    yield "roofline", FIRST
    for name, values in (("batch", BATCHES), ("sequence_length", SEQUENCES), ("accelerator", MACHINES)):
        for value in values:
            yield "roofline", FIRST | {name: value}
