"""Run events: one JSON line per failure, restart or recovery, in ``events.jsonl`` of the run folder."""

from __future__ import annotations

import json
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
    """Return all events in order, without damaged ones."""
    return read_json_lines(folder / FILE_NAME, _parse, "event")


def _parse(event: dict[str, Any]) -> dict[str, Any]:
    json.dumps(event, ensure_ascii=False).encode()  # raises ValueError for what is not Unicode
    if type(event["event"]) is not str:
        raise ValueError("not the name of an event")
    numbers = [event["time"], *(event[name] for name in SUMMED.get(event["event"], ()))]
    if not all(type(number) in (int, float) and 0 <= number <= LATEST for number in numbers):
        raise ValueError("wrong numbers")
    return event


SUMMED = {"end": ("seconds", "counted", "failures", "lost"), "recovered": ("seconds",)}
"""Numbers that a report sums over events."""

LATEST = 2.0**37  # seconds since 1970, in the year 6325: the last times that every calendar shows


_journal = lru_cache(maxsize=64)(Journal)
