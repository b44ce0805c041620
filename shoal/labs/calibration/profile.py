"""Turn measurements of this machine into a catalog: an accelerator, a link and a node with its own constants.

The constants of the cost model (`catalog/calibration.toml`) are fitted one group after another, with the earlier ones
fixed: first constants of matrix products, then of attention, then of layers and of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2
from typing import Any

import numpy as np
from scipy.optimize import nnls

from shoal.labs.calibration import measure
from shoal.labs.calibration.measure import CoreMeasurements, build_model_shape
from shoal.planning.cost.batched_runs import E, Runs
from shoal.planning.cost.time.kernels import Kernels
from shoal.spec.catalog.calibration import calibration

NAME = "here"  # the machine's name in its profile
WIDE = 4 / E  # bytes of a number in fp32, over those that the kernels' formulas assume
BACKWARD = 3.5  # forward and backward of attention over its forward: five more products for two
PASSES = {"passes_hidden": 10.0, "passes_ffn": 3.0, "passes_heads": 3.0}  # expected values, to be scaled
MOST_SHORT = 512  # upper bound of `short_sequence`, tokens
MOST_FASTER = 10.0  # infinitely large products, attention and messages attain at most this times the best measured
NOISE = 0.03  # relative error of one measurement
SHARE = 0.1  # relative error of counting a third of the products and passes for the forward
SURE = {"products": 0.1, "passes": 1.0}
"""One standard deviation of layers from separate products, and of passes from `PASSES`, relative."""


def build_profile(found: CoreMeasurements, memory: float, source: str) -> dict[str, Any]:
    """Return the tables of a catalog file, with the bytes that the ranks share and the source of every entry."""
    peaks, constants = fit_products(found)
    bandwidth = 2 * 4 * measure.COPIED / found.copy
    constants |= {"hbm": 1.0, "hide_data": 0.0, "hide_tensor": 0.0, "inside": 1.0, "contention": 1.0,
                  "collective_launch": 0.0, "wait": 0.0, "launch_exchange": 0.0, "hop": 0.0}  # fmt: skip
    constants["accumulate"] = 0.0  # included in the measured models
    constants["stragglers"] = found.waits / max(1.0, log2(found.cores))
    constants["update_slow"] = found.update * bandwidth / (32 * measure.UPDATED)  # 16 bytes of states, 16 of the rest
    constants |= fit_attention(found, peaks["fp32"])
    slower, layer_constants = fit_layers(found, peaks["fp32"], bandwidth, constants)
    peaks = {kind: float(f"{peak / slower:.4g}") for kind, peak in peaks.items()}
    constants["flash_2"] *= slower
    layer_constants["short_m"] += constants["short_m"]
    constants |= layer_constants
    constants["launch_selective"] = fit_recompute(found, peaks["fp32"], bandwidth, constants)
    latency, rate = fit_link(found)
    ring_latency, attained, launched = fit_split(found, peaks["fp32"], bandwidth, rate, constants)
    constants |= {"latency_inside": max(latency, ring_latency), "inside": attained, "launch_exchange": launched}
    return {
        "accelerators": {NAME: {
            "peak_flops": peaks, "memory_bytes": memory, "memory_bandwidth": bandwidth, "matmul_efficiency": 1.0,
            "source": source,
        }},
        "links": {NAME: {"bandwidth": rate, "latency": latency, "source": source}},
        "nodes": {NAME: {
            "accelerator": NAME, "inside": NAME, "per_node": max(64, found.usable), "at_once": found.usable,
            "reference": float(f"{found.models[measure.REFERENCE]:.4g}"), "source": source,
            "constants": {key: float(f"{value:.4g}") for key, value in constants.items()},
        }},
    }  # fmt: skip


def fit_products(found: CoreMeasurements) -> tuple[dict[str, float], dict[str, float]]:
    """Return the FLOP/s of infinitely large products by format, and the constants of short ones, in fp32."""
    peaks, short = {}, (0.0, 0.0)
    for precision in measure.DTYPES:
        sizes = [(m, k, n, seconds) for (p, m, k, n), seconds in found.products.items() if p == precision]
        m, k, n, seconds = np.array(sizes, float).T
        flops = 2 * m * k * n
        # seconds / flops = (1 + a / m + b (1/k + 1/n)) / rate, all products weighted equally
        design = np.stack([np.ones_like(m), 1 / m, 1 / k + 1 / n], axis=1) * (flops / seconds)[:, None]
        full, rows, columns = solve(design, np.ones_like(m))
        full = max(full, min(seconds / flops) / MOST_FASTER)
        peaks[precision] = float(f"{1 / full:.4g}")
        if precision == "fp32":
            short = rows / full, columns / full
    return peaks, {"product": 1.0, "short_m": short[0], "short_k": short[1]}


def fit_attention(found: CoreMeasurements, peak: float) -> dict[str, float]:
    """Return the constants of causal attention: its part of the products' rate, by head dim and sequence length."""
    heads, s, d = np.array(measure.ATTENTION, float).T
    seconds = np.array([found.attention[key] for key in measure.ATTENTION]) / BACKWARD
    flops = 4 * 1024 * s * heads * d / 2

    def with_short(short: float) -> tuple[float, float, float]:
        # seconds peak / flops = (1 + narrow / d) (1 + short / s) / part
        design = np.stack([np.ones_like(d), 1 / d], axis=1) * ((1 + short / s) * flops / (seconds * peak))[:, None]
        full, narrow = solve(design, np.ones_like(d))
        full = max(full, min(seconds * peak / flops) / MOST_FASTER)
        return float(np.linalg.norm(design @ [full, narrow] - 1)), full, narrow

    short = min(range(0, MOST_SHORT, 4), key=with_short)
    _, full, narrow = with_short(short)
    return {"flash_2": 1 / full, "narrow_head": narrow / full, "short_sequence": float(short)}


def fit_layers(
    found: CoreMeasurements, peak: float, bandwidth: float, constants: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the slowdown of products inside a model, and the constants of layers, of the loss and of a micro-batch;
    `short_m` is to be added to that of products."""
    k = _kernels(found.models, peak, bandwidth, {**constants, **PASSES})
    depth, one, none = k.runs.layers, np.ones(len(found.models)), np.zeros(len(found.models))
    seconds, forwards = (np.array(list(of.values())) for of in (found.models, found.forwards))
    products = depth * k.products + k.output
    logits = 4 * k.runs.tokens * k.runs.vocab / (k.hbm * WIDE)
    # Seconds of a forward - attention = slower x products (1 + short / m) + scale x passes + launches + loss + rest.
    # Forward and backward have three times the first two, the loss, and their own launches and rest.
    both = [3 * products, 3 * products / k.runs.tokens, 3 * depth * k.elements, logits, depth, depth, one, one]
    forward = [products, products / k.runs.tokens, depth * k.elements, logits / 3, depth, none, one, none]
    weights = np.append(1 / (NOISE * seconds), 1 / (SHARE * forwards))
    design = np.hstack([both, forward]).T * weights[:, None]
    wanted = np.append(seconds - depth * BACKWARD * k.attention[0], forwards - depth * k.attention[0]) * weights
    expected = np.zeros((2, len(both)))
    expected[0, 0], expected[1, 2] = 1 / SURE["products"], 1 / SURE["passes"]
    slower, short, scale, loss, launch, launch_backward, *besides = solve(
        np.vstack([design, expected]), np.append(wanted, expected.sum(axis=1))
    )
    slower, launch = max(slower, 1 / MOST_FASTER), max(launch, 1e-9)  # divisors
    return slower, {
        **{name: scale * value for name, value in PASSES.items()},
        "short_m": short / slower, "launch": launch, "launch_backward": launch_backward / launch, "passes_loss": loss,
        "micro_batch": sum(besides),
    }


def fit_recompute(
    found: CoreMeasurements, peak: float, bandwidth: float, constants: Mapping[str, float]
) -> float:
    """Return the launches of a backward that recomputes attention's core, relative to a layer's launches."""
    k = _kernels(found.again, peak, bandwidth, constants)
    more = np.array([seconds - found.models[size] for size, seconds in found.again.items()]) / k.runs.layers
    return max(0.0, float(np.median((more - k.attention[0]) / k.launches)))


def fit_split(
    found: CoreMeasurements, peak: float, bandwidth: float, rate: float, constants: Mapping[str, float]
) -> tuple[float, float, float]:
    """Fit collectives inside a model, which autograd calls with cold caches.

    Tensor-parallel times are compared with formulas that are scaled to be right for two copies; ZeRO-3 with the copies.

    Args:
        rate: bytes/s between ranks of consecutive collectives.

    Returns:
        The latency of a step of a ring [s], the attained part of the rate, and the additional launches of tensor
        parallelism, relative to a layer's launches.
    """
    if not found.split:
        return 0.0, 1.0, 0.0
    sizes = [(layers, hidden, tokens) for way, layers, hidden, tokens in found.split if way == "copies"]
    lateness = {way: 1 + constants["stragglers"] * (way != "copies") for way in measure.SPLIT}
    seconds = {way: np.array([found.split[way, *size] for size in sizes]) / lateness[way] for way in measure.SPLIT}
    weights = {way: 1 / (NOISE * times) for way, times in seconds.items()}
    off = seconds["copies"] / _both(_kernels(sizes, peak, bandwidth, constants))

    def tensor(way: str, share: float = 1.0, **more: float) -> np.ndarray:
        extra = {"latency_inside": 0.0, "launch_exchange": 0.0, **more}
        between = {"tp": 2, "inside": share * rate / WIDE, "per_node": 2, "through_memory": 1}
        split = {**between, "sequence_parallel": way == "sequence"}
        return off * _both(_kernels(sizes, peak, bandwidth, {**constants, **extra}, **split))

    design, wanted = [], []
    for way in ("tp", "sequence"):
        alone = tensor(way)
        changed = tensor(way, latency_inside=1.0), tensor(way, share=0.5), tensor(way, launch_exchange=1.0)
        design.append((np.stack(changed) - alone) * weights[way])
        wanted.append((seconds[way] - alone) * weights[way])
    # Each layer, the embedding and the head take two gathers and a reduction; a rank has half of each.
    units, elements = np.array([
        (layers + 2, build_model_shape(layers, hidden).parameters()) for layers, hidden, _ in sizes
    ]).T  # fmt: skip
    moved = 3 * 4 * elements / 2 / rate
    design.append(np.stack([3 * 2 * units, moved, 0 * units]) * weights["zero 3"])
    wanted.append((seconds["zero 3"] - seconds["copies"] - moved) * weights["zero 3"])
    latency, slower, launches = solve(np.hstack(design).T, np.concatenate(wanted))
    return float(latency), float(1 / (1 + slower)), float(launches)


def _both(k: Kernels) -> np.ndarray:
    """Return the seconds of forward and backward of models."""
    r, c = k.runs, k.constants
    layer = 3 * (k.products + k.elements) + BACKWARD * k.attention[0] + (1 + c["launch_backward"]) * k.launches
    loss = 4 * k.constant("passes_loss") * r.tokens * r.vocab / r.tp / (k.hbm * WIDE)
    return r.layers * (layer + 4 * k.exchange) + 2 * k.exchange + 3 * k.output + loss + c["micro_batch"]


def _kernels(
    sizes: Iterable[tuple[int, ...]], peak: float, bandwidth: float, constants: Mapping[str, float], **split: float
) -> Kernels:
    """Build the kernels of models.

    Args:
        sizes: layers, hidden and tokens of each model.
        split: fields of `Runs`: how the models are split, and the network.
    """
    rows = []
    for depth, hidden, tokens in sizes:
        shape = build_model_shape(depth, hidden)
        rows.append({
            "layers": depth, "hidden": hidden, "heads": shape.heads, "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim, "ffn": shape.ffn, "vocab": shape.vocab, "s": 128, "b": tokens / 128,
            "microbatches": 1, "peak": peak, "hbm": bandwidth / WIDE, "memory": 1.0, **split,
        })  # fmt: skip
    return Kernels(Runs.from_rows(rows), calibration().measured(constants))


def fit_link(found: CoreMeasurements) -> tuple[float, float]:
    """Return the latency of a step of a ring [s] and the bytes/s of its links, from all-reduces."""
    n, size = np.array(list(found.reduces), float).T
    seconds = np.array(list(found.reduces.values()))
    turns = np.maximum(1.0, n / found.usable)  # ranks that share a core take turns
    steps = np.array([min(ranks - 1, (ranks - 1).bit_length()) for ranks, _ in found.reduces], float)
    design = np.stack([2 * steps, 2 * (n - 1) / n * size], axis=1) * turns[:, None] / seconds[:, None]
    latency, per_byte = solve(design, np.ones_like(n))
    per_byte = max(per_byte, min(seconds / size) / MOST_FASTER)
    return float(f"{latency:.4g}"), float(f"{1 / per_byte:.4g}")


def solve(design: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Solve non-negative least squares with normalised columns.

    >>> solve(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([1.5, 2.0, 2.5])).round(9).tolist()
    [1.0, 0.5]
    >>> solve(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0])).round(9).tolist()
    [1.5, 0.0]
    """
    scale = np.maximum(np.linalg.norm(design, axis=0), np.finfo(float).tiny)  # their units differ
    return nnls(design / scale, wanted)[0] / scale
