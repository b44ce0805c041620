"""Published measurements, read from CSV and mapped to what the cost model takes.

One row is one published point. A row becomes a `Point`, or a reason why it cannot be one; none is dropped in silence.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.catalog.accelerators import Accelerator, accelerator
from shoal.catalog.clusters import Node, nodes
from shoal.catalog.links import link
from shoal.catalog.software import software_named, software_table
from shoal.cost.runs import ATTENTION, GENERATIONS, RECOMPUTE
from shoal.errors import UsageError

Row = Mapping[str, str]
GIB = 2**30
SAID = {"measured", "measured_oom", "measured_memory", "example_log"}  # kinds that are a whole step of a whole model
SHAPE = ("layers", "hidden", "heads", "seq", "n_gpus")
ACCELERATORS = (  # what is found first counts
    ("v100", "16", "v100-sxm2-16gb", "V100"), ("v100", "", "v100-sxm2-32gb", "V100"),
    ("a100", "40", "a100-sxm-40gb", "A100-40GB"), ("a100", "", "a100-sxm-80gb", "A100"), ("a800", "", "a100-sxm-80gb", "A100"),
    ("gb200", "", "gb200", "GB200"), ("gb300", "", "b300-sxm", "GB200"), ("b200", "", "b200-sxm", "B200"), ("b300", "", "b300-sxm", "B300"),
    ("h800", "", "h800-sxm", "H800"), ("h200", "", "h200-sxm", "H200"), ("h100", "", "h100-sxm", "H100"),
    ("mi250", "", "mi250x", "MI300X"), ("mi300", "", "mi300x", "MI300X"), ("mi325", "", "mi325x", "MI300X"),
    ("v5p", "", "tpu-v5p", "v5p"), ("v5e", "", "tpu-v5e", "v5e"), ("v6e", "", "tpu-v6e", "v6e"), ("tpu v4", "", "tpu-v4", "v4"),
)  # fmt: skip
FAMILIES = (("v100", "volta"), ("t4", "volta"), ("a100", "ampere"), ("h100", "hopper"), ("h800", "hopper"), ("h200", "hopper"),
            ("b200", "blackwell"), ("b300", "blackwell"), ("gb", "blackwell"), ("mi", "cdna"), ("tpu", "tpu"))


class Inexpressible(Exception):
    """A row that the model has no words for; the reason."""


@dataclass(frozen=True)
class Point:
    """One published point, as the cost model takes it.

    Attributes:
        row: its id.
        file, source, framework, model, quality: as published.
        run: fields of `shoal.cost.runs.Runs`, and of its software.
        seconds, bytes: measured; None where they were not.
        memory_kind: allocated, or reserved.
        oom: it ran out of memory.
        assumed: what was not published and had to be assumed.
    """

    row: str
    file: str
    source: str
    framework: str
    model: str
    quality: str
    gpus: int
    run: dict[str, Any]
    seconds: float | None
    bytes: float | None
    memory_kind: str
    oom: bool
    assumed: tuple[str, ...] = ()


def number(row: Row, name: str, default: float | None = None) -> float | None:
    try:
        return float(row.get(name) or "")
    except ValueError:
        return default


def read_row(row: Row, file: str) -> Point:
    """A row's point.

    Raises:
        Inexpressible: why it is none.
    """
    if row.get("kind") not in SAID:
        raise Inexpressible(f"kind {row.get('kind') or 'not stated'}")
    if row.get("status") not in ("ok", "oom"):
        raise Inexpressible(f"status {row.get('status') or 'not stated'}")
    missing = [name for name in SHAPE if not number(row, name)]
    if missing:
        raise Inexpressible(f"{', '.join(missing)} not stated")
    assumed: list[str] = []

    def known(name: str, default: float) -> float:
        value = number(row, name)
        if value is None:
            assumed.append(name)
            return default
        return value

    gpus = int(number(row, "n_gpus"))
    layers, hidden, heads = (number(row, name) for name in ("layers", "hidden", "heads"))
    gated = 0 if (row.get("mlp_type") or "") in ("gelu", "squared-relu", "relu") else 1
    if not row.get("mlp_type"):
        gated = 0 if re.search("gpt|bert", row.get("model") or "") else 1
    ffn = number(row, "ffn") or (known("ffn", 4 * hidden if not gated else 8 * hidden / 3))
    tp, pp, cp = (number(row, name) or 1 for name in ("tp", "pp", "cp"))
    if (number(row, "tp") or 0) == 0 and gpus > 8:
        raise Inexpressible("tp not stated")
    dp = number(row, "dp") or gpus / (tp * pp * cp)
    seq = number(row, "seq")
    batch = number(row, "global_batch")
    micro = number(row, "micro_batch")
    count = number(row, "num_microbatches")
    if not batch and micro and count:
        batch = micro * count * dp
    if not batch:
        raise Inexpressible("global_batch not stated")
    if dp < 1 or abs(dp * tp * pp * cp - gpus) > 0.5:
        raise Inexpressible("dp x tp x pp x cp is not the number of GPUs")
    if not micro:
        assumed.append("micro_batch")
        micro = max(1, batch / (dp * count)) if count else 1
    count = max(1.0, batch / (dp * micro))
    soft = software_named(row.get("framework") or "", number(row, "year") or 2025)
    machine, kind, node = machine_of(row)
    family = next((f for word, f in FAMILIES if word in machine.name), None)
    precision = (row.get("precision") or "bf16").lower()
    eight = "8" in precision.replace("fp16", "").replace("bf16", "") and ("fp8" in precision or "float8" in precision or "fp4" in precision)
    eight = eight or "fp4" in precision
    recompute = recomputation(row, soft.recompute, assumed)
    schedule = (row.get("schedule") or "").lower()
    virtual = max(1.0, known("vpp", 1) if pp > 1 else 1)
    zero = zero_of(row)
    warmup, alive = 1.0, 1.0
    if "zb-1p" in schedule:
        warmup = 1 / 3
    elif "zb-2p" in schedule:
        warmup, alive = 0.0, 2.0
    inside, nic = links(row, node)
    seconds = step_seconds(row, batch * seq, gpus)
    memory, memory_kind = memory_of(row)
    oom = row.get("status") == "oom"
    if seconds is None and memory is None and not oom:
        raise Inexpressible("neither time nor memory")
    run = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": number(row, "kv_heads") or heads,
        "head_dim": number(row, "head_dim") or hidden / heads, "ffn": ffn, "vocab": known("vocab", 51200), "gated": gated,
        "tied": tied(row, gated), "experts": number(row, "n_experts") or 1, "active": number(row, "topk") or 1,
        "s": seq, "b": micro, "microbatches": count, "tp": tp, "pp": pp, "virtual": virtual, "dp": dp, "cp": cp,
        "ep": number(row, "ep") or 1, "zero": zero, "shard": shard(row, zero, dp, cp), "sequence_parallel": row.get("sp") == "y",
        "recompute": recompute, "warmup": warmup, "alive": alive, "software": list(software_table()).index(soft.name),
        "generation": GENERATIONS.index(family or "hopper"), "attention": ATTENTION.index(kernel(row, soft.attention)),
        "fp8": eight, "peak": machine.dense_flops("bf16"), "peak8": machine.peak_flops.get("fp8", machine.dense_flops("bf16")),
        "hbm": machine.memory_bandwidth, "memory": machine.memory_bytes,
        "inside": inside, "nic": nic, "per_node": number(row, "gpus_per_node") or node.per_node,
        "gradient_bytes": soft.gradient_bytes, "reduce_bytes": soft.reduce_bytes, "overlap_data": soft.overlap_data,
        "overlap_tensor": soft.overlap_tensor and "vanilla" not in (row.get("note") or ""), "overlap_pipe": soft.overlap_pipeline, "balanced": soft.balanced, "dropout": soft.dropout,
        "network": network(row), "fused_norm": fused_norm(row, soft.name),
    }
    return Point(row.get("row_id", ""), file, row.get("source", ""), row.get("framework", ""), row.get("model", ""), row.get("quality", ""),
                 gpus, run, seconds, memory, memory_kind, oom, tuple(dict.fromkeys(assumed)))


def machine_of(row: Row) -> tuple[Accelerator, str, Node]:
    text = (row.get("gpu") or "").lower()
    memory = row.get("gpu_mem_gb") or ""
    for word, size, name, node in ACCELERATORS:
        if word in text and (not size or size in memory or f"{size}gb" in text):
            return accelerator(name), name, nodes()[node]
    raise Inexpressible(f"accelerator {row.get('gpu') or 'not stated'} is not in the catalog")


def links(row: Row, node: Node) -> tuple[float, float]:
    """Bytes/s of one accelerator inside its node, and its share of what leaves it."""
    each = number(row, "gpus_per_node") or node.per_node
    inside = link(node.inside).bandwidth
    out = link(node.nic).bandwidth * (node.nics or node.per_node) / node.per_node if node.nic else math.inf
    text = row.get("interconnect") or ""
    if found := re.search(r"(\d+) ?x ?(\d+) ?Gb", text):
        out = int(found[1]) * int(found[2]) / 8 * 1e9 / each
    elif found := re.search(r"(\d+)x? (?:Omni-Path )?(?:links per node \()?(\d+) ?Gb", text):
        out = int(found[1]) * int(found[2]) / 8 * 1e9 / each
    elif found := re.search(r"(\d+) ?Gb(?:ps|/s)?\+? ?(?:NDR |HDR )?(?:IB )?(?:per|/) ?node", text):
        out = int(found[1]) / 8 * 1e9 / each
    elif found := re.search(r"inter (\d+) Gb/s per node", text):
        out = int(found[1]) / 8 * 1e9 / each
    elif found := re.search(r"(\d+) ?Gb/s\+? ?(?:NDR |HDR )?(?:IB )?per GPU", text):
        out = int(found[1]) / 8 * 1e9
    elif found := re.search(r"(\d+) ?GB/s per node", text):
        out = int(found[1]) * 1e9 / each
    return inside, out


def network(row: Row) -> int:
    text = (row.get("interconnect") or "").lower()
    for word, kind in (("efa", 2), ("omni", 3), ("roce", 1), ("gb/s nics", 1), ("clos", 1)):
        if word in text:
            return kind
    return 0


def fused_norm(row: Row, soft: str) -> bool:
    return soft != "aleph-alpha" or "RMS" in (row.get("attn_kernel") or "")


def tied(row: Row, gated: int) -> bool:
    note = row.get("note") or ""
    if "tie_emb=" in note:
        said = re.search(r"tie_emb=(\w*)", note)[1]
        if said:
            return said == "True"
        return (number(row, "params_b") or 0) < 5
    return not gated


def kernel(row: Row, default: str) -> str:
    text = (row.get("attn_kernel") or "").lower()
    if not text:
        return default
    if "torch" in text:
        return "unfused"
    if text == "fused":
        return "fused-softmax"
    if "v1" in text:
        return "flash-1"
    if "3" in text:
        return "flash-3"
    return "flash-2"


def recomputation(row: Row, default: str, assumed: list[str]) -> float:
    text = (row.get("recompute") or "").lower()
    if not text:
        assumed.append("recompute")
        return RECOMPUTE.index(default)
    if text.startswith("0 of") or text.startswith("none"):
        return 0
    if text.startswith("selective"):
        return 1
    if text.startswith("full"):
        return 2
    raise Inexpressible(f"recompute: {text}")


def zero_of(row: Row) -> int:
    stage = number(row, "zero_stage")
    if stage is not None:
        return int(stage)
    text = row.get("dp_mode") or ""
    return 3 if "FSDP" in text else 1 if "opt" in text or "ZeRO" in text else 0


def shard(row: Row, zero: int, dp: float, cp: float) -> float:
    if not zero:
        return 1
    if found := re.search(r"shard group=(\d+)", row.get("dp_mode") or ""):
        return min(dp, int(found[1]))
    return dp


def step_seconds(row: Row, tokens: float, gpus: int) -> float | None:
    if row.get("quality") == "M" or "after_pp_fix=False" in (row.get("note") or "") and (number(row, "pp") or 1) > 1:
        return None
    if seconds := number(row, "step_time_s"):
        return seconds
    if rate := number(row, "tokens_per_s_per_gpu"):
        return tokens / (rate * gpus)
    return None


def memory_of(row: Row) -> tuple[float | None, str]:
    size = number(row, "mem_gb")
    text = (row.get("mem_kind") or "")
    if size is None or not text:
        return None, ""
    unit = GIB if "GiB" in text or "reserved" in text or "MiB" in text or "nvidia-smi" in text else 1e9
    kind = "process" if "smi" in text else "allocated" if "alloc" in text.split(";")[0] else "reserved"
    return size * unit, kind


def read_folder(folder: Path) -> tuple[list[Point], dict[tuple[str, str], int]]:
    """Every point of every file, and how many rows of each file are none, by reason."""
    points, left = [], {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if "row_id" not in (reader.fieldnames or ()) or "step_time_s" not in reader.fieldnames:
                continue
            for row in reader:
                try:
                    points.append(read_row(row, path.stem))
                except (Inexpressible, UsageError) as reason:
                    left[path.stem, str(reason)] = left.get((path.stem, str(reason)), 0) + 1
    return points, left
