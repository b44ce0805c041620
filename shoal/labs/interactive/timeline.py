"""The timeline panel: one simulated step of any pipeline schedule, with its bubble and its live activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.schedules.file import load_csv
from shoal.pipeline.simulator.compare import AUTOMATIC, compare_schedules, schedule_name
from shoal.report.page import pack_column, pack_timeline, paint_colours
from shoal.report.timeline.chart import legend
from shoal.report.timeline.schedules import schedule_chart, schedule_lines

MOST_RANKS, MOST_MICROBATCHES, MOST_VIRTUAL, MOST_SLICES = 64, 128, 8, 16
MOST_TEXT = 1 << 18  # of a pasted schedule
SLICED = ("gpipe", "terapipe")
"""Schedules for which the panel offers slices of the sequence."""


class TimelineRequest(Section):
    """One schedule and the costs of its passes, in units of one micro-batch's forward through a rank."""

    csv: Annotated[str, Field(max_length=MOST_TEXT)] = ""
    """A schedule as torch.distributed.pipelining writes it, in the place of a named one and of the sizes below."""

    schedule: str = "1f1b"
    pp: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 4
    microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)] = 8
    virtual_stages: Annotated[int, Field(ge=1, le=MOST_VIRTUAL)] = 2
    slices: Annotated[int, Field(ge=1, le=MOST_SLICES)] = 1
    forward: NonNegativeFloat = 1.0
    backward_input: NonNegativeFloat = 1.0
    backward_weight: NonNegativeFloat = 1.0
    link: NonNegativeFloat = 0.0


def play_timeline(request: TimelineRequest) -> dict[str, Any]:
    """Simulate one step.

    Settings that the schedule does not read (virtual stages, slices) are left out.

    Returns:
        The numbers of the step, times in units of the forward; ``columns`` has the actions as packed columns
        (`shoal.report.page.pack_timeline`) and ``paints`` their colours.

    Raises:
        UsageError: an unknown schedule, or sizes that it does not allow.
    """
    name = "pasted" if request.csv else schedule_name(request.schedule)
    pasted = load_csv(request.csv, name) if request.csv else None
    if pasted and (pasted.ranks > MOST_RANKS or pasted.microbatches > MOST_MICROBATCHES):
        raise UsageError(f"the pasted schedule has {pasted.ranks} ranks and {pasted.microbatches} micro-batches; at "
                         f"most {MOST_RANKS} and {MOST_MICROBATCHES} are played")
    chosen = name in EVERY and EVERY[name].virtual is None
    (played,) = compare_schedules(
        [] if pasted else [name], file=pasted, pp=request.pp, microbatches=request.microbatches,
        virtual_stages=request.virtual_stages if chosen else None,
        slices=request.slices if name in SLICED else None, forward=request.forward,
        backward_input=request.backward_input, backward_weight=request.backward_weight, comm=request.link,
    )  # fmt: skip
    chart, timeline = schedule_chart(played, seconds=False), played.timeline
    paints = chart.paints
    return {
        "source": EVERY[name].source if name in EVERY else "" if pasted else "Qi et al. 2024, section 3.1",
        "step_time": timeline.step_time,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "peak_live": timeline.peak_live.tolist(),
        "share": timeline.ranks / timeline.columns.program.depth,
        "peak_microbatches": float(timeline.peak_live.max()) * timeline.ranks / timeline.columns.program.depth,
        "ranks": timeline.ranks,
        "microbatches": timeline.columns.program.microbatches,
        "closed_form": " ".join(schedule_lines([played])),
        "paints": [{**paint_colours(paint), "name": paint.name} for paint in paints],
        "legend": [[paints.index(paint), words] for paint, words in legend([chart])],
        **pack_timeline(chart, paints),
        "name": name,
        "sent": pack_column(timeline.messages.start[chart.kind], "f4"),
        "arrived": pack_column(timeline.messages.end[chart.kind], "f4"),
    }


def list_schedules() -> dict[str, Any]:
    """List the schedules that can be played, with the settings that each reads."""
    names = dict.fromkeys([*EVERY, *AUTOMATIC])
    return {
        "schedules": [
            {"name": name, "virtual_stages": name in EVERY and EVERY[name].virtual is None, "slices": name in SLICED}
            for name in names
        ]
    }


def record_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of a saved page: every schedule, with the costs that the panel begins with."""
    yield "schedules", {}
    first = TimelineRequest(link=0.1)
    for schedule in list_schedules()["schedules"]:
        yield "timeline", {**first.model_dump(), "schedule": schedule["name"]}
