"""Estimate published points with `shoal estimate`: stage by stage, with a simulated program.

`validate` scores closed forms over all rows together (`shoal.planning.cost.time.step`); `estimate` and `plan` price one
layout (`shoal.planning.cost.time.stage`) and simulate its program. Both use the constants of the row's software and
network here, so they differ only in how they compute, and in what shoal's engine does differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.base.errors import UsageError
from shoal.labs.validate.rows import FACTS, Point
from shoal.planning.cost.batched_runs import ATTENTION, RECOMPUTE, Runs
from shoal.planning.cost.time.step import step
from shoal.planning.estimable import check_estimable, check_layout_on_cluster
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.accelerators import Accelerator
from shoal.spec.catalog.calibration import GENERATIONS, NETWORKS, Calibration
from shoal.spec.catalog.clusters import Cluster, Link
from shoal.spec.catalog.software import software_table
from shoal.spec.layout import Layout

FLASH = [ATTENTION.index(name) for name in ("flash-2", "flash-3")]
SOURCE = "a published row"


def build_run(point: Point, constants: Calibration) -> EstimatedRun | None:
    """Convert a point to a run of shoal, or None if shoal's engine works differently.

    Unsupported are experts, attention that stores its scores, other splits into stages, and what `shoal estimate`
    refuses.
    """
    r = point.run
    if r["experts"] > 1 or r["attention"] not in FLASH or r["alive"] != 1 or r["warmup"] != 1:
        return None
    shards = r["shard"] / (r["cp"] if r["zero"] == 3 else 1)
    integers = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "s", "b", "dp", "tp", "pp", "cp")
    if any(r[name] % 1 for name in (*integers, "virtual", "per_node", "microbatches")) or shards % 1:
        return None
    n = {name: int(r[name]) for name in integers}
    try:
        shape = ModelShape(
            family="llama" if r["gated"] else "gpt", max_sequence=n["s"], tied=bool(r["tied"]), layers=n["layers"],
            hidden=n["hidden"], heads=n["heads"], kv_heads=n["kv_heads"], head_dim=n["head_dim"], ffn=n["ffn"],
            vocab=n["vocab"],
        )  # fmt: skip
        virtual = int(r["virtual"])
        layout = Layout.model_validate({
            "dp": n["dp"], "tp": n["tp"], "pp": n["pp"], "cp": n["cp"], "zero": int(r["zero"]), "micro_batch": n["b"],
            "zero_shard": int(shards) if r["zero"] else None, "recompute": RECOMPUTE[int(r["recompute"])],
            "sequence_parallel": bool(r["sequence_parallel"]) and n["tp"] > 1,
            "schedule": "interleaved-1f1b" if virtual > 1 else "1f1b",
            "virtual_stages": virtual if virtual > 1 else None,
        })  # fmt: skip
        batch = n["b"] * int(r["microbatches"]) * n["dp"]
        precision = "fp8" if r["fp8"] else "bf16"
        run = EstimatedRun(shape, layout, _cluster(point, constants), n["s"], batch, precision)
        check_layout_on_cluster(run)
        check_estimable(run)
    except (UsageError, ValueError):
        return None
    return run


def _cluster(point: Point, constants: Calibration) -> Cluster:
    """Return a point's accelerators and links, with the constants of its software and network."""
    r, per_node = point.run, int(min(point.run["per_node"], point.gpus))
    nodes = -(-point.gpus // per_node)
    machine = Accelerator(
        name=SOURCE, peak_flops={"bf16": r["peak"], "fp8": r["peak8"]}, memory_bytes=r["memory"],
        memory_bandwidth=r["hbm"], matmul_efficiency=r["attainable"], devices=(SOURCE,), source=SOURCE,
        generation=GENERATIONS[int(r["generation"])],
    )  # fmt: skip
    inside = Link(name="inside", bandwidth=r["inside"], latency=0.0, source=SOURCE)
    nic = Link(name=NETWORKS[int(r["network"])], bandwidth=r["nic"], latency=0.0, source=SOURCE)
    known = {
        name: float(constants[name][int(r[of.by])] if of.by else constants[name])
        for name, of in constants.constants.items() if of.by != "scale"
    }  # fmt: skip
    return Cluster(SOURCE, machine, nodes, per_node, inside, nic if nodes > 1 else None, per_node, constants=known)


@dataclass(frozen=True)
class EstimatedSteps:
    """Step times by `shoal estimate`.

    Attributes:
        points: the points that it supports.
        seconds: its estimates.
        closed: estimates by the closed forms, as if run by shoal's engine.
    """

    points: Sequence[Point]
    seconds: np.ndarray
    closed: np.ndarray

    @property
    def difference(self) -> float:
        """Median relative difference between the two estimates."""
        return float(np.median(np.abs(self.seconds / self.closed - 1)))


def simulate_points(points: Sequence[Point], constants: Calibration, most: int = 200) -> EstimatedSteps:
    """Estimate those timed points of quality A that `shoal estimate` supports; about ``most``, evenly spaced."""
    runs = [(p, build_run(p, constants)) for p in points if p.seconds and p.quality == "A"]
    found = [(p, run) for p, run in runs if run is not None]
    found = found[:: max(1, len(found) // most)]
    seconds = np.array([Estimate(run).step_seconds for _, run in found])
    chosen, own = [p for p, _ in found], software_table()["shoal"]
    facts = {name: getattr(own, name) for name in (*FACTS, "overlap_tensor", "reduced_apart")} | {"ties_first": 0}
    as_engine = Runs.from_rows([point.run | facts for point in chosen])
    return EstimatedSteps(chosen, seconds, step(as_engine, constants).seconds if chosen else seconds)
