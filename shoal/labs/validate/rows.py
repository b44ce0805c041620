"""Read published measurements from CSV as inputs of the cost model.

Each row becomes a `Point`, or is counted with the reason why it is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from shoal.base.errors import UsageError, divisors
from shoal.base.files import read_csv
from shoal.labs.validate import columns
from shoal.labs.validate.columns import Row, number, stated
from shoal.labs.validate.configurations import complete
from shoal.planning.cost.batched_runs import Runs, describe_row
from shoal.planning.cost.memory.published_software import footprint
from shoal.planning.cost.time.step import step
from shoal.planning.describe import describe_run
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import Experts, ModelShape
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import Cluster, Link, cluster, link
from shoal.spec.catalog.software import Software, software_named
from shoal.spec.layout import Layout

STEPS = ("measured", "measured_oom", "measured_memory", "example_log")  # kinds of rows: a full step of a full model
RUN = ("seq", "n_gpus")
COLUMNS = ("row_id", "kind", "status", "heads", *columns.SHAPE, *RUN)
SELECTIVE = {"selective": "core", "products": "products", "operators": "operators"}  # `Software.selective`, by mode
HEAD = 128  # head dim if the number of heads is not stated
SOURCE = "a published row"
OLD_PIPELINE = 0.3  # `Software.split_holes` of nanotron's pipelines before the fix, by which of them failed
Left = dict[tuple[str, str], int]
"""Number of rows that are no points, by (file, reason)."""


class Inexpressible(Exception):
    """A row cannot become a point."""


@dataclass(frozen=True)
class Point:
    """One published point, as input of the cost model."""

    row: str  # id of the row
    # file, model, quality: as published
    file: str
    model: str
    quality: str
    gpus: int  # number of accelerators
    run: EstimatedRun  # what `shoal.estimate` estimates
    # seconds, bytes: measurements, if any
    seconds: float | None
    bytes: float | None
    memory_kind: str  # allocated, reserved, first (reserved on the first rank) or process; empty without bytes
    oom: bool  # whether it ran out of memory
    assumed: tuple[str, ...] = ()  # columns that were not published


def read_row(row: Row, file: str) -> Point:
    """Convert a row to a point.

    Raises:
        Inexpressible: the row cannot become a point; says why.
        UsageError: `shoal.estimate` refuses it, or the accelerator has no peak in the catalog.
    """
    row = complete(row)
    if row.get("kind") not in STEPS:
        raise Inexpressible(f"kind {row.get('kind') or 'not stated'}")
    if row.get("status") not in ("ok", "oom"):
        raise Inexpressible(f"status {row.get('status') or 'not stated'}")
    named = columns.catalog_model(row)
    needed = RUN if named else columns.SHAPE + RUN
    if missing := [name for name in needed if not number(row, name)]:
        raise Inexpressible(f"{', '.join(missing)} not stated")
    if "lora" in (row.get("model") or "").lower():
        raise Inexpressible("LoRA: trains adapters, without the gradients of the model's weights")
    known = _Known(row)
    software = software_named(columns.framework(row), number(row, "year") or 2025)
    layout, batch = _layout(row, known, software)
    machines, gpus = _cluster(row), int(stated(row, "n_gpus"))
    half = machines.accelerator.half
    s = int(stated(row, "seq"))
    size, kind = columns.memory(row)
    oom = row.get("status") == "oom"
    run = describe_run(
        layout, model=_shape(row, known, named), cluster=machines, sequence_length=s, global_batch=round(batch),
        precision=columns.precision(row, half), fill=False, software=_software(row, software),
        published=True,
    )  # fmt: skip
    run, seconds = run if oom else _tune(run, row), columns.seconds(row, batch * s, gpus)
    if seconds is None and (rate := columns.flop_rate(row, machines.accelerator.dense_flops(half))):
        seconds = columns.counted_flops(row, run) / (rate * gpus)
    seconds = seconds if columns.timed(row) else None
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


def _layout(row: Row, known: _Known, software: Software) -> tuple[Layout, float]:
    """Return the layout and the global batch."""
    gpus = stated(row, "n_gpus")
    if gpus > 8 and number(row, "tp") is None:
        raise Inexpressible("tp not stated")
    tp, pp, cp = (number(row, name) or 1.0 for name in ("tp", "pp", "cp"))
    dp = number(row, "dp") or gpus / (tp * pp * cp)
    stage = columns.zero_stage(row)
    if stage is None:  # publications of software with ZeRO seldom say that they use it
        stage = software.least_sharding if dp > 1 else 0
        known.assumed.append("zero_stage")
    shard = columns.shards(row, stage, dp)
    if stage == 3 and dp * tp * pp * cp < gpus:  # dp counts replicas, each sharded inside
        shard = gpus / (dp * tp * pp * cp)
        dp *= shard
    if "DP column may not equal" in (row.get("note") or ""):
        dp = known("dp of the table", gpus / (tp * pp * cp))
        shard = dp if stage else 1.0
    if dp < 1 or abs(dp * tp * pp * cp - gpus) > 0.5:
        raise Inexpressible("dp x tp x pp x cp is not the number of accelerators")
    batch, count, each = (number(row, name) for name in ("global_batch", "num_microbatches", "micro_batch"))
    of_chips = software.name == "maxtext"  # its `per_device_batch_size` is of each, and it accumulates no gradients
    if not batch and each and (count or not of_chips):
        batch = each * count * dp if count else known("global_batch", each * dp * (1 if pp == 1 else 4 * pp))
    if not batch:
        raise Inexpressible("global_batch not stated")
    if of_chips:
        each = batch / dp
    each = each or known("micro_batch", max(1.0, batch / (dp * count)) if count else 1.0)
    mode = columns.recomputed(row)
    if mode is None:
        raise Inexpressible(f"recompute: {row.get('recompute')}")
    if not mode:
        known.assumed.append("recompute")
    virtual = int(known("vpp", 1)) if pp > 1 else 1
    return Layout.model_validate({
        "dp": dp, "zero": stage, "zero_shard": shard if stage and shard < dp else None, "tp": tp, "pp": pp, "cp": cp,
        "ep": number(row, "ep") or 1, "etp": columns.expert_tensor(row), "micro_batch": each,
        "sequence_parallel": columns.splits_between(row, tp, software.name),
        "recompute": "selective" if mode in SELECTIVE else mode or software.recompute,
        "virtual_stages": virtual if virtual > 1 else None, "schedule": columns.schedule(row, virtual),
    }), batch  # fmt: skip


def _tune(run: EstimatedRun, row: Row) -> EstimatedRun:
    """Return the run with the fastest micro-batch, and stages of a pipeline rank, that fit, where none is stated.

    Who publishes a run has tuned it.
    """
    layout, layers = run.layout, run.shape.layers
    batches, virtual = [layout.micro_batch], [layout.virtual_stages or 1]
    if not number(row, "micro_batch") and not number(row, "num_microbatches"):
        batches += [each for each in (2, 4, 8) if run.global_batch % (layout.dp * each) == 0]
    interleaves = "interleaved-1f1b" in run.software.schedules and layout.pp > 1 and layers % layout.pp == 0
    if interleaves and not number(row, "vpp") and not row.get("schedule"):
        virtual += [stages for stages in divisors(layers // layout.pp) if stages > 1]
    candidates = [run]
    for each, stages in product(batches, virtual):
        changes: dict[str, Any] = {"micro_batch": each}
        if stages > 1:
            changes |= {"virtual_stages": stages, "schedule": "interleaved-1f1b"}
        other = replace(run, layout=layout.model_copy(update=changes))
        if other.layout != layout and (stages == 1 or other.microbatches % layout.pp == 0):
            candidates.append(other)
    if len(candidates) == 1:
        return run
    runs = Runs.from_rows([describe_row(candidate) for candidate in candidates])
    constants = cluster_calibration(run.cluster, run.software.name)
    memory, seconds = footprint(runs, constants), step(runs, constants).seconds
    seconds[1:][~memory.fits[1:]] = np.inf  # the first is what is stated, and ran
    return candidates[int(seconds.argmin())]


def _shape(row: Row, known: _Known, named: ModelShape | None) -> ModelShape:
    """Return the model's shape: of the columns, or that of the catalog's model that the row names."""
    if named:
        own = {name: round(known(name, getattr(named, name))) for name in ("layers", "vocab")}
        return named.model_copy(update={**own, "max_sequence": round(stated(row, "seq"))})
    hidden = stated(row, "hidden")
    heads = known("heads", max(1, round(hidden / HEAD)))
    gated = columns.gated(row)
    ffn = known("ffn", 8 * hidden / 3 if gated else 4 * hidden)
    count = int(number(row, "n_experts") or 1)
    experts = Experts(count=count, per_token=int(number(row, "topk") or 1), ffn=int(ffn)) if count > 1 else None
    integers = {
        "layers": stated(row, "layers"), "hidden": hidden, "heads": heads, "kv_heads": number(row, "kv_heads") or heads,
        "head_dim": number(row, "head_dim") or hidden / heads, "ffn": ffn,
        "vocab": known("vocab", columns.vocabulary(row)),
        "max_sequence": stated(row, "seq"),
    }  # fmt: skip
    return ModelShape.model_validate({
        "family": "llama" if gated else "gpt", "tied": columns.tied(row), "experts": experts,
        **{name: max(1, round(value)) for name, value in integers.items()},
    })  # fmt: skip


def _software(row: Row, software: Software) -> Software:
    """Return the software with what the row says of its kernels and versions."""
    mode, old = columns.recomputed(row), columns.has_old_pipeline(row)
    again = row.get("recompute_modules") or ""  # names of Megatron-Core's `recompute_modules`
    return software.model_copy(update={
        "attention": columns.attention(row, software.attention),
        "selective": SELECTIVE.get(mode or "", software.selective),
        "recomputes_norms": software.recomputes_norms or "layernorm" in again,
        "recomputes_activation": software.recomputes_activation or "moe_act" in again,
        "optimizer_bytes": int(number(row, "optimizer_bytes") or software.optimizer_bytes),
        "fused_norm": software.fused_norm or "RMS" in (row.get("attn_kernel") or ""),
        "reduced_apart": software.reduced_apart * (not old), "ties_first": software.balanced and old,
        "split_holes": OLD_PIPELINE if old else software.split_holes, "hides_gathers": columns.hides_gathers(row),
        "rows_once": columns.sends_rows_once(row, software.rows_once), "blocking": columns.blocking(row),
        "counts_ends": software.counts_ends or "DeepSpeed" in (row.get("framework") or ""),
        "gradient_bytes": columns.gradient_bytes(row, software.gradient_bytes),
        "reduce_bytes": columns.gradient_bytes(row, software.reduce_bytes),
        "offloads_heads": (row.get("recompute") or "").startswith("qkv_proj_offloaded"),
        "fused_loss": columns.fuses_loss(row, software.fused_loss),
        "offloaded_layers": columns.offloaded_layers(row),
        "overlap_tensor": software.overlap_tensor and "vanilla" not in (row.get("note") or ""),
    })  # fmt: skip


def _cluster(row: Row) -> Cluster:
    """Return the accelerators and links."""
    found = columns.machine(row)
    if found is None:
        raise Inexpressible(f"accelerator {row.get('gpu') or 'not stated'} is not in the catalog")
    (machine, node), gpus = found, int(stated(row, "n_gpus"))
    if node.dimensions:
        slices = columns.slices(row)
        return cluster(f"{slices}x{node.name}-{gpus // slices * node.cores_per_chip}")
    switched, memory = int(columns.per_node(row, node)), number(row, "gpu_mem_gb")
    per_node = max(n for n in range(1, min(switched, gpus) + 1) if gpus % n == 0)
    if memory and abs(memory * 1e9 / machine.memory_bytes - 1) > 0.1:  # else the catalog knows it better
        machine = machine.model_copy(update={"memory_bytes": memory * 1e9})
    leaving = columns.leaving(row, node, switched)
    nic = Link(name=columns.network(row), bandwidth=leaving, latency=0.0, source=SOURCE) if gpus > per_node else None
    return Cluster(SOURCE, machine, gpus // per_node, per_node, link(node.inside), nic, per_node)


def stack(points: Iterable[Point]) -> Runs:
    """Return the runs of points as arrays."""
    return Runs.from_rows([describe_row(point.run) for point in points])


def read_folder(folder: Path) -> tuple[list[Point], Left]:
    """Read all points, and count the other rows by reason; files without the columns are skipped."""
    points: list[Point] = []
    left: Left = {}
    for path in sorted(folder.glob("*.csv")):
        rows = read_csv(path)
        if not rows or not set(COLUMNS) <= set(rows[0]):
            continue
        for row in rows:
            try:
                points.append(read_row(row, path.stem))
            except (Inexpressible, UsageError, ValidationError) as reason:
                key = path.stem, str(reason).partition("\n")[0]
                left[key] = left.get(key, 0) + 1
    return points, left
