"""Run events: one JSON line per failure, restart or recovery, in ``events.jsonl`` of the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from shoal.base.files import json_lines, read_json_lines
from shoal.base.journal import Journal

FILE_NAME = "events.jsonl"
SHOWN = 4  # names of recordings in a message


def write_event(folder: Path, event: str, **values: Any) -> None:
    """Append one line (``failure``, ``restart``, ...) with JSON values, except None; safe for concurrent processes.

    On a full disk it waits for the next event (`Journal`).
    """
    line = {"time": round(time.time(), 3), "event": event} | {k: v for k, v in values.items() if v is not None}
    _journal(folder / FILE_NAME).append(json_lines([line]))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return all events in order, without damaged ones."""
    return read_json_lines(folder / FILE_NAME, _parse, "event")


def describe_recordings(run_folder: Path, names: Iterable[str], rank: int) -> str:
    """Return a line that names the recordings of a failure, first what the rank that caused it has recorded."""
    files = sorted(names, key=lambda name: _get_rank(name) != rank)
    more = f", {len(files)} in all" if len(files) > SHOWN else ""
    return f"recorded before: {', '.join(str(run_folder / name) for name in files[:SHOWN])}{more}"


def _parse(event: dict[str, Any]) -> dict[str, Any]:
    json.dumps(event, ensure_ascii=False).encode()  # raises ValueError for what is not Unicode
    if type(event["event"]) is not str:
        raise ValueError("not the name of an event")
    if not all(type(name) is str for name in event.get("recordings", ())):
        raise ValueError("not the names of files")
    numbers = [event["time"], *(event[name] for name in SUMMED.get(event["event"], ()))]
    if not all(type(number) in (int, float) and 0 <= number <= LATEST for number in numbers):
        raise ValueError("wrong numbers")
    return event


def _get_rank(name: str) -> int:
    digits = "".join(filter(str.isdigit, Path(name).name.partition(".")[0]))
    return int(digits or -1)


SUMMED = {"end": ("seconds", "counted", "failures", "lost"), "recovered": ("seconds",)}
"""Numbers that a report sums over events."""

LATEST = 2.0**37  # seconds since 1970, in the year 6325: the last times that every calendar shows


_journal = lru_cache(maxsize=64)(Journal)
