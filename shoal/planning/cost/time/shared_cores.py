"""A step where ranks share cores, as those of one machine do that has no accelerators."""

from __future__ import annotations

from math import log2

import numpy as np

from shoal.pipeline.simulator import Timeline
from shoal.spec.catalog.calibration import calibration_of
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.layout import Layout


def on_cores(timeline: Timeline, layout: Layout, cluster: Cluster) -> float:
    """Seconds of a step.

    Every moment of it lasts as much longer as more ranks compute in it than there are cores: who waits leaves them to
    others. And whoever meets others in every layer or at the end waits for the last of them, which is late by chance
    (`stragglers`, which `shoal calibrate` measures).

    Args:
        timeline: the step as if each rank had a core of its own.
    """
    own = timeline.end[0] > timeline.start[0]
    own[timeline.pairs] = False
    begins, ends = timeline.start[0][own], timeline.end[0][own]
    times = np.concatenate([begins, ends])
    order = np.argsort(times, kind="stable")
    computing = np.cumsum(np.repeat([1, -1], [len(begins), len(ends)])[order])[:-1]
    crowded = np.maximum(1.0, computing * cluster.turns / timeline.ranks)
    meeting = layout.world_size // layout.pp
    late = 1 + calibration_of(cluster).numbers["stragglers"] * log2(meeting)
    return late * (float(times.min()) + float(np.diff(times[order]) @ crowded))
