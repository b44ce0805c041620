"""Search for layouts of other software than shoal: all of them, priced together in closed form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from shoal.base.errors import UsageError
from shoal.planning.cost.batched_runs import SCHEDULES, Runs, describe_layout, describe_row
from shoal.planning.cost.memory.published_software import footprint
from shoal.planning.cost.time.step import step
from shoal.planning.run import EstimatedRun
from shoal.planning.search.kinds import Shelf
from shoal.planning.search.plan import Plan, PricedLayout, Progressing
from shoal.planning.search.space import Fields, LayoutSpace, build_layout, meshes, pipelines, shardings, works
from shoal.planning.software_estimate import SoftwareEstimate
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.software import Software
from shoal.spec.layout import Layout

AXES = ("tp", "cp", "ep", "pp")
"""Axes that not all software has."""


def search_software(
    run: EstimatedRun, space: LayoutSpace, *, diverse: bool, within: float = inf, progress: Progressing | None = None
) -> Plan:
    """Find the fastest layouts that fit, of those with a closed form; see `shoal.planning.search.search.search`.

    Only what the software has is searched: its axes, its ZeRO stages, 1F1B and interleaved stages, zero bubbles where
    it has them. Context parallelism is one kind.
    """
    _check_fixed(run.software, space)
    begin, constants, plan = time.perf_counter(), cluster_calibration(run.cluster, run.software.name), Plan(run)
    space = replace(
        space, schedules=tuple(name for name in run.software.schedules if name in SCHEDULES), uneven=False
    )
    shelf = Shelf(run, diverse=diverse, within=within)
    every = list(meshes(run, space))
    for done, degrees in enumerate(every, 1):
        found = list(_layouts(run, degrees, space))
        if not found:
            continue
        rows = [describe_layout(layout, run.software, run.global_batch) for layout in found]
        runs = Runs.vary(describe_row(run), {name: np.array([row[name] for row in rows]) for name in rows[0]})
        plan.branches += len(found)
        fits = np.flatnonzero(footprint(runs, constants).fits)
        seconds = step(runs.take(fits), constants).seconds if len(fits) else np.zeros(0)
        for i in np.argsort(seconds, kind="stable"):
            if seconds[i] > shelf.limit:
                break
            layout = found[fits[i]]
            if seconds[i] <= shelf.limits[shelf.level(layout)].max():
                estimate = SoftwareEstimate(replace(run, layout=layout))
                shelf.keep(PricedLayout(float(seconds[i]), layout, estimate.fullest), estimate.capacity)
        if progress:
            progress(done, len(every), plan)
    plan.best = shelf.list()
    plan.played, plan.seconds = plan.branches, time.perf_counter() - begin
    return plan


def _check_fixed(software: Software, space: LayoutSpace) -> None:
    """Raise a `UsageError` if a fixed field of the layout is none that the software has."""
    for name, value in space.fixed.items():
        has: tuple[Any, ...] = {"zero": software.zero_stages, "schedule": software.schedules}.get(name, (value,))
        if name in AXES and not software.has(**{name: value}):
            has = (1,)
        if value not in has:
            raise UsageError(
                f"--fix {name}={value}: {software.name} has no such layouts.\n  Give {name} = "
                f"{' or '.join(map(str, has))}, or leave it out."
            )


def _layouts(run: EstimatedRun, degrees: Fields, space: LayoutSpace) -> Iterator[Layout]:
    """Yield the layouts of a mesh."""
    if degrees["ulysses"] > 1 or degrees["tp"] > run.cluster.per_node:
        return  # the closed forms do not distinguish the first; tensor parallelism stays inside a node
    if not run.software.has(**{axis: degrees[axis] for axis in AXES}):
        return
    shards = [s for s in shardings(degrees, space) if s["zero"] in run.software.zero_stages]
    shards = [s for s in shards if s.get("reshard_after_forward", True)]
    for work in works(run, degrees, space):
        microbatches = run.global_batch // (degrees["dp"] * work["micro_batch"])
        for pipe in pipelines(degrees["pp"], microbatches, run.shape.layers, space):
            each = pipe["virtual_stages"] or 1
            if not run.software.splits(run.shape.layers, degrees["pp"] * each, each=each):
                continue
            for shard in shards:
                yield build_layout(space, degrees, work, pipe, shard)
