"""Keep what the ranks of a failed attempt have recorded, before the next attempt replaces it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shoal.training.records.profile import FOLDER

PROFILES = ("rank-*.jsonl", "trace-rank-*.json.gz")
COLLECTIVES = ("collectives-*.json", "nccl-*")


def keep_recordings(run_folder: Path) -> tuple[str, ...]:
    """Collect the recordings of an attempt in a new folder ``logs/failure-N`` of a run.

    These are traces of torch's profiler and profiles of steps, which stay where they are too (as links, by which those
    of an earlier attempt are recognised), and the newest collectives of stuck ranks by torch's flight recorder.

    Returns:
        Their names in the run folder; nothing if there are none, or if the disk is full.
    """
    logs, kept, folder = run_folder / "logs", list[str](), None
    profiles = sorted(path for name in PROFILES for path in (run_folder / FOLDER).glob(name))
    collectives = sorted(path for name in COLLECTIVES for path in logs.glob(name) if path.is_file())
    earlier = set[int]()
    for path in logs.glob("failure-*/*rank-*"):
        with suppress(OSError):
            earlier.add(path.stat().st_ino)
    for path in (*profiles, *collectives):
        with suppress(OSError):  # another host may have taken it
            if path.stat().st_ino in earlier:
                continue
            folder = folder or _make_next(logs)
            (os.link if path in profiles else os.rename)(path, folder / path.name)
            kept.append(str((folder / path.name).relative_to(run_folder)))
    return tuple(kept)


def _make_next(logs: Path) -> Path:
    """Make the next folder; several hosts may make theirs at once."""
    number = 0
    while True:
        number += 1
        folder = logs / f"failure-{number}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
