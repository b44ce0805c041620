"""Find what ended the previous attempt under torch elastic and SLURM, where no process of shoal outlives the ranks.

Each rank leaves its last heartbeat in the shared folder of its host (`shoal.launch.watch.peer_watch`), with the
exception that ended it. The ranks of the next attempt gather the records of their hosts and name the rank that caused
the failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shoal.launch.rank_env import RankEnv, record_path
from shoal.launch.watch.peer_watch import ended_path, job_folders, round_folder
from shoal.training.resilience.heartbeat import Phase, read


@dataclass(frozen=True)
class LastState:
    """Last known state of one rank of an attempt."""

    attempt: str  # port and size of the rendezvous, equal on all hosts
    world_size: int
    rank: int
    host: str
    ended: float  # time of the recorded end or the last heartbeat [s since the epoch]
    where: str
    step: int | None
    done: bool
    report: str  # exception that it raised; "" if it ended without a traceback
    usage: bool  # whether the exception was bad input
    reported: bool  # whether another rank killed it and recorded the failure


def read_previous_attempt(member: RankEnv) -> list[LastState]:
    """Read the records of this host's ranks from the previous attempt. Call before this attempt creates its folder."""
    made = {}  # creation time by folder, without this round's, which a faster rank may have created
    for folder in job_folders():
        with contextlib.suppress(FileNotFoundError):  # another rank of this round is removing it
            if folder != round_folder(member):
                made[folder] = folder.stat().st_mtime
    if member.how == "torchrun":  # the folder's process id may be a reused one
        begun = psutil.Process(os.getppid()).create_time()
        made = {folder: when for folder, when in made.items() if when >= begun}
    newest = max(made, key=made.__getitem__, default=None)
    return read_records(newest) if newest else []


def read_records(folder: Path) -> list[LastState]:
    """Read the records of all ranks in a folder."""
    port, _, world_size = folder.name.split("-")[-3:]
    host, since_epoch = socket.gethostname(), time.time() - time.monotonic()
    every = []
    for path in sorted(folder.glob("beat-*")):
        rank, record = int(path.name.rpartition("-")[2]), read(path)
        if record is None:
            continue
        recorded: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            recorded = json.loads(record_path(folder, rank).read_text())
        every.append(LastState(
            f"{port} {world_size}", int(world_size), rank, host, since_epoch + recorded.get("when", record.alive),
            record.where, record.steps if record.begun >= 0 else None, record.phase is Phase.DONE,
            recorded.get("report", ""), recorded.get("usage", False), ended_path(folder, rank).exists(),
        ))
    return every


def find_cause(every: list[LastState]) -> dict[str, Any] | None:
    """Find the rank that ended the newest attempt, as event values; None if none did or it was already reported.

    A rank that raised may only have lost a peer. More likely causes are a rank that ended without an exception and one
    without any record; among several, the first is taken.
    """
    if not every:
        return None
    newest = max(every, key=lambda last: last.ended).attempt
    every = [last for last in every if last.attempt == newest]
    failed = [last for last in every if not last.done]
    if not failed or any(last.reported for last in failed):
        return None
    absent = sorted(set(range(every[0].world_size)) - {last.rank for last in every})
    silent = [last for last in failed if not last.report]
    if absent and not silent:
        return {"rank": absent[0], "how": "left no record: its host is gone, or no longer takes part"}
    first = min(silent or failed, key=lambda last: last.ended)
    how = "raised an exception" if first.report else "exited without a traceback (killed or disconnected)"
    return {"rank": first.rank, "host": first.host, "how": how, "where": first.where, "step": first.step,
            "report": first.report or None}
