"""Mesh axes of an estimated layout: where their groups lie, over which link they communicate, and what they send."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shoal.planning.cost.time.communication import axis_extent
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.sweep import count_sent

GROUPS = {
    "tp": ("tp", "tp_x", "tp_y"),
    "cp": ("cp", "ring", "ulysses", "sequence"),
    "ep": ("ep", "etp"),
    "dp": ("shard", "replicate", "dp", "replicas", "edp_shard", "edp_replicate", "edp"),
    "pp": ("pp",),
}
"""Axes of a layout, innermost first, with the groups that send on their behalf."""


def list_axes(estimate: Estimate) -> list[dict[str, Any]]:
    """Return each axis of more than one rank: its size and stride, its link, and the bytes that rank 0 sends a step.

    The bytes come from `RankCounts`, and a dry run counts the same.
    """
    run = estimate.run
    sent = count_sent(estimate)
    found = []
    for axis, groups in GROUPS.items():
        if getattr(run.layout, axis) == 1:
            continue
        ranks, stride = axis_extent(run.layout, axis)
        kinds = Counter[str]()
        for (name, kind), size in sent.items():
            if name.split(":")[0].split("/")[0] in groups:
                kinds[kind] += round(size)
        found.append({
            "axis": axis, "ranks": ranks, "stride": stride, "kinds": kinds.most_common(),
            **_describe_link(run, ranks, stride),
        })  # fmt: skip
    return found


def _describe_link(run: EstimatedRun, ranks: int, stride: int) -> dict[str, Any]:
    """Return the name and the bytes/s of the slowest link that a group's ring crosses, and the nodes that it spans."""
    cluster = run.cluster
    if cluster.inside is None:
        return {"link": "", "bandwidth": 0.0, "nodes": 1}
    if cluster.nic is None or cluster.torus or ranks * stride <= cluster.per_node:
        return {"link": cluster.inside.name, "bandwidth": cluster.inside.bandwidth, "nodes": 1}
    local = max(1, cluster.per_node // stride) if stride < cluster.per_node else 1
    share = cluster.nics * cluster.nic.bandwidth / cluster.per_node * local
    return {"link": cluster.nic.name, "bandwidth": min(share, cluster.inside.bandwidth), "nodes": -(-ranks // local)}

