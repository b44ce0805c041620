"""What happened to a run: a line of JSON for each failure, restart and recovery, in ``events.jsonl`` of its folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FILE_NAME = "events.jsonl"


def write_event(folder: Path, event: str, **values: Any) -> None:
    """Add one line; several processes may.

    Args:
        folder: of the run.
        event: what happened: ``failure``, ``restart``, ``recovered``, ``end``, ...
        values: fit for JSON; those that are None are left out.
    """
    line = {"time": round(time.time(), 3), "event": event} | {k: v for k, v in values.items() if v is not None}
    end = os.open(folder / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(end, json.dumps(line).encode() + b"\n")  # in one piece, so that no other line gets between
    finally:
        os.close(end)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events, in order; a line that is not whole was being written when the machine went down, and is left out."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
