"""Timelines as a trace for Perfetto and other viewers of Chrome's trace format.

The format is JSON ("Trace Event Format", Google 2016). Each rank is a process with a track of computations, one track
for each direction in which it sends, and a counter of live memory. A message is a slice on its sender's track and an
arrow to the computation that needs it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.base.files import write_atomically
from shoal.pipeline.program import Op
from shoal.report.timeline.chart import Chart

COMPUTE, TO_NEXT, TO_PREVIOUS = 1, 2, 3
TRACKS = {COMPUTE: "compute", TO_NEXT: "send activations", TO_PREVIOUS: "send gradients"}


def write_trace(path: Path, charts: Sequence[Chart]) -> None:
    """Write a trace; gzipped if the name ends in .gz, which Perfetto also reads."""
    text = json.dumps({"traceEvents": list(events(charts)), "displayTimeUnit": "ms"}, separators=(",", ":"))
    data = text.encode()
    write_atomically(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def events(charts: Sequence[Chart]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace. Times are in microseconds; a unit other than the second counts as a millisecond."""
    first, arrow = 0, 0
    for chart in charts:
        for rank in range(chart.timeline.ranks):
            yield from _names(chart, first + rank, rank, several=len(charts) > 1)
        yield from _actions(chart, first)
        yield from _alive(chart, first)
        yield from _messages(chart, first, arrow)
        first += chart.timeline.ranks
        arrow += len(chart.timeline.messages.source)


def _names(chart: Chart, process: int, rank: int, *, several: bool) -> Iterator[dict[str, Any]]:
    name = f"{chart.name}, {chart.lane} {rank}" if several else f"{chart.lane} {rank}"
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for track, title in TRACKS.items():
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": title}}
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _actions(chart: Chart, first: int) -> Iterator[dict[str, Any]]:
    columns, rank = chart.timeline.columns, chart.timeline.columns.rank
    for row in range(columns.rows):
        action = columns.action(row)
        numbers = zip(("stage", "microbatch", "part", "version"), action[1:], strict=True)
        yield {
            "ph": "X",
            "pid": first + int(rank[row]),
            "tid": COMPUTE,
            "ts": _time(chart, chart.start[row]),
            "dur": _time(chart, chart.end[row] - chart.start[row]),
            "name": chart.paints[chart.paint[row]].name,
            "cat": "compute",
            "args": {"action": str(action)} | {name: number for name, number in numbers if number >= 0},
        }


def _alive(chart: Chart, first: int) -> Iterator[dict[str, Any]]:
    what = "live activations" if chart.activation is None else "live activation bytes"
    for rank, (times, values) in enumerate(chart.live):
        for time, value in zip(times.tolist(), values.tolist(), strict=True):
            at = _time(chart, time)
            yield {"ph": "C", "pid": first + rank, "tid": 0, "ts": at, "name": what, "args": {"alive": value}}


def _messages(chart: Chart, first: int, arrow: int) -> Iterator[dict[str, Any]]:
    """Yield each message as a slice of its sender, with an arrow to the start of its consumer."""
    messages, columns = chart.timeline.messages, chart.timeline.columns
    starts, ends = messages.start[chart.kind], messages.end[chart.kind]
    for i, (source, target, consumer) in enumerate(
        zip(messages.source.tolist(), messages.target.tolist(), messages.consumer.tolist(), strict=True)
    ):
        action = columns.action(consumer)
        forward = action.op is Op.FORWARD
        track = TO_NEXT if forward else TO_PREVIOUS
        what = "activations" if forward else "gradients"
        begin = _time(chart, starts[i])
        common = {"name": f"{what} to {chart.lane} {target}", "cat": "message"}
        yield {
            "ph": "X", "pid": first + source, "tid": track, "ts": begin, "dur": _time(chart, ends[i] - starts[i]),
            "args": {"microbatch": action.microbatch}, **common,
        }  # fmt: skip
        yield {"ph": "s", "pid": first + source, "tid": track, "ts": begin, "id": arrow + i, **common}
        at = _time(chart, chart.start[consumer])
        yield {"ph": "f", "bp": "e", "pid": first + target, "tid": COMPUTE, "ts": at, "id": arrow + i, **common}


def _time(chart: Chart, time: float) -> float:
    return round(float(time) * (1e6 if chart.seconds else 1e3), 4)
