"""`shoal simulate`: simulate schedules side by side, draw them, and compare them with published results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from json import dumps
from typing import Any

from rich.console import Console

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.base.terminal import wrap_lines
from shoal.cli.simulate_options import SimulateOptions
from shoal.report.timeline.schedules import list_schedule_values, schedule_chart, schedule_lines, write_schedule
from shoal.report.timeline.terminal import show
from shoal.report.timeline.write import KINDS, write

ESTIMATED = (
    "forward", "backward_input", "backward_weight", "pair", "comm", "latency", "reduce", "step", "kept_for_weight",
    "csv", "memory", "slices",
)
"""Options without effect if times are estimated."""
FOR_ESTIMATES = ("model", "catalog", "micro_batch", "sequence_length", "precision")
"""Options that only have an effect if times are estimated."""


def run(options: SimulateOptions) -> int:
    """Simulate, print and draw; return the exit code."""
    if options.check:
        return _check(options)
    schedule = options.out is not None and options.out.suffix == ".csv"  # which people edit: it is not overwritten
    check_writable(options.out, "--out", *KINDS, ".csv", new=schedule)
    _reject_unread(options)
    names = [options.schedule or ("" if options.csv else "1f1b"), *options.compare.split(",")]
    names = [name for name in names if name]
    sizes = options.model_dump(include={"pp", "microbatches", "virtual_stages", "dp", "tp"})
    disturbance: dict[str, Any] = {
        "stragglers": {rank: factor for (rank,), factor in _factors("straggler", options.straggler, "RANK=FACTOR")},
        "slow_links": {(a, b): factor for (a, b), factor in _factors("slow-link", options.slow_link, "A-B=FACTOR")},
        "jitter": options.jitter, "seed": options.seed, "blocking": options.blocking,
    }  # fmt: skip
    if options.cluster:
        if options.catalog:
            shoal.add_catalog(options.catalog)
        given = options.model_dump(include={*FOR_ESTIMATES} - {"catalog"})
        played = shoal.compare_schedules_on_cluster(names, options.cluster, **given, **sizes, **disturbance)
    else:
        given = options.model_dump(include={*ESTIMATED} - {"csv"})
        played = shoal.compare_schedules(names, file=options.csv, **given, **sizes, **disturbance)
    if options.out and schedule:
        write_schedule(options.out, played[0])
    seconds = options.seconds or bool(options.cluster)
    charts = [schedule_chart(one, seconds=seconds, tp=options.tp) for one in played]
    if options.json_:
        print(dumps({"schedules": list_schedule_values(played)}))
    else:
        show(Console(), charts)
        for line in wrap_lines(schedule_lines(played)):
            print(line)
    if options.out and not schedule:
        columns = played[0].timeline.columns
        lead = f"{columns.ranks} pipeline ranks, {columns.program.microbatches} micro-batches, simulated."
        write(options.out, charts, title="Pipeline schedules", lead=lead)
    if options.out and not options.json_:
        print(f"written: {options.out}")
    return 0


def _check(options: SimulateOptions) -> int:
    """Compare with published bubble rates."""
    others = [name for name in SimulateOptions.model_fields if name != "check"]
    reject_unused(options, others, "--check compares what its own table describes")
    from shoal.labs.validate import published_bubbles

    assert options.check is not None
    lines, error = published_bubbles.compare_printed(published_bubbles.read_printed(options.check))
    print("\n".join([*lines, f"mean absolute error: {error:.3f} percentage points"]))
    return 0


def _factors(option: str, given: Sequence[str], form: str) -> list[tuple[tuple[int, ...], float]]:
    """Parse ``3=1.5`` and ``0-1=2`` into ranks and their factor."""
    ranks = "-".join([r"(\d+)"] * (1 + form.count("-")))
    example = form.replace("RANK", "3").replace("A-B", "0-1").replace("FACTOR", "1.5")
    found = []
    for text in ",".join(given).split(",") if given else []:
        match = re.fullmatch(rf"{ranks}=(\d+\.?\d*|\.\d+)", text.strip())
        if match is None:
            raise UsageError(f"--{option} {text}: give {form}, as {example}")
        *who, factor = match.groups()
        found.append((tuple(map(int, who)), float(factor)))
    return found


def _reject_unread(options: SimulateOptions) -> None:
    """Reject options without effect."""
    if options.cluster:
        reject_unused(options, ESTIMATED, "with --cluster, the times come from the estimate")
    else:
        reject_unused(options, FOR_ESTIMATES, "only with --cluster, whose times come from the estimate")
    if not (options.comm + options.latency or options.cluster):
        reject_unused(options, ("blocking",), "messages take no time; give --comm or --latency too")
    if not options.jitter:
        reject_unused(options, ("seed",), "only of --jitter")
    if options.csv:
        reject_unused(options, ("pp", "microbatches"), "--csv determines their number")
