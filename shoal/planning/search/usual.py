"""The usual layout of a model, as published for a model of its size: what a plan is compared with."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log
from typing import Any

from shoal.base.errors import UsageError, divisors
from shoal.planning.estimable import check_layout_on_cluster
from shoal.planning.run import EstimatedRun
from shoal.planning.search.plan import PricedLayout
from shoal.planning.software_estimate import estimate_run
from shoal.spec.catalog.tables import shipped
from shoal.spec.layout import Layout


def find_usual(run: EstimatedRun) -> PricedLayout | None:
    """Return the usual layout with its cost, also if it does not fit; None for experts, or if no such layout can run.

    It has the tensor-parallel ranks and the stages of the published model nearest in size, or fewer stages where these
    do not divide the devices or the software does not split the layers so; 1F1B, ZeRO-1 (or the lowest stage that the
    software has), sequence parallelism, one sequence per micro-batch, and the least recomputation that fits.
    """
    shape, size = run.shape, run.cluster.size
    if shape.experts:
        return None
    published: Any = shipped("usual_layouts")["layouts"]
    near = min(published, key=lambda row: abs(log(row["parameters"] / shape.parameters())))
    software, found = run.software, None
    tp = max(n for n in divisors(near["tp"]) if n <= run.cluster.per_node and software.has(tp=n))
    possible = (n for n in range(near["pp"], 0, -1) if software.has(pp=n) and software.splits(shape.layers, n))
    stages = [n for n in possible if size % (tp * n) == 0]
    for pp, recompute in product(stages[:1], ("none", "selective", "full")):
        dp = size // (tp * pp)
        layout = Layout.model_validate({
            "dp": dp, "tp": tp, "sequence_parallel": tp > 1, "pp": pp, "recompute": recompute,
            "zero": software.least_sharding if dp > 1 else 0,
        })  # fmt: skip
        try:
            check_layout_on_cluster(replace(run, layout=layout))
            estimate = estimate_run(replace(run, layout=layout))
        except UsageError:
            return found
        found = PricedLayout(estimate.step_seconds, layout, estimate.fullest, "usual")
        if estimate.fits:
            return found
    return found
