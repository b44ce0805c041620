"""Published points as `shoal estimate` takes them: the same runs, priced stage by stage and played.

`validate` scores closed forms over all rows at once (`shoal.planning.cost.time.step`); `estimate` and `plan` price one
layout with `shoal.planning.cost.time.stage`, and play its program. Here a row is handed to the latter, with the
constants of its own software and network, so that what is left between the two is how they compute, and what shoal's
engine does otherwise.
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
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.links import Link
from shoal.spec.catalog.software import software_table
from shoal.spec.layout import Layout

FLASH = [ATTENTION.index(name) for name in ("flash-2", "flash-3")]
SOURCE = "a published row"


def run_of(point: Point, constants: Calibration) -> EstimatedRun | None:
    """The point as a run of shoal's; None where shoal's engine does not do what it did.

    Left out are experts, attention that writes its scores, stages that are cut otherwise than shoal cuts them, and
    what `shoal estimate` refuses.
    """
    r = point.run
    if r["experts"] > 1 or r["attention"] not in FLASH or r["alive"] != 1 or r["warmup"] != 1:
        return None
    shards = r["shard"] / (r["cp"] if r["zero"] == 3 else 1)
    whole = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "s", "b", "dp", "tp", "pp", "cp")
    if any(r[name] % 1 for name in (*whole, "virtual", "per_node", "microbatches")) or shards % 1:
        return None
    n = {name: int(r[name]) for name in whole}
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
    """Its accelerators and links, with what was fitted of its software and its network."""
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


def as_engine(points: Sequence[Point]) -> Runs:
    """The points as if shoal's engine had run them: what it keeps, overlaps and cuts by cost, by what its software is
    said to do; the constants that they are known by stay."""
    own = software_table()["shoal"]
    facts = {name: getattr(own, name) for name in (*FACTS, "overlap_tensor", "reduced_apart")} | {"ties_first": 0}
    return Runs.of([point.run | facts for point in points])


@dataclass(frozen=True)
class EstimatedSteps:
    """Steps by `shoal estimate`.

    Attributes:
        points: that it can express.
        seconds: its own.
        closed: by the closed forms, as if shoal's engine had run them.
    """

    points: Sequence[Point]
    seconds: np.ndarray
    closed: np.ndarray

    @property
    def apart(self) -> float:
        """Median of how far the two are apart."""
        return float(np.median(np.abs(self.seconds / self.closed - 1)))


def played(points: Sequence[Point], constants: Calibration, most: int = 200) -> EstimatedSteps:
    """Those of quality A with a time that `shoal estimate` can express; where they are many, evenly drawn from them."""
    runs = [(p, run_of(p, constants)) for p in points if p.seconds and p.quality == "A"]
    found = [(p, run) for p, run in runs if run is not None]
    found = found[:: max(1, len(found) // most)]
    seconds = np.array([Estimate(run).step_seconds for _, run in found])
    chosen = [p for p, _ in found]
    return EstimatedSteps(chosen, seconds, step(as_engine(chosen), constants).seconds if chosen else seconds)
