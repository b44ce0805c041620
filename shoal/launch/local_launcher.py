"""Start the ranks of a run on this machine, watch them, and find which one was the cause of a failure.

The parent does no training: it starts one process per rank (`shoal.launch.prefork`), watches them and forwards requests
to stop. The ranks meet in a file, so nothing listens but gloo or NCCL themselves, on the loopback interface.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from shoal.base.errors import redact
from shoal.launch.prefork import PreforkServer, PreforkServerEnded, Process, end_processes, local_environment
from shoal.launch.rank_env import record_path
from shoal.launch.watch import watchdog
from shoal.launch.watch.rank_failure import Ending, Failure
from shoal.spec.config import FailoverConfig
from shoal.training.resilience import heartbeat
from shoal.training.resilience.heartbeat import HeartbeatRecord, Phase
from shoal.training.stop import PREEMPTED, StopRequests

PRELOADED = (
    "shoal.launch.preload", "shoal.training.trainer", "shoal.training.async_dp.trainers", "shoal.training.check",
    "torch.utils.tensorboard",
)
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL for the peers of a rank that died, where the cause may yet show
POLL_SECONDS = 0.05
LOOK_SECONDS = 0.1  # between looks at the signs of life
TAIL_LINES = 30


def start_rank_server(ranks: int, log_folder: Path, device: str) -> PreforkServer:
    """The process that will fork so many ranks."""
    return PreforkServer(local_environment(ranks, device), log_folder / "prefork.log", PRELOADED)


def rank_environment(rank: int, ranks: int, scratch: Path, device: str) -> dict[str, str]:
    """The variables of one local rank: those of all, its place, where the ranks meet and who restarts it."""
    return {
        **local_environment(ranks, device),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "SHOAL_SCRATCH": str(scratch),
        "SHOAL_OWNER": str(os.getpid()),
    }


class RankProcesses:
    """The ranks of one attempt, as their parent sees them.

    Args:
        scratch: new; where the ranks meet, and keep their records and ``payload.json``.
        stop: passed on to the ranks.
        server: what forks them.
        limits: how long a rank may be silent.
        survivable: the ranks go on without one that a signal ended, but not without rank 0.
        notice: called with the records of all ranks, every now and then.
        started: called with the process ids of the server and the ranks, and ``scratch``, once all are started.
    """

    def __init__(
        self,
        log_folder: Path,
        scratch: Path,
        device: str,
        stop: StopRequests,
        server: PreforkServer,
        limits: FailoverConfig,
        *,
        survivable: bool = False,
        notice: Callable[[list[HeartbeatRecord | None]], None] = lambda records: None,
        started: Callable[[int, Path, list[int]], None] = lambda server, scratch, ranks: None,
    ):
        self.log_folder, self.scratch, self.device, self.survivable = log_folder, scratch, device, survivable
        self.stop, self.server, self.limits, self.notice, self.started = stop, server, limits, notice, started
        self.header = f"---- started {time.strftime('%Y-%m-%d %H:%M:%S')} by process {os.getpid()} ----\n"
        self.processes: list[Process] = []
        self.lost: Failure | None = None  # a rank that was ended
        self._passed = 0  # requests to stop that the ranks know of
        self._looked = 0.0

    def run(self, module: str, ranks: int, environment: Mapping[str, str]) -> Ending:
        """Start so many ranks and wait for their end."""
        self.watchdog = watchdog.Watchdog(self.limits, ranks)
        try:
            for rank in range(ranks):
                if self.stop.count:
                    break
                self._start(module, rank, ranks, environment)
            self.started(self.server.pid, self.scratch, [process.pid for process in self.processes])
            return self._watch()
        except (PreforkServerEnded, OSError) as error:
            cause = Failure(len(self.processes), 1, time.monotonic(), str(error), "could not be started")
            return Ending(1, cause, -1)
        finally:
            end_processes(self.processes)
            if sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)  # rank 0's progress bar hid the cursor, if it was killed

    def _start(self, module: str, rank: int, ranks: int, environment: Mapping[str, str]) -> None:
        variables = {**rank_environment(rank, ranks, self.scratch, self.device), **environment}
        with open(self._log(rank), "a") as log:  # what an earlier launch said before it died stays
            log.write(self.header)
        self.processes.append(self.server.start(module, variables, self._log(rank), heard=rank == 0))

    def _watch(self) -> Ending:
        ended = self._ended()
        while len(ended) < len(self.processes) and not self._failed():
            self._pass_on()
            self._look()
            time.sleep(POLL_SECONDS)
            ended |= self._ended()
        self._look(at_once=True)
        furthest = max((record.steps for record in self._records() if record and record.begun >= 0), default=-1)
        if not self._failed():
            for rank, process in enumerate(self.processes):
                if process.returncode and process.returncode != PREEMPTED:
                    print(f"rank {rank} {self._failure(rank).how}; the others went on without it", file=sys.stderr)
            return Ending(self._code(), None, furthest)
        ended |= self._ended()  # once more: the cause ended first, but was perhaps looked at just before
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while len(self._ended()) < len(self.processes) and time.monotonic() < deadline:
            # A process closes its connections before it counts as ended, so that its peers may end first.
            ended |= self._fallen()
            if any(self._failure(rank).sure for rank in ended & self._bad()):
                break
            time.sleep(POLL_SECONDS)
        ended |= self._fallen()
        end_processes(self.processes)
        # Those that ended after our signals count only if they had recorded an exception of their own.
        failures = [self._failure(rank) for rank in range(len(self.processes))]
        bad = self._bad()
        cause = min((f for f in failures if f.rank in bad and (f.rank in ended or f.report)), key=lambda f: f.order)
        return Ending(cause.code if cause.code > 0 else (128 - cause.code if cause.code else 1), cause, furthest)

    def _code(self) -> int:
        """Of an attempt that did not fail."""
        if all(process.returncode == 0 for process in self.processes) and self.processes:
            return 0
        stopped = any(process.returncode == PREEMPTED for process in self.processes) or not self.processes
        if not stopped or (self.stop.count and not self.stop.preempted):
            return 0
        return PREEMPTED

    # ---- how ranks end -----------------------------------------------------------------------------------------

    def _bad(self) -> set[int]:
        """The ranks that ended otherwise than they should."""
        return {rank for rank, process in enumerate(self.processes) if process.returncode is not None and (
            process.returncode not in (0, PREEMPTED) or self._early(rank)
        )}

    def _early(self, rank: int) -> bool:
        """Whether a rank went as if it were done, and is not. One without a record makes no promises."""
        record = heartbeat.read(heartbeat.record_path(self.scratch, rank))
        return record is not None and record.phase is not Phase.DONE

    def _failed(self) -> bool:
        """Whether a rank has ended in a way that ends the run."""
        survived = self.survivable and not self.stop.count
        return any(not (survived and rank and self.processes[rank].wait() < 0) for rank in self._bad())

    def _ended(self) -> set[int]:
        return {rank for rank, process in enumerate(self.processes) if process.poll() is not None}

    def _fallen(self) -> set[int]:
        """Those that ended of themselves, whatever was asked of them: by another signal than ours, or as if done."""
        codes = {rank: self.processes[rank].wait() for rank in self._ended()}
        return {
            rank for rank, code in codes.items()
            if (code < 0 and code != -signal.SIGTERM) or (code == 0 and self._early(rank))
        }

    def _failure(self, rank: int) -> Failure:
        code, record = self.processes[rank].wait(), heartbeat.read(heartbeat.record_path(self.scratch, rank))
        if self.lost and rank == self.lost.rank:
            return replace(self.lost, code=code)
        path = record_path(self.scratch, rank)
        if not path.exists():
            return Failure(rank, code, float("inf"), "", record=record)
        recorded = json.loads(path.read_text())
        return Failure(rank, code, recorded["when"], recorded["report"], record=record)

    def print_cause(self, ending: Ending) -> None:
        """Show the cause of a failure on stderr, unless it was asked for."""
        cause = ending.cause
        if cause is None or (self.stop.count and cause.code in (-signal.SIGTERM, -signal.SIGKILL)):
            return
        if ending.usage:  # its message is all there is to say
            print(f"shoal: error: {cause.report.rstrip()}", file=sys.stderr)
            return
        others = "; the other ranks were stopped" if len(self.processes) > 1 else ""
        log = self._log(cause.rank)
        said = log.read_text(errors="replace").rpartition(self.header)[2]
        report = cause.report or redact("\n".join(said.splitlines()[-TAIL_LINES:]))
        print(f"rank {cause.rank} {cause.how}{cause.where}{others}. Its log: {log}", file=sys.stderr)
        if report.strip():
            print(report.rstrip(), file=sys.stderr)

    # ---- signs of life -----------------------------------------------------------------------------------------

    def _records(self) -> list[HeartbeatRecord | None]:
        return [heartbeat.read(heartbeat.record_path(self.scratch, rank)) for rank in range(len(self.processes))]

    def _look(self, *, at_once: bool = False) -> None:
        """Every now and then: tell who wants to know, and end a rank that is lost."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS and not at_once:
            return
        self._looked = now
        records = self._records()
        self.notice(records)
        signs = [
            watchdog.Sign(record if process.poll() is None else None, *watchdog.process_state(process.pid))
            for process, record in zip(self.processes, records, strict=True)
        ]
        # One that was ended may be there for a while yet: asked again, it would give no stack.
        if not at_once and not self.lost and (trouble := self.watchdog.look(signs, now)):
            living = {rank: sign.record for rank, sign in enumerate(signs) if sign.record}
            self.lost = watchdog.locate_lost_rank(trouble, living, self.scratch)
            assert self.lost is not None  # all ranks are here
            self.processes[self.lost.rank].send_signal(signal.SIGKILL)

    # ---- signals -----------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Requests to stop: the first one asks, the second one ends."""
        if self.stop.count > self._passed:
            self._passed = self.stop.count
            self._send(signal.SIGTERM if self._passed == 1 else signal.SIGKILL)

    def _send(self, signum: int) -> None:
        for process in self.processes:
            process.send_signal(signum)  # nothing is sent to one that has ended

    def _log(self, rank: int) -> Path:
        return self.log_folder / f"rank-{rank}.log"
