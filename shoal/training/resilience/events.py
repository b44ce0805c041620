"""The events of a run: a line of JSON for each failure, restart and recovery, in ``events.jsonl`` of its folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from shoal.base.files import json_lines, read_json_lines

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
        os.write(end, json_lines([line]).encode())  # in one piece, so that no other line gets between
    finally:
        os.close(end)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events, in order, without lines that were being written when the machine went down."""
    return read_json_lines(folder / FILE_NAME, dict, "event", skip_torn=True)
