"""Run events: one JSON line per failure, restart or recovery, in ``events.jsonl`` of the run folder."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from shoal.base.files import json_lines, read_json_lines
from shoal.base.journal import Journal

FILE_NAME = "events.jsonl"


def write_event(folder: Path, event: str, **values: Any) -> None:
    """Append one line (``failure``, ``restart``, ...) with JSON values, except None; safe for concurrent processes.

    On a full disk it waits for the next event (`Journal`).
    """
    line = {"time": round(time.time(), 3), "event": event} | {k: v for k, v in values.items() if v is not None}
    _journal(folder / FILE_NAME).append(json_lines([line]))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return all events in order, without lines that a crash of the machine truncated."""
    return read_json_lines(folder / FILE_NAME, dict, "event", skip_torn=True)


_journal = lru_cache(maxsize=64)(Journal)
