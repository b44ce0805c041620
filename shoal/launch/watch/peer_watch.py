"""Ranks of one host under torch elastic or SLURM: they watch each other, and the next attempt finds what ended them.

These launchers notice exits but not hangs, and no process of shoal outlives the ranks. So the ranks of a host keep
their heartbeats in a shared folder, with the exception that ended each. A thread of each rank checks the next rank's
heartbeat, and one rank's thread checks whether any makes progress. A lost rank is reported with its stack and killed,
and the launcher restarts the ranks. A host that is gone without closing its connections, or whose only rank is stopped,
finds nothing itself: a rank that waits for it is killed after some time, so that the launcher forms the next round. The
ranks of the next attempt gather the records of their hosts and name the rank that caused the failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from shoal.base.errors import UsageError
from shoal.base.files import read_json
from shoal.launch.rank_env import RankEnv, failure_path
from shoal.launch.watch import watchdog
from shoal.launch.watch.rank_failure import Failure
from shoal.launch.watch.recordings import keep_recordings
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.events import describe_recordings, write_event
from shoal.training.resilience.heartbeat import Phase, read, record_path
from shoal.training.resilience.owned_folders import is_private

LOOK_SECONDS = 0.5
PATIENCE = 3  # looks, one each `failover.progress_timeout_seconds`, at which all ranks here wait for another host
FOLDER_PREFIX = f"shoal-beats-{os.getuid()}-"
LEFT_SECONDS = 60.0  # minimum age of abandoned records before they are removed


def make_shared_folder(member: RankEnv) -> Path | None:
    """Create and return the shared folder of this host's ranks in this round; None if it cannot be trusted.

    Removes the folders of earlier rounds of this job, and of jobs that were killed.
    """
    folder = round_folder(member)
    if member.local_rank == 0:
        others = Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")
        for other in [*job_folders(), *filter(_is_abandoned, others)]:
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if is_private(folder) else None


def round_folder(member: RankEnv) -> Path:
    """Return the folder of this host's records in this round, named by job, port, attempt and world size."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("SLURM_STEP_ID", "0"))
    name = f"{_prefix()}{member.master[1]}-{attempt}-{member.world_size}"
    return Path(tempfile.gettempdir()) / name


def job_folders() -> list[Path]:
    """Return the folders of this host's records in all rounds of this job."""
    return [found for found in Path(tempfile.gettempdir()).glob(f"{_prefix()}*") if is_private(found)]


def _prefix() -> str:
    return f"{FOLDER_PREFIX}{os.environ.get('SLURM_JOB_ID') or os.getppid()}-"


def ended_path(folder: Path, rank: int) -> Path:
    return folder / f"ended-{rank}"


def _is_abandoned(folder: Path) -> bool:
    """Return whether all processes with records in the folder are gone and have been silent for long.

    The clock is shared with containers. (After a reboot, the last heartbeat is in the future.)
    """
    try:
        records = [record for path in folder.glob("beat-*") if (record := read(path)) is not None]
        made = time.time() - folder.stat().st_mtime
    except (OSError, ValueError):  # being removed, or not a folder of shoal
        return False
    silent = all(not 0 <= time.monotonic() - record.alive < LEFT_SECONDS for record in records)
    gone = all(watchdog.process_state(record.pid)[0] in ("", "Z") for record in records)
    return is_private(folder) and made > LEFT_SECONDS and silent and gone


class PeerWatch:
    """Watcher of the other ranks of this host, in a thread that runs until the process ends."""

    def __init__(self, member: RankEnv, folder: Path, limits: FailoverConfig, run_folder: Path):
        self.member, self.folder, self.run_folder = member, folder, run_folder
        self.dog = watchdog.Watchdog(limits)
        threading.Thread(target=self._watch, name="neighbours", daemon=True).start()

    def leave(self) -> None:
        """Remove the shared folder after the end of the run on this host."""
        if self.member.local_rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        unheard = 0  # looks in a row at which all ranks here waited for another host
        while True:
            time.sleep(LOOK_SECONDS)
            signs = {rank: self._observe(rank) for rank in self.member.neighbours()}
            living = {rank: sign.record for rank, sign in signs.items() if sign.record and sign.state not in ("", "Z")}
            trouble = self.dog.look(signs, time.monotonic(), silent=self._next(living))
            if trouble is None or (trouble.rank < 0 and self.member.local_rank):  # one rank handles stuck ranks
                unheard = 0
                continue
            if gone := trouble.rank < 0 and unheard == PATIENCE:
                trouble = replace(trouble, trouble="waits for another host, whose ranks are silent,")
            lost = watchdog.locate_lost_rank(trouble, living, self.folder, self.run_folder / "logs", alone=gone)
            if lost is None:
                # The lost rank is on another host, whose ranks find it, unless that host is gone with its connections.
                unheard += 1
                time.sleep(self.dog.limits.progress_timeout_seconds)
            else:
                self._end(lost)

    def _observe(self, rank: int) -> watchdog.Sign:
        record = read(record_path(self.folder, rank))
        if record is None or record.phase is Phase.DONE:
            return watchdog.Sign(None, "", 0.0)
        return watchdog.Sign(record, *watchdog.process_state(record.pid))

    def _next(self, living: Container[int]) -> list[int]:
        """Return the next living rank, which this rank watches; ranks may have had no work or have exited."""
        ranks, own = self.member.neighbours(), self.member.local_rank + 1
        return [rank for rank in (*ranks[own:], *ranks[: own - 1]) if rank in living][:1]

    def _end(self, lost: Failure) -> None:
        lost = replace(lost, recordings=keep_recordings(self.run_folder))
        print(f"rank {lost.rank} {lost.how}{lost.where}\n{lost.report}", file=sys.stderr, flush=True)
        if lost.recordings:
            print(describe_recordings(self.run_folder, lost.recordings, lost.rank), file=sys.stderr, flush=True)
        ended_path(self.folder, lost.rank).touch()
        write_event(self.run_folder, "failure", **lost.event())
        assert lost.record is not None  # it was found by its record
        os.kill(lost.record.pid, signal.SIGKILL)


# ---- the previous attempt --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LastState:
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
    port, _, world_size = folder.name.split("-")[-3:]
    host, since_epoch = socket.gethostname(), time.time() - time.monotonic()
    every = []
    for path in sorted(folder.glob("beat-*")):
        rank, record = int(path.name.rpartition("-")[2]), read(path)
        if record is None:
            continue
        recorded: dict[str, Any] = {}
        with contextlib.suppress(UsageError):  # most often there is none
            recorded = read_json(failure_path(folder, rank))
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
