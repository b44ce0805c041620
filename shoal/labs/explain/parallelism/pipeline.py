"""`shoal explain pipeline`: every schedule with its bubble, memory and messages, played by the simulator."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import NonNegativeFloat, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.labs.explain.options import FigureOptions
from shoal.pipeline.schedules import EVERY, SCHEDULES
from shoal.pipeline.simulator.compare import PlayedSchedule, compare_schedules, schedule_name
from shoal.pipeline.simulator.theory import THEORY
from shoal.report.charts import to_svg
from shoal.report.tables import text_table
from shoal.report.timeline.figure import draw_timelines
from shoal.report.timeline.schedules import schedule_chart
from shoal.report.timeline.terminal import show

HEADINGS = ("schedule", "step T", "bubble", "alive", "copies", "messages", "source")


class PipelineOptions(FigureOptions):
    """Bubble and memory of every schedule; a timeline."""

    schedule: str = "1f1b"
    """The schedule to draw."""

    pp: PositiveInt = 4
    """Pipeline ranks p."""

    microbatches: PositiveInt = 8
    """Micro-batches m of a step."""

    comm: NonNegativeFloat = 0.0
    """Time of a message, where the forward of a micro-batch through a rank takes 1 and its backward 2."""


def explain(options: PipelineOptions, console: Console) -> Callable[[], str]:
    """Print the table of schedules and a timeline. Returns a function that draws the timeline."""
    chosen = schedule_name(options.schedule)
    played, refused = {chosen: _play(chosen, options)}, dict[str, str]()
    for name in SCHEDULES:
        try:
            played[name] = _play(name, options)
        except UsageError as error:
            refused[name] = str(error).split("\n")[0]
    sizes = f"p = {options.pp} ranks, m = {options.microbatches} micro-batches"
    console.print(f"{sizes}; a forward takes 1 T, a backward 2 T", highlight=False)
    ranked = sorted(played.values(), key=lambda one: (one.timeline.step_time, float(one.timeline.peak_live.max())))
    console.print(text_table(HEADINGS, [_row(one) for one in ranked], words=(0, 6), gap=1))
    console.print("alive: most activations of a rank, in micro-batches of a p-th of the layers; copies: of weights")
    for name, reason in refused.items():
        console.print(f"{name}: {reason}", highlight=False, style="dim")
    console.print()
    chart = schedule_chart(played[chosen], seconds=False)
    show(console, [chart])
    return lambda: to_svg(draw_timelines([chart]))


def _play(name: str, options: PipelineOptions) -> PlayedSchedule:
    (played,) = compare_schedules([name], pp=options.pp, microbatches=options.microbatches, comm=options.comm)
    return played


def _row(played: PlayedSchedule) -> tuple[str, ...]:
    """Return a schedule's values; the unit of activations is a micro-batch's on a rank with a p-th of the layers."""
    timeline, program = played.timeline, played.timeline.columns.program
    share = program.ranks / program.depth
    source = EVERY[played.name].source if played.name in EVERY else THEORY[played.name].source
    return (
        played.name, f"{timeline.step_time:.4g}", f"{100 * timeline.bubble:.1f} %",
        f"{share * timeline.peak_live.max():.3g}", str(program.model_copies * int(timeline.weight_versions.max())),
        schedule_chart(played, seconds=False).summary()["messages"],
        source.split(":")[0].split(", ")[0],
    )  # fmt: skip
