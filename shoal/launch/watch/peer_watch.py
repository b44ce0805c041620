"""Ranks that torch elastic or SLURM started watch each other: their launcher sees an end, but not one that hangs.

The ranks of one host keep their heartbeats in a folder that they share. A thread of each judges the next rank by its
signs of life, and one of them judges all by whether any makes progress. A lost rank is reported with its stack and
killed, and the launcher restarts the ranks. A rank that is alone on its host can be found stuck, but not stopped.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path

from shoal.launch.rank_env import RankEnv
from shoal.launch.watch import watchdog
from shoal.launch.watch.rank_failure import Failure
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.events import write_event
from shoal.training.resilience.heartbeat import Phase, read, record_path
from shoal.training.resilience.host_memory_dir import is_private

LOOK_SECONDS = 0.5
EVERYONES = f"shoal-beats-{os.getuid()}-"
LEFT_SECONDS = 60.0
"""For which records that nobody keeps any more are left alone."""


def make_shared_folder(member: RankEnv, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of this host's ranks in this round, made if need be; None where it cannot be trusted.

    What earlier rounds of this job left is removed, and what jobs left that were killed.
    """
    folder = round_folder(member, environment)
    if member.local_rank == 0:
        others = Path(tempfile.gettempdir()).glob(f"{EVERYONES}*")
        for other in [*job_folders(environment), *filter(_is_left, others)]:
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if is_private(folder) else None


def round_folder(member: RankEnv, environment: Mapping[str, str] = os.environ) -> Path:
    """Where this host's ranks keep their records in this round, named by the job, the attempt and the port."""
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", environment.get("SLURM_STEP_ID", "0"))
    name = f"{_prefix(environment)}{member.meeting_point[1]}-{attempt}-{member.world_size}"
    return Path(tempfile.gettempdir()) / name


def job_folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Those of this host's ranks in all rounds of this job."""
    return [found for found in Path(tempfile.gettempdir()).glob(f"{_prefix(environment)}*") if is_private(found)]


def _prefix(environment: Mapping[str, str]) -> str:
    return f"{EVERYONES}{environment.get('SLURM_JOB_ID') or os.getppid()}-"


def ended_path(folder: Path, rank: int) -> Path:
    """What is there when a neighbour has ended a rank."""
    return folder / f"ended-{rank}"


def _is_left(folder: Path) -> bool:
    """Whether each process that kept its record there is gone and long silent, by a clock that containers share too.
    (After a reboot, its last sign lies in the future.)"""
    try:
        records = [record for path in folder.glob("beat-*") if (record := read(path)) is not None]
        made = time.time() - folder.stat().st_mtime
    except (OSError, ValueError):  # being removed, or no such folder as ours
        return False
    silent = all(not 0 <= time.monotonic() - record.alive < LEFT_SECONDS for record in records)
    gone = all(watchdog.process_state(record.pid)[0] in ("", "Z") for record in records)
    return is_private(folder) and made > LEFT_SECONDS and silent and gone


class PeerWatch:
    """Watches from a thread of this rank, until the process ends.

    Args:
        folder: `make_shared_folder`.
        run_folder: where lost ranks are recorded as events.
    """

    def __init__(self, member: RankEnv, folder: Path, limits: FailoverConfig, run_folder: Path):
        self.member, self.folder, self.run_folder = member, folder, run_folder
        self.ranks = list(member.neighbours())
        self.dog = watchdog.Watchdog(limits, len(self.ranks))
        threading.Thread(target=self._watch, name="neighbours", daemon=True).start()

    def leave(self) -> None:
        """The run is over on this host: forget it."""
        if self.member.local_rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            records = [read(record_path(self.folder, rank)) for rank in self.ranks]
            signs = [
                watchdog.Sign(None, "", 0.0) if record is None or record.phase is Phase.DONE
                else watchdog.Sign(record, *watchdog.process_state(record.pid))
                for record in records
            ]
            there = {i: sign.record for i, sign in enumerate(signs) if sign.record and sign.state not in ("", "Z")}
            trouble = self.dog.look(signs, time.monotonic(), silent=self._next(there))
            if trouble is None or (trouble.rank < 0 and self.member.local_rank):  # one judges for all
                continue
            first = self.ranks[0]
            if trouble.rank >= 0:
                trouble = replace(trouble, rank=first + trouble.rank)
            living = {first + i: record for i, record in there.items()}
            lost = watchdog.locate_lost_rank(trouble, living, self.folder, alone=False)
            if lost is None:
                time.sleep(self.dog.limits.stall_seconds)  # for a rank of another host, whose neighbours will see it
            else:
                self._end(lost)

    def _next(self, there: Container[int]) -> list[int]:
        """The one that this rank looks after: the next that is there; some may have had no work, or be gone."""
        own, n = self.member.local_rank, len(self.ranks)
        return [i for i in ((own + k) % n for k in range(1, n)) if i in there][:1]

    def _end(self, lost: Failure) -> None:
        print(f"rank {lost.rank} {lost.how}{lost.where}\n{lost.report}", file=sys.stderr, flush=True)
        ended_path(self.folder, lost.rank).touch()
        write_event(self.run_folder, "failure", **lost.event())
        assert lost.record is not None  # it gave none, and was found by it
        os.kill(lost.record.pid, signal.SIGKILL)
