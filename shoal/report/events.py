"""Events of a run for its report: failures, restarts, recoveries, and the effective training time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

Events = Sequence[dict[str, Any]]

OWN_COLUMN = ("time", "event", "rank", "step", "report")
LEFT_OUT = ("end", "restart")  # shown in the facts, and by the events that follow


def effective_facts(events: Events) -> list[tuple[str, str]]:
    """Return the effective training time and its losses, as (name, value), over all completed starts of the run."""
    ends = [event for event in events if event["event"] == "end"]
    if not ends:
        return []
    seconds, counted, failures, lost = (
        sum(event[name] for event in ends) for name in ("seconds", "counted", "failures", "lost")
    )
    facts = [("effective training time", f"{counted / max(seconds, 1e-9):.1%}")]
    if failures:
        facts += [("failures", f"{failures}"), ("repeated steps", f"{lost}")]
    recoveries = [event["seconds"] for event in events if event["event"] == "recovered"]
    if recoveries:
        facts.append(("seconds to recover (mean)", f"{sum(recoveries) / len(recoveries):.1f}"))
    return facts


def event_table(events: Events) -> list[list[str]]:
    """Return the headings, then a row for each event that is not shown elsewhere."""
    rows = [["when", "what", "rank", "step", "how"]]
    for event in events:
        if event["event"] in LEFT_OUT:
            continue
        how = ", ".join(_show(name, value) for name, value in event.items() if name not in OWN_COLUMN)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        rows.append([when, event["event"], *(str(event.get(name, "–")) for name in ("rank", "step")), how])
    return rows


def _show(name: str, value: object) -> str:
    if name in ("how", "where"):
        return str(value)
    return f"{name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
