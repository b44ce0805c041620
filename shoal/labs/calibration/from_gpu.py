"""Turn the measurements of `shoal bench gpu` into a catalog file of that GPU.

Constants that no part measures, such as the loss of small products and the network's, keep the values of the GPU's
generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from shoal.base.errors import UsageError
from shoal.base.files import write_atomically
from shoal.base.section import plain
from shoal.labs.bench.gpu.item import PartRun, read_run
from shoal.labs.calibration.profile import NAME
from shoal.spec.catalog.accelerators import Accelerator, match
from shoal.spec.catalog.calibration import GENERATIONS, calibration
from shoal.spec.catalog.clusters import nodes

HOST_BOUND = 20.0
"""Percent of a step without a running kernel from which its time is that of its launches."""

WAYS = ("forward", "input gradient", "weight gradient")


def write_gpu_catalog(folder: Path, out: Path) -> str:
    """Fit the constants of a GPU to parts 1 and 4 of its benchmark, and write a catalog file.

    Returns:
        The constants in one line.

    Raises:
        UsageError: the folder has no readable run of part 1, or one of a rehearsal or of a GPU that the catalog lacks.
    """
    first, speed = (read_run(folder / f"part-{part}.jsonl") for part in (1, 4))
    if first is None:
        raise UsageError(
            f"--from-gpu {folder}: it has no readable run in part-1.jsonl."
            f"\n  Run shoal bench gpu --part 1 --out {folder}"
        )
    if any(run and run.header["rehearsal"] for run in (first, speed)):
        raise UsageError(f"--from-gpu {folder}: it is a rehearsal on the CPU, whose times are no GPU's.")
    gpu = match(device := str(first.header.get("device")))
    node = next((node for node in nodes().values() if gpu and node.accelerator == gpu.name), None)
    if gpu is None or node is None:
        raise UsageError(f"--from-gpu {folder}: the catalog has no node with the GPU '{device}'.")
    constants = {key: float(f"{value:.4g}") for key, value in fit_constants(gpu, first, speed).items()}
    source = f"shoal bench gpu, {first.header['date'][:10]}, {device}, torch {first.header['versions']['torch']}"
    efficiency = min(1.0, constants.pop("square", gpu.matmul_efficiency))
    tables = {
        "accelerators": {NAME: {
            **plain(gpu.model_copy(update={"matmul_efficiency": efficiency, "source": source, "devices": ()})),
        }},
        "nodes": {NAME: {**plain(node), "accelerator": NAME, "constants": constants, "source": source}},
    }  # fmt: skip
    for table in tables.values():
        del table[NAME]["name"]
    write_atomically(out, tomli_w.dumps(tables))
    return ", ".join(f"{name} {value:g}" for name, value in {"matmul_efficiency": efficiency, **constants}.items())


def fit_constants(gpu: Accelerator, first: PartRun, speed: PartRun | None) -> dict[str, float]:
    """Return the constants that the parts determine, and "square", the share of the peak of a square product."""
    column = GENERATIONS.index(gpu.generation)
    known = {name: values[column] for name, values in calibration().tables.items() if len(values) == len(GENERATIONS)}
    known |= calibration().numbers
    found: dict[str, list[float]] = {}
    for row in _rows(first, "products", "bf16"):
        rates = [1e12 * row[f"{way} TFLOP/s"] / gpu.dense_flops("bf16") for way in WAYS]
        if row["product"] == "square":
            found["square"] = [max(rates)]
        else:
            found.setdefault("product", []).append(len(WAYS) / sum(1 / rate for rate in rates) * _penalty(row, known))
    for row in _rows(first, "8-bit products", "tensor"):
        if row["fast accumulation"] and row["product"] != "square":
            rate = 1e12 * row["TFLOP/s"] / gpu.dense_flops("fp8")
            found.setdefault("product_fp8", []).append(rate * _penalty(row, known))
    for row in _rows(first, "memory", "copies"):
        if row["transfer"] == "copy in device memory":
            found["hbm"] = [1e9 * row["GB/s"] / gpu.memory_bandwidth]
    fastest: dict[int, float] = {}
    for row in (row for kernel in ("flash", "cudnn") for row in _rows(first, "attention", kernel)):
        d, s = int(row["heads"].rpartition(" ")[2]), row["sequence"]
        part = 1e12 * row["forward TFLOP/s"] / gpu.dense_flops("bf16")
        part *= (1 + known["narrow_head"] / d) * (1 + known["short_sequence"] / s)
        fastest[s] = max(fastest.get(s, 0.0), part)
    if fastest:
        found["flash_2"] = [*fastest.values()]
    for row in speed.rows if speed else ():
        if row["item"].endswith("eager") and row.get("host-bound %", 0.0) > HOST_BOUND:
            layers = row["more"]["layers"] * row["more"]["microbatches"]
            found.setdefault("launch", []).append(1e-3 * row["step ms"] / layers / (1 + known["launch_backward"]))
    return {name: median(values) for name, values in found.items()}


def _penalty(row: dict[str, Any], known: dict[str, float]) -> float:
    """Return how much longer the cost model expects a product to take than a large one of as many FLOPs."""
    return 1 + known["short_m"] / row["m"] + known["short_k"] * (1 / row["k"] + 1 / row["n"])


def _rows(run: PartRun, table: str, item: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an item that have results."""
    for row in run.rows:
        if (row["table"], row["item"], row["result"]) == (table, item, ""):
            yield row
