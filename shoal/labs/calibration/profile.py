"""A catalog of this machine: what was measured, as an accelerator, a link and a node with constants of its own.

Each constant of the cost model (`catalog/calibration.toml`) is solved from the times that it decides, those before it
held: products give a rate and how short sides slow it down, then attention, then layers what is left of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log2
from typing import Any

import numpy as np
from scipy.optimize import nnls

from shoal.labs.calibration.measure import (
    ATTENTION,
    COPIED,
    DTYPES,
    REFERENCE,
    SPLIT,
    UPDATED,
    CoreMeasurements,
    model_shape_of,
)  # fmt: skip
from shoal.planning.cost.batched_runs import Runs
from shoal.planning.cost.time.kernels import E, Kernels
from shoal.spec.catalog.calibration import calibration

WIDE = 4 / E  # numbers in fp32, over those that the kernels' formulas count
BACKWARD = 3.5  # of attention, both ways: five products for two
PASSES = {"passes_hidden": 10.0, "passes_ffn": 3.0, "passes_heads": 3.0}  # what one expects of them, to be scaled
MOST_SHORT = 512  # tokens, that attention may seem to have besides those of a sequence
NOISE = 0.03  # of one measurement
SHARE = 0.1  # how far off it is that a forward has a third of the products and passes, relative
SURE = {"products": 0.1, "passes": 1.0}
"""How far layers may be from products by themselves, and from `PASSES`: one standard deviation, relative."""


def profile(found: CoreMeasurements, name: str, memory: float, source: str) -> dict[str, Any]:
    """The tables of a catalog file.

    Args:
        name: of the machine in them.
        memory: bytes that its ranks share.
        source: said of every entry.
    """
    peaks, constants = rates(found)
    bandwidth = 2 * 4 * COPIED / found.copy
    constants |= {"sharp": 1.0, "hbm": 1.0, "hide_data": 0.0, "hide_tensor": 0.0, "inside": 1.0, "contention": 1.0,
                  "collective_launch": 0.0, "wait": 0.0, "launch_exchange": 0.0, "hop": 0.0}  # fmt: skip
    constants["accumulate"] = 0.0  # the models that are measured add their gradients up, too
    constants["stragglers"] = found.waits / max(1.0, log2(found.cores))
    constants["update_slow"] = found.update * bandwidth / (32 * UPDATED)  # 16 bytes of states, 16 of the rest
    constants |= attention(found, peaks["fp32"])
    slower, of_layers = layers(found, peaks["fp32"], bandwidth, constants)
    peaks = {kind: float(f"{peak / slower:.4g}") for kind, peak in peaks.items()}
    constants["flash_2"] *= slower
    of_layers["short_m"] += constants["short_m"]
    constants |= of_layers
    constants["launch_selective"] = again(found, peaks["fp32"], bandwidth, constants)
    latency, rate = links(found)
    later, attained, launched = among_passes(found, peaks["fp32"], bandwidth, rate, constants)
    constants |= {"latency_inside": max(latency, later), "inside": attained, "launch_exchange": launched}
    return {
        "accelerators": {name: {
            "peak_flops": peaks, "memory_bytes": memory, "memory_bandwidth": bandwidth, "matmul_efficiency": 1.0,
            "source": source,
        }},
        "links": {name: {"bandwidth": rate, "latency": latency, "source": source}},
        "nodes": {name: {
            "accelerator": name, "inside": name, "per_node": max(64, found.usable), "at_once": found.usable,
            "reference": float(f"{found.models[REFERENCE]:.4g}"), "source": source,
            "constants": {key: float(f"{value:.4g}") for key, value in constants.items()},
        }},
    }  # fmt: skip


def rates(found: CoreMeasurements) -> tuple[dict[str, float], dict[str, float]]:
    """FLOP/s of endless products by format; by how many rows and columns short ones are slowed, in fp32."""
    peaks, short = {}, (0.0, 0.0)
    for precision in DTYPES:
        sizes = [(m, k, n, seconds) for (p, m, k, n), seconds in found.products.items() if p == precision]
        m, k, n, seconds = np.array(sizes, float).T
        flops = 2 * m * k * n
        # seconds / flops = (1 + a / m + b (1/k + 1/n)) / rate, each product as important as the others
        design = np.stack([np.ones_like(m), 1 / m, 1 / k + 1 / n], axis=1) * (flops / seconds)[:, None]
        whole, rows, columns = fit(design, np.ones_like(m))
        peaks[precision] = float(f"{1 / whole:.4g}")
        if precision == "fp32":
            short = rows / whole, columns / whole
    return peaks, {"product": 1.0, "short_m": short[0], "short_k": short[1]}


def attention(found: CoreMeasurements, peak: float) -> dict[str, float]:
    """What part of the rate of products causal attention attains, by the width of heads and the length of sequences."""
    heads, s, d = np.array(ATTENTION, float).T
    seconds = np.array([found.attention[key] for key in ATTENTION]) / BACKWARD
    flops = 4 * 1024 * s * heads * d / 2

    def with_short(short: float) -> tuple[float, float, float]:
        # seconds peak / flops = (1 + narrow / d) (1 + short / s) / part
        design = np.stack([np.ones_like(d), 1 / d], axis=1) * ((1 + short / s) * flops / (seconds * peak))[:, None]
        whole, narrow = fit(design, np.ones_like(d))
        return float(np.linalg.norm(design @ [whole, narrow] - 1)), whole, narrow

    short = min(range(0, MOST_SHORT, 4), key=with_short)
    _, whole, narrow = with_short(short)
    return {"flash_2": 1 / whole, "narrow_head": narrow / whole, "short_sequence": float(short)}


def layers(
    found: CoreMeasurements, peak: float, bandwidth: float, constants: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """How much longer products take in a model; and what that adds to `short_m`, passes over memory and launches of a
    layer, passes of the loss, and what a micro-batch takes besides."""
    k = _kernels(found.models, peak, bandwidth, {**constants, **PASSES})
    depth, one, none = k.runs.layers, np.ones(len(found.models)), np.zeros(len(found.models))
    seconds, forwards = (np.array(list(of.values())) for of in (found.models, found.forwards))
    products = depth * k.products + k.product(k.runs.tokens, k.runs.hidden, k.runs.vocab, k.rate)
    logits = 4 * k.runs.tokens * k.runs.vocab / (k.hbm * WIDE)
    # A forward's seconds - attention = slower x products (1 + short / m) + scale x passes + launches + the loss + the
    # rest; of both ways three times the first two, the loss, and launches and a rest of their own.
    both = [3 * products, 3 * products / k.runs.tokens, 3 * depth * k.elements, logits, depth, depth, one, one]
    forward = [products, products / k.runs.tokens, depth * k.elements, logits / 3, depth, none, one, none]
    weights = np.append(1 / (NOISE * seconds), 1 / (SHARE * forwards))
    design = np.hstack([both, forward]).T * weights[:, None]
    wanted = np.append(seconds - depth * BACKWARD * k.attention[0], forwards - depth * k.attention[0]) * weights
    expected = np.zeros((2, len(both)))
    expected[0, 0], expected[1, 2] = 1 / SURE["products"], 1 / SURE["passes"]
    slower, short, scale, loss, launch, launch_backward, *besides = fit(
        np.vstack([design, expected]), np.append(wanted, expected.sum(axis=1))
    )
    launch = max(launch, 1e-9)  # that of a backward is so many times as long
    return slower, {
        **{name: scale * value for name, value in PASSES.items()},
        "short_m": short / slower, "launch": launch, "launch_backward": launch_backward / launch, "passes_loss": loss,
        "micro_batch": sum(besides),
    }


def again(found: CoreMeasurements, peak: float, bandwidth: float, constants: Mapping[str, float]) -> float:
    """What a backward that computes attention's core again launches for it, of a layer's launches."""
    k = _kernels(found.again, peak, bandwidth, constants)
    more = np.array([seconds - found.models[size] for size, seconds in found.again.items()]) / k.runs.layers
    return max(0.0, float(np.median((more - k.attention[0]) / k.launches)))


def among_passes(
    found: CoreMeasurements, peak: float, bandwidth: float, rate: float, constants: Mapping[str, float]
) -> tuple[float, float, float]:
    """Of collectives among the passes of a model, which autograd calls, and whose code and data are in no cache: the
    latency of a step of a ring [s], what part of the rate in a row they attain, and what tensor parallelism launches
    besides, of a layer's launches.

    What two ranks need for half of a model each is compared with what they should, were they off as far as those that
    have a copy each; ZeRO-3 with these.

    Args:
        rate: bytes/s between ranks of collectives in a row.
    """
    if not found.split:
        return 0.0, 1.0, 0.0
    sizes = [(layers, hidden, tokens) for way, layers, hidden, tokens in found.split if way == "copies"]
    late = {way: 1 + constants["stragglers"] * (way != "copies") for way in SPLIT}
    seconds = {way: np.array([found.split[way, *size] for size in sizes]) / late[way] for way in SPLIT}
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
        more = tensor(way, latency_inside=1.0), tensor(way, share=0.5), tensor(way, launch_exchange=1.0)
        design.append((np.stack(more) - alone) * weights[way])
        wanted.append((seconds[way] - alone) * weights[way])
    # Two gathers and a reduction of each layer, of the embedding and of the head; a rank has half of each.
    units, elements = np.array([
        (layers + 2, model_shape_of(layers, hidden).parameters()) for layers, hidden, _ in sizes
    ]).T  # fmt: skip
    moved = 3 * 4 * elements / 2 / rate
    design.append(np.stack([3 * 2 * units, moved, 0 * units]) * weights["zero 3"])
    wanted.append((seconds["zero 3"] - seconds["copies"] - moved) * weights["zero 3"])
    latency, slower, launches = fit(np.hstack(design).T, np.concatenate(wanted))
    return float(latency), float(1 / (1 + slower)), float(launches)


def _both(k: Kernels) -> np.ndarray:
    """Seconds of a forward and a backward of whole models."""
    r, c = k.runs, k.constants
    layer = 3 * (k.products + k.elements) + BACKWARD * k.attention[0] + (1 + c["launch_backward"]) * k.launches
    head = 3 * k.product(r.tokens, r.hidden, r.vocab / r.tp, k.rate)
    loss = 4 * k.constant("passes_loss", "software") * r.tokens * r.vocab / r.tp / (k.hbm * WIDE)
    return r.layers * (layer + 4 * k.exchange) + 2 * k.exchange + head + loss + c["micro_batch"]


def _kernels(
    sizes: Iterable[tuple[int, ...]], peak: float, bandwidth: float, constants: Mapping[str, float], **split: float
) -> Kernels:
    """Of models by layers, hidden and tokens.

    Args:
        split: how each is over ranks, and what is between these.
    """
    rows = []
    for depth, hidden, tokens in sizes:
        shape = model_shape_of(depth, hidden)
        rows.append({
            "layers": depth, "hidden": hidden, "heads": shape.heads, "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim, "ffn": shape.ffn, "vocab": shape.vocab, "s": 128, "b": tokens / 128,
            "microbatches": 1, "peak": peak, "hbm": bandwidth / WIDE, "memory": 1.0, **split,
        })  # fmt: skip
    return Kernels(Runs.of(rows), calibration().measured(constants))


def links(found: CoreMeasurements) -> tuple[float, float]:
    """Latency of a step of a ring [s], and bytes/s of its links, by all-reduces."""
    n, size = np.array(list(found.reduces), float).T
    seconds = np.array(list(found.reduces.values()))
    turns = np.maximum(1.0, n / found.usable)  # who waits for a core reduces nothing
    steps = np.array([min(ranks - 1, (ranks - 1).bit_length()) for ranks, _ in found.reduces], float)
    design = np.stack([2 * steps, 2 * (n - 1) / n * size], axis=1) * turns[:, None] / seconds[:, None]
    latency, per_byte = fit(design, np.ones_like(n))
    return float(f"{latency:.4g}"), float(f"{1 / per_byte:.4g}")


def fit(design: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The factors of some columns, none negative, whose sum comes closest.

    >>> fit(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([1.5, 2.0, 2.5])).round(9).tolist()
    [1.0, 0.5]
    >>> fit(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0])).round(9).tolist()
    [1.5, 0.0]
    """
    scale = np.maximum(np.linalg.norm(design, axis=0), np.finfo(float).tiny)  # units differ: seconds beside bytes
    return nnls(design / scale, wanted)[0] / scale
