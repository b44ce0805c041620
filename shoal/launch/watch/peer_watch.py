"""Ranks that torch elastic or SLURM started look after each other: those see a process that ended, not one that hangs.

The ranks of one host keep their records (`shoal.training.resilience.heartbeat`) in a folder that they share. A thread
of each judges the next one by its signs of life, and one of them all by whether any gets on; who is lost is told, with
its stack, and killed, whereupon whoever started the ranks starts them again. A rank that is alone on its host can be
found stuck, but not stopped: there is nobody to see it.
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
from pathlib import Path

from shoal.base.errors import redact
from shoal.launch.rank_env import Membership, stack_path
from shoal.launch.watch import watchdog
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.events import write_event
from shoal.training.resilience.heartbeat import Phase, read, record_path
from shoal.training.resilience.host_memory_dir import is_private

LOOK_SECONDS = 0.5
EVERYONES = f"shoal-beats-{os.getuid()}-"
LEFT_SECONDS = 60.0
"""For which records that nobody keeps any more are left alone."""


def shared_folder(member: Membership, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of this host's ranks in this round, made if need be; None where it cannot be trusted.

    Rounds differ by who started them, by the attempt, or by the port where they meet. What earlier rounds of this job
    left is removed, and what jobs left that ended without a word.
    """
    folder = folder_of(member, environment)
    if member.local_rank == 0:
        others = Path(tempfile.gettempdir()).glob(f"{EVERYONES}*")
        for other in [*folders(environment), *filter(_is_left, others)]:
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if is_private(folder) else None


def folder_of(member: Membership, environment: Mapping[str, str] = os.environ) -> Path:
    """Where this host's ranks keep their records in this round."""
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", environment.get("SLURM_STEP_ID", "0"))
    name = f"{_prefix(environment)}{member.meeting_point[1]}-{attempt}-{member.world_size}"
    return Path(tempfile.gettempdir()) / name


def folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Those of this host's ranks in all rounds that whoever started this one has started."""
    return [found for found in Path(tempfile.gettempdir()).glob(f"{_prefix(environment)}*") if is_private(found)]


def _prefix(environment: Mapping[str, str]) -> str:
    return f"{EVERYONES}{environment.get('SLURM_JOB_ID') or os.getppid()}-"


def ended_path(folder: Path, rank: int) -> Path:
    """What is there when a neighbour has ended a rank."""
    return folder / f"ended-{rank}"


def _is_left(folder: Path) -> bool:
    """Whether no process keeps its records there any more: each is gone and has long given no sign, by a clock that
    containers with processes of their own share too. (Of an earlier boot, a sign lies in the future.)"""
    try:
        records = [record for path in folder.glob("beat-*") if (record := read(path)) is not None]
        made = time.time() - folder.stat().st_mtime
    except (OSError, ValueError):  # being removed, or no such folder as ours
        return False
    silent = all(not 0 <= time.monotonic() - record.alive < LEFT_SECONDS for record in records)
    gone = all(watchdog.process_state(record.pid)[0] in ("", "Z") for record in records)
    return is_private(folder) and made > LEFT_SECONDS and silent and gone


class Neighbours:
    """Watches from a thread of this rank, until the process ends.

    Args:
        folder: `shared_folder`.
        run_folder: whose events are told of a rank that is lost.
    """

    def __init__(self, member: Membership, folder: Path, limits: FailoverConfig, run_folder: Path):
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
            asked = {trouble.rank: there[trouble.rank]} if trouble.rank >= 0 else there
            found = watchdog.stacks(
                {i: record.pid for i, record in asked.items()},
                {i: stack_path(self.folder, self.ranks[i]) for i in asked}, wake=trouble.rank >= 0,
            )
            if trouble.rank < 0 and all(map(watchdog.waits, found.values())):
                time.sleep(self.dog.limits.stall_seconds)  # for a rank of another host, whose neighbours will see it
                continue
            lost = trouble.rank if trouble.rank >= 0 else watchdog.who_is_stuck(found, there)
            self._end(lost, trouble, there[lost].where, there[lost].steps, found[lost])
            os.kill(there[lost].pid, signal.SIGKILL)

    def _next(self, there: Container[int]) -> list[int]:
        """The one that this rank looks after: the next that is there; some may have had no work, or be gone."""
        own, n = self.member.local_rank, len(self.ranks)
        return [i for i in ((own + k) % n for k in range(1, n)) if i in there][:1]

    def _end(self, lost: int, trouble: watchdog.Trouble, where: str, step: int, stack: str) -> None:
        how = f"{trouble.what} since {time.monotonic() - trouble.since:.1f} s and was ended,"
        rank, host, stack = self.ranks[lost], watchdog.host(), redact(stack)
        print(f"rank {rank} {how} {where} (on {host})\n{stack}", file=sys.stderr, flush=True)
        ended_path(self.folder, rank).touch()
        write_event(self.run_folder, "failure", rank=rank, host=host, how=how, where=where, step=step, report=stack)
