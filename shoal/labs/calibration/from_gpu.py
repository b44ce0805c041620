"""Turn the measurements of `shoal bench gpu` into a catalog file of that GPU.

Constants that no part measures keep the values of the GPU's generation: the loss of small products, the network's, and
products in 8 bits with their casts. Products and attention are timed alone here: inside the steps of an H200 products
were 4 % faster, as it is less often at its power limit, and attention 7 % slower.
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
from shoal.planning.cost.time.stage import ATTENTION_BACKWARD
from shoal.spec.catalog.accelerators import Accelerator, match
from shoal.spec.catalog.calibration import calibration
from shoal.spec.catalog.clusters import nodes
from shoal.spec.catalog.software import find_software

HOST_BOUND = 20.0
"""Percent of a step without a running kernel from which its time is that of its launches."""

WAYS = ("forward", "input gradient", "weight gradient")


def write_gpu_catalog(folder: Path, out: Path) -> str:
    """Fit the constants of a GPU to parts 1 and 4 of its benchmark, and write a catalog file.

    Returns:
        The constants in one line.

    Raises:
        UsageError: the folder has no readable run of part 1, or one of a rehearsal or of a GPU that the catalog lacks,
            or a figure is missing or wrong.
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
    try:
        constants = {key: float(f"{value:.4g}") for key, value in fit_constants(gpu, first, speed).items()}
        source = f"shoal bench gpu, {first.header['date'][:10]}, {device}, torch {first.header['versions']['torch']}"
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"--from-gpu {folder}: a row of part-1.jsonl or part-4.jsonl is damaged: {type(error).__name__}: {error}."
            f"\n  Run the parts again: shoal bench gpu --part 1 4 --out {folder}"
        ) from None
    efficiency = min(1.0, constants.pop("best", gpu.matmul_efficiency))
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
    """Return the constants that the parts determine, and "best", the share of the peak of the best product."""
    known = calibration().measured(find_software("shoal").constants.get(gpu.generation, {})).numbers
    found: dict[str, list[float]] = {}
    for row in _rows(first, "products", "bf16"):
        rates = [1e12 * row[f"{way} TFLOP/s"] / gpu.dense_flops("bf16") for way in WAYS]
        found["best"] = [max(rates + found.get("best", []))]
        if row["product"] != "square":
            # By the cost model, how much longer it takes than a large product of as many FLOPs.
            longer = 1 + known["short_m"] / row["m"] + known["short_k"] * (1 / row["k"] + 1 / row["n"])
            found.setdefault("product", []).append(len(WAYS) / sum(1 / rate for rate in rates) * longer)
    for row in _rows(first, "memory", "copies"):
        if row["transfer"] == "copy in device memory":
            found["hbm"] = [1e9 * row["GB/s"] / gpu.memory_bandwidth]
    for kernel, name in (("flash", "flash_2"), ("cudnn", "flash_3")):
        for row in _rows(first, "attention", kernel):
            d, s = int(row["heads"].rpartition(" ")[2]), row["sequence"]
            both = 1 / row["forward TFLOP/s"] + ATTENTION_BACKWARD / row["backward TFLOP/s"]  # of the forward's FLOPs
            part = 1e12 * (1 + ATTENTION_BACKWARD) / both / gpu.dense_flops("bf16")
            part *= (1 + known["narrow_head"] / d) * (1 + known["short_sequence"] / s)
            found.setdefault(name, []).append(part)
    for row in speed.rows if speed else ():
        if (reserved := row.get("more", {}).get("reserved GB")) and row.get("allocated GB"):
            found.setdefault("base", []).append(max(0.0, reserved - row["allocated GB"]))
        if row.get("kernels ms") and row["host-bound %"] < HOST_BOUND:
            found.setdefault("fixed", []).append(max(0.0, 1e-3 * (row["step ms"] - row["kernels ms"])))
        if row["item"].endswith("eager") and row.get("host-bound %", 0.0) > HOST_BOUND:
            layers = row["more"]["layers"] * row["more"]["microbatches"]
            found.setdefault("launch", []).append(1e-3 * row["step ms"] / layers / (1 + known["launch_backward"]))
    return {name: median(values) for name, values in found.items()}


def _rows(run: PartRun, table: str, item: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an item that have results."""
    for row in run.rows:
        if (row["table"], row["item"], row["result"]) == (table, item, ""):
            yield row
