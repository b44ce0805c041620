"""Single layout changes that make a run faster, or make it fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.base.errors import UsageError
from shoal.planning.estimable import check_layout_on_cluster
from shoal.planning.estimate import Estimate, StepEstimate
from shoal.planning.software_estimate import estimate_run
from shoal.spec.layout import Layout
from shoal.spec.schedules import PAIRED

FASTER = 0.99  # maximum relative step time that counts as faster


def find_changes(estimate: StepEstimate, most: int = 4) -> list[tuple[str, StepEstimate]]:
    """Find the most useful layout changes, each with the estimate of the changed run.

    A change qualifies if the run then fits and is faster. If the run does not fit, any change that makes it fit
    qualifies.

    Args:
        most: maximum number of changes to return, fastest first.
    """
    known = estimate.known if isinstance(estimate, Estimate) else None
    run, found = estimate.run, list[tuple[str, StepEstimate]]()
    for name, change in _single_changes(run.layout):
        layout = run.layout.model_copy(update=change)
        if layout.tp == 1:
            layout = layout.model_copy(update={"sequence_parallel": False, "tp_x": 1})
        possible = {None, *run.software.schedules, *run.software.zero_stages}
        if layout == run.layout or not {change.get("schedule"), change.get("zero")} <= possible:
            continue
        changed = replace(run, layout=layout)
        try:
            check_layout_on_cluster(changed)
            other = estimate_run(changed, known)
        except UsageError:
            continue
        faster = not estimate.fits or other.step_seconds < FASTER * estimate.step_seconds
        if faster and other.fits:  # the memory takes longer to estimate than the time
            found.append((name, other))
    return sorted(found, key=lambda change: (change[1].step_seconds, change[0]))[:most]


def _single_changes(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the changed fields of layouts that differ in one choice, each with the name of the change."""
    for n in _twice_and_half(layout.micro_batch):
        yield f"micro_batch {n}", {"micro_batch": n}
    for n in (0, 1, 3):
        if n != layout.zero and layout.dp > 1:
            yield f"zero {n}", {"zero": n}
    for mode in ("none", "selective", "full"):
        yield f"recompute {mode}", {"recompute": mode}
    for n in _twice_and_half(layout.ep):  # ranks of dp and cp, so their number stays
        yield f"ep {n}", {"ep": n}
    for axis in ("tp", "cp", "pp"):
        degree: int = getattr(layout, axis)
        for n in _twice_and_half(degree):
            dp, left = divmod(layout.dp * degree, n)
            if not left:
                yield f"{axis} {n}, dp {dp}", {axis: n, "dp": dp}
    if layout.tp > 1:
        yield "sequence_parallel", {"sequence_parallel": not layout.sequence_parallel}
        for n in _twice_and_half(layout.tp_x):
            yield f"tp_x {n}", {"tp_x": n}
    if layout.ep > 1 and layout.schedule in PAIRED:
        apart = layout.ep_overlap is False
        yield f"ep_overlap {'auto' if apart else 'false'}", {"ep_overlap": "auto" if apart else False}
    if layout.pp > 1:
        for schedule in ("interleaved-1f1b", "zb-h1"):
            yield f"schedule {schedule}", {"schedule": schedule}


def _twice_and_half(n: int) -> Iterator[int]:
    yield 2 * n
    if n > 1:
        yield n // 2
