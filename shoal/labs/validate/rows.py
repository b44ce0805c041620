"""Read published measurements from CSV as inputs of the cost model.

Each row becomes a `Point`, or is counted with the reason why it is none.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import UsageError
from shoal.labs.validate import columns
from shoal.labs.validate.columns import Row, number, stated
from shoal.planning.cost.batched_runs import ATTENTION, RECOMPUTE
from shoal.spec.catalog.calibration import GENERATIONS, NETWORKS
from shoal.spec.catalog.clusters import link
from shoal.spec.catalog.software import Software, software_named, software_table

STEPS = ("measured", "measured_oom", "measured_memory", "example_log")  # kinds of rows: a full step of a full model
SHAPE = ("layers", "hidden", "seq", "n_gpus")
COLUMNS = ("row_id", "kind", "status", "heads", *SHAPE)
VOCABULARY = 51200  # GPT-2's, padded, as Megatron-LM does
HEAD = 128  # head dim if the number of heads is not stated
FACTS = (  # fields of the software that the cost model uses
    "gradient_bytes", "reduce_bytes", "overlap_data", "overlap_pipeline", "ahead", "balanced", "dropout",
    "unit_messages", "crowded", "bucket_copies", "shard_copies", "gathers_kept", "unsplit_logits", "kept_ffn",
)  # fmt: skip

Left = dict[tuple[str, str], int]
"""Number of rows that are no points, by (file, reason)."""


class Inexpressible(Exception):
    """A row cannot become a point."""


@dataclass(frozen=True)
class Point:
    """One published point, as input of the cost model.

    Attributes:
        row: id of the row.
        file, model, quality: as published.
        gpus: number of accelerators.
        run: fields of `shoal.planning.cost.batched_runs.Runs`.
        seconds, bytes: measurements, if any.
        memory_kind: allocated, reserved, first (reserved on the first rank) or process; empty without bytes.
        oom: whether it ran out of memory.
        assumed: columns that were not published.
    """

    row: str
    file: str
    model: str
    quality: str
    gpus: int
    run: dict[str, Any]
    seconds: float | None
    bytes: float | None
    memory_kind: str
    oom: bool
    assumed: tuple[str, ...] = ()


def read_row(row: Row, file: str) -> Point:
    """Convert a row to a point.

    Raises:
        Inexpressible: the row cannot become a point; says why.
        UsageError: the accelerator has no peak in the catalog.
    """
    if row.get("kind") not in STEPS:
        raise Inexpressible(f"kind {row.get('kind') or 'not stated'}")
    if row.get("status") not in ("ok", "oom"):
        raise Inexpressible(f"status {row.get('status') or 'not stated'}")
    if missing := [name for name in SHAPE if not number(row, name)]:
        raise Inexpressible(f"{', '.join(missing)} not stated")
    known = _Known(row)
    software = software_named(row.get("framework") or "", number(row, "year") or 2025)
    batch, run = _parallel(row, known)
    run |= _model(row, known, software) | _hardware(row, software)
    gpus = int(stated(row, "n_gpus"))
    size, kind = columns.memory(row)
    seconds, oom = columns.seconds(row, batch * run["s"], gpus), row.get("status") == "oom"
    if seconds is None and size is None and not oom:
        raise Inexpressible("neither time nor memory")
    row_id, model, quality = (row.get(name) or "" for name in ("row_id", "model", "quality"))
    if oom:
        seconds = size = None
    assumed = tuple(dict.fromkeys(known.assumed))
    return Point(row_id, file, model, quality, gpus, run, seconds, size, kind, oom, assumed)


class _Known:
    """Reads columns of a row with defaults, and records which were assumed."""

    def __init__(self, row: Row):
        self.row, self.assumed = row, list[str]()

    def __call__(self, name: str, default: float) -> float:
        value = number(self.row, name)
        if value is None:
            self.assumed.append(name)
        return default if value is None else value


def _parallel(row: Row, known: _Known) -> tuple[float, dict[str, Any]]:
    """Return the global batch, and the fields of the layout."""
    gpus = stated(row, "n_gpus")
    if gpus > 8 and number(row, "tp") is None:
        raise Inexpressible("tp not stated")
    tp, pp, cp = (number(row, name) or 1.0 for name in ("tp", "pp", "cp"))
    stage = columns.zero_stage(row)
    dp = number(row, "dp") or gpus / (tp * pp * cp)
    shard = columns.shards(row, stage, dp) * (cp if stage == 3 else 1)
    if stage == 3 and dp * tp * pp * cp < gpus:  # dp counts replicas, each sharded inside
        shard = gpus / (dp * tp * pp * cp)
        dp *= shard
    if dp < 1 or abs(dp * tp * pp * cp - gpus) > 0.5:
        raise Inexpressible("dp x tp x pp x cp is not the number of accelerators")
    batch, count, each = (number(row, name) for name in ("global_batch", "num_microbatches", "micro_batch"))
    if not batch:
        if not (each and count):
            raise Inexpressible("global_batch not stated")
        batch = each * count * dp
    each = each or known("micro_batch", max(1.0, batch / (dp * count)) if count else 1.0)
    warmup, alive = columns.bubble(row)
    return batch, {
        "tp": tp, "pp": pp, "cp": cp, "dp": dp, "zero": stage, "shard": shard, "ep": number(row, "ep") or 1,
        "virtual": max(1.0, known("vpp", 1)) if pp > 1 else 1, "warmup": warmup, "alive": alive, "b": each,
        "microbatches": max(1.0, batch / (dp * each)), "sequence_parallel": row.get("sp") == "y",
    }  # fmt: skip


def _model(row: Row, known: _Known, software: Software) -> dict[str, Any]:
    """Return the fields of the model, of its kernels and of recomputation."""
    mode = columns.recomputed(row)
    if mode is None:
        raise Inexpressible(f"recompute: {row.get('recompute')}")
    if not mode:
        known.assumed.append("recompute")
    hidden = stated(row, "hidden")
    heads = known("heads", max(1, round(hidden / HEAD)))
    gated = columns.gated(row)
    experts, active, width = columns.experts(row)
    return {
        "layers": stated(row, "layers"), "hidden": hidden, "heads": heads, "gated": gated, "s": stated(row, "seq"),
        "kv_heads": number(row, "kv_heads") or heads, "head_dim": number(row, "head_dim") or hidden / heads,
        "ffn": width or known("ffn", 8 * hidden / 3 if gated else 4 * hidden), "vocab": known("vocab", VOCABULARY),
        "tied": columns.tied(row), "experts": experts, "active": active,
        "recompute": RECOMPUTE.index(mode or software.recompute),
        "attention": ATTENTION.index(columns.attention(row, software.attention)),
        # A norm is one kernel everywhere, except in one study that compares both.
        "fused_norm": software.name != "aleph-alpha" or "RMS" in (row.get("attn_kernel") or ""),
    }  # fmt: skip


def _hardware(row: Row, software: Software) -> dict[str, Any]:
    """Return the fields of accelerators, links and software."""
    found = columns.machine(row)
    if found is None:
        raise Inexpressible(f"accelerator {row.get('gpu') or 'not stated'} is not in the catalog")
    machine, node = found
    per_node, peak = columns.per_node(row, node), machine.dense_flops(machine.half)
    memory = number(row, "gpu_mem_gb")
    return {name: getattr(software, name) for name in FACTS} | {
        "software": list(software_table()).index(software.name), "generation": GENERATIONS.index(machine.generation),
        "network": NETWORKS.index(columns.network(row)), "peak": peak, "attainable": machine.matmul_efficiency,
        "peak8": machine.peak_flops.get("fp8", peak),
        "fp8": columns.eight_bits(row), "hbm": machine.memory_bandwidth,
        "memory": memory * 1e9 if memory else machine.memory_bytes,
        "inside": link(node.inside).bandwidth, "nic": columns.leaving(row, node, per_node), "per_node": per_node,
        "crowded": software.crowded and columns.network(row) == "efa-slow",
        "reduced_apart": software.reduced_apart * columns.has_fixed_pipeline(row),
        "ties_first": software.balanced and not columns.has_fixed_pipeline(row),
        "gathers_kept": columns.gathers_kept(row, software.gathers_kept),
        "overlap_tensor": software.overlap_tensor and "vanilla" not in (row.get("note") or ""),
    }  # fmt: skip


def read_folder(folder: Path) -> tuple[list[Point], Left]:
    """Read all points, and count the other rows by reason; files without the columns are skipped."""
    points: list[Point] = []
    left: Left = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if not set(COLUMNS) <= set(reader.fieldnames or ()):
                continue
            for row in reader:
                try:
                    points.append(read_row(row, path.stem))
                except (Inexpressible, UsageError) as reason:
                    key = path.stem, str(reason)
                    left[key] = left.get(key, 0) + 1
    return points, left
