"""Run events: one JSON line per failure, restart or recovery, in ``events.jsonl`` of the run folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from shoal.base.files import json_lines, read_json_lines

FILE_NAME = "events.jsonl"


def write_event(folder: Path, event: str, **values: Any) -> None:
    """Append one line (``failure``, ``restart``, ...) with JSON values, except None; safe for concurrent processes."""
    line = {"time": round(time.time(), 3), "event": event} | {k: v for k, v in values.items() if v is not None}
    end = os.open(folder / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(end, json_lines([line]).encode())  # in one write, so that lines do not interleave
    finally:
        os.close(end)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return all events in order, without lines that a crash of the machine truncated."""
    return read_json_lines(folder / FILE_NAME, dict, "event", skip_torn=True)
