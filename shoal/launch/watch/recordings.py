"""Keep what the ranks of a failed attempt have recorded, before the next attempt replaces it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shoal.training.records.profile import FOLDER


def keep_recordings(run_folder: Path) -> tuple[str, ...]:
    """Collect the recordings of an attempt in a new folder ``logs/failure-N`` of a run.

    These are traces of torch's profiler and profiles of steps, which stay where they are too (as links, by which those
    of an earlier attempt are recognised), and the newest collectives of stuck ranks by torch's flight recorder.

    Returns:
        Their names in the run folder; nothing if there are none, or if the disk is full.
    """
    logs, kept = run_folder / "logs", list[str]()
    with suppress(OSError):
        profiles = sorted(path for path in (run_folder / FOLDER).glob("*rank-*") if path.stat().st_nlink == 1)
        every = (*logs.glob("collectives-*.json"), *logs.glob("nccl-*"))
        collectives = sorted(path for path in every if path.is_file())
        folder = _make_next(logs) if profiles or collectives else logs
        for path in (*profiles, *collectives):
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
