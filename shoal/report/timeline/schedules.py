"""Charts of simulated schedules, and their comparison with closed forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shoal.base.files import write_atomically
from shoal.base.units import show_seconds
from shoal.pipeline.schedules.file import dump_csv
from shoal.pipeline.simulator.compare import PlayedSchedule
from shoal.pipeline.simulator.theory import THEORY
from shoal.report.timeline.chart import Chart


def schedule_chart(played: PlayedSchedule, *, seconds: bool, tp: int = 1) -> Chart:
    """Return a chart of the slowest replica; ``seconds`` if its times are in seconds, ``tp`` ranks move together."""
    timeline, columns = played.timeline, played.timeline.columns
    share = columns.ranks / columns.program.depth
    facts = {
        "slowest rank's bubble": f"{100 * timeline.bubble_of_slowest_rank:.1f} %",
        "alive, in micro-batches": f"{share * timeline.peak_live.max():.3g}",
    }
    if len(timeline.replicas) > 1:
        facts["replicas that differ"] = f"{len(timeline.replicas)} of {timeline.replicas.sum()}"
    lane = "pp" if tp * timeline.replicas.sum() > 1 else "rank"
    slowest = int(np.argmax(timeline.own_span.max(axis=1)))
    return Chart(played.name, timeline, kind=slowest, seconds=seconds, facts=facts, lane=lane)


def schedule_lines(every: Sequence[PlayedSchedule]) -> Iterator[str]:
    """Yield the closed forms of each schedule beside the simulated values, and the estimate's values."""
    for played in every:
        if played.step and played.name in THEORY:
            yield _theory(played)
    for played in every:
        if played.estimated_seconds is not None:
            yield f"{played.name}: shoal estimate predicts {show_seconds(played.estimated_seconds)} a step"


def list_schedule_values(every: Sequence[PlayedSchedule]) -> list[dict[str, object]]:
    """Return each schedule's simulated step as plain values: times in the units given, ranks along the pipeline."""
    return [
        {
            "schedule": played.name, "step_time": played.timeline.step_time, "bubble": played.timeline.bubble,
            "idle": played.timeline.idle.tolist(), "peak_live": played.timeline.peak_live.tolist(),
            "estimated_seconds": played.estimated_seconds,
        }
        for played in every
    ]  # fmt: skip


def write_schedule(path: Path, played: PlayedSchedule) -> None:
    """Write a schedule's computations as a CSV file that `shoal.pipeline.schedules.file` reads.

    Raises:
        UsageError: the format cannot express it.
    """
    write_atomically(path, dump_csv(played.timeline.columns.program))


def _theory(played: PlayedSchedule) -> str:
    theory, step, timeline = THEORY[played.name], played.step, played.timeline
    assert step is not None
    if not theory.holds(step):
        return f"{played.name}: the closed form needs {theory.needs} ({theory.source})"
    idle = float((timeline.idle if theory.flushed else timeline.stall).max())
    alive = timeline.peak_live.max()
    return (
        f"{played.name}: simulated: idle {idle:.4g}, {alive:.4g} alive; "
        f"by the closed form: {theory.idle(step):.4g}, {theory.alive(step)} ({theory.source})"
    )
