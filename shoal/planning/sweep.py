"""Estimates of one run with one number varied: a degree of the layout, the batch, the sequence, or the nodes."""

from __future__ import annotations

import re
from typing import Any

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import validate
from shoal.engine.collectives.position import MeshPosition
from shoal.pipeline.from_layout import build_layout_program
from shoal.planning.cost.counts import RankCounts
from shoal.planning.describe import estimate
from shoal.planning.estimate import Estimate, StepEstimate
from shoal.spec.catalog.clusters import cluster
from shoal.spec.layout import Layout

DEGREES = ("tp", "cp", "ep", "pp", "zero", "zero_shard", "virtual_stages", "micro_batch")
CHANGE_RANKS = ("nodes", "tp", "cp", "pp")
SWEPT = ("nodes", "sequence_length", "global_batch", *DEGREES)
"""What can be varied. Replicas fill the cluster, so dp follows from the numbers that `CHANGE_RANKS`, also where the
layout gives it."""


def sweep(text: str, layout: Layout, **run: Any) -> tuple[str, list[tuple[int, StepEstimate | str]]]:
    """Estimate a run for each value of one of its numbers.

    Args:
        text: the name and its values, as ``tp=1,2,4,8``.
        run: arguments of `shoal.estimate`.

    Returns:
        The name, and for each value the estimate, or why there is none.

    Raises:
        UsageError: an unknown name, a bad value, or no value that can be estimated.

    >>> name, found = sweep("tp=1,3,8", Layout(zero=3), model="llama-3-8b", cluster="8xH100")
    >>> [(tp, each.run.layout.dp if isinstance(each, StepEstimate) else "refused") for tp, each in found]
    [(1, 8), (3, 'refused'), (8, 1)]
    """
    name, _, values = text.replace("-", "_").partition("=")
    if name not in SWEPT:
        allowed = did_you_mean(name, SWEPT)
        raise UsageError(f"--sweep {text}: {allowed}\n  Give a name and values, as tp=1,2,4,8; dp follows from nodes.")
    if not re.fullmatch("[0-9]{1,12}(,[0-9]{1,12})*", values):
        raise UsageError(f"--sweep {text}: give integers with commas, as {name}=1,2,4")
    found: list[tuple[int, StepEstimate | str]] = []
    for value in sorted({int(each) for each in values.split(",")}):
        changed, arguments = layout, run | ({"fill": True} if name in CHANGE_RANKS else {})
        try:
            if name in DEGREES:
                fields = layout.model_dump(exclude_unset=True) | {name: value}
                if fields.get("tp", 1) == 1:
                    fields["sequence_parallel"] = False
                changed = validate(Layout, fields, source="--sweep")
            elif not value:
                raise UsageError("at least 1 is needed")
            elif name == "nodes":
                arguments["cluster"] = cluster(run["cluster"]).part(value)
            else:
                arguments[name] = value
            found.append((value, estimate(changed, **arguments)))
        except UsageError as error:
            found.append((value, str(error)))
    if not any(isinstance(each, StepEstimate) for _, each in found):
        raise UsageError(f"--sweep {text}: no value can be estimated. The first: {found[0][1]}")
    return name, found


def network_intensity(estimated: StepEstimate) -> float | None:
    """Return a device's model FLOPs over the bytes that rank 0 sends; None if it sends nothing, or is not counted."""
    if not isinstance(estimated, Estimate):
        return None
    run, sent = estimated.run, sum(count_sent(estimated).values())
    flops = run.tokens * run.shape.flops_per_token(run.sequence_length) / run.layout.world_size
    return flops / sent if sent else None


def count_sent(estimated: Estimate) -> dict[tuple[str, str], float]:
    """Return the bytes that rank 0 sends in a step, by group and kind of collective."""
    run = estimated.run
    program = build_layout_program(run.layout, run.microbatches)
    by_parts = run.layout.overlaps_products(background=run.cluster.at_once is None)
    return RankCounts(estimated.forward, program, MeshPosition(run.layout, 0), run.policy, by_parts=by_parts).sent()
