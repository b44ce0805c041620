"""Start the ranks of a run on this machine, watch them, and find the rank that caused a failure.

The parent does not train: it starts one process per rank (`shoal.launch.prefork`), watches them and forwards stop
requests. The ranks rendezvous through a folder, so only gloo or NCCL open ports, on the loopback interface.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shoal.base.errors import redact
from shoal.base.files import read_json, read_tail
from shoal.base.journal import Journal
from shoal.base.terminal import warn
from shoal.launch.prefork import COMPILER, PreforkServer, PreforkServerEnded, end_processes, local_environment
from shoal.launch.rank_env import PLACE, failure_path
from shoal.launch.recovery.generations import LEAVE, LOG
from shoal.launch.watch import watchdog
from shoal.launch.watch.rank_failure import Ending, Failure
from shoal.spec.config import FailoverConfig, RunConfig
from shoal.training.resilience import heartbeat
from shoal.training.resilience.events import describe_recordings
from shoal.training.resilience.heartbeat import HeartbeatRecord, Phase
from shoal.training.stop import PREEMPTED, REGROUP, REQUESTED, StopRequests

PRELOADED = (
    "shoal.training.trainer", "shoal.training.async_dp.trainers", "shoal.training.check", "shoal.training.samples",
    "shoal.launch.rendezvous", "shoal.launch.watch.peer_watch", "shoal.launch.preload", "torch.utils.tensorboard",
)
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL of a dead rank's peers, in which the root cause may still be reported
HELD_SECONDS = 1.0  # in which a survivor leaves that is stopped or has not finished its start
POLL_SECONDS = 0.02  # between checks of the processes; the end of one is heard at once
RECOVERY_SECONDS = 0.005  # the same, while survivors leave, and until the end of the next step
LOOK_SECONDS = 0.1  # between checks of the heartbeats
TAIL_LINES, TAIL_BYTES = 30, 1 << 20  # of a rank's log, shown after its failure


def start_rank_server(config: RunConfig, device: str) -> PreforkServer:
    """Start the server that forks the ranks of a run on this machine."""
    environment = local_environment(config.parallel.world_size, device)
    return PreforkServer(environment, preload=[*PRELOADED, COMPILER], may_fork=device == "cpu")


class RankProcess:
    """Process of a rank, which takes orders through a pipe (`shoal.launch.recovery.generations`).

    Attributes:
        place: index of its device, which is its rank in the layout without losses; -1 for a spare.
        ready: file that a replacement creates once it can join; None for any other process.
    """

    def __init__(
        self, server: PreforkServer, module: str, environment: Mapping[str, str], log: Path, *, heard: bool
    ):
        self.place = -1
        self.ready: Path | None = None
        received, self._orders = os.pipe()
        try:
            self.process = server.start(module, environment, log, heard=heard, pipe=received)
        except BaseException:
            os.close(self._orders)
            raise
        finally:
            os.close(received)
        weakref.finalize(self, os.close, self._orders)
        self.pid, self.poll, self.wait = self.process.pid, self.process.poll, self.process.wait
        self.send_signal = self.process.send_signal

    @property
    def can_join(self) -> bool:
        """Whether it runs, and has tried its device if it is a replacement."""
        return self.poll() is None and (self.ready is None or self.ready.exists())

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def tell(self, order: Mapping[str, str]) -> None:
        """Send the environment of the next generation, or `LEAVE`; nothing if the process has ended."""
        with suppress(BrokenPipeError):
            os.write(self._orders, json.dumps(dict(order)).encode() + b"\n")


class RankProcesses:
    """Processes of the ranks of one attempt, managed by their parent.

    Args:
        scratch: new folder for rendezvous, heartbeat records and ``payload.json``.
        kept: processes of the previous attempt that take part again, by rank.
        spares: processes without a rank, of which the first ones replace those that are not kept.
        keeps: whether the survivors of a lost rank keep their processes (`survivors`).
        survivable: whether the ranks continue after a signal killed one other than rank 0.
        replace: called with the number of ranks that were lost, before their survivors leave.
        notice: called regularly with the heartbeat records of all ranks; returns whether it waits for a change.
        started: called once with the server's process id, ``scratch`` and the ranks' process ids.
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
        kept: Mapping[int, RankProcess] | None = None,
        spares: list[RankProcess] | None = None,
        keeps: bool = False,
        replace: Callable[[int], None] = lambda lost: None,
        notice: Callable[[list[HeartbeatRecord | None]], bool] = lambda records: False,
        started: Callable[[int, Path, list[int]], None] = lambda server, scratch, ranks: None,
    ):
        self.log_folder, self.scratch, self.device, self.survivable = log_folder, scratch, device, survivable
        self.stop, self.server, self.limits, self.notice, self.started = stop, server, limits, notice, started
        self.replace = replace
        self.header = f"---- started {time.strftime('%Y-%m-%d %H:%M:%S')} by process {os.getpid()} ----\n"
        self.kept, self.spares, self.keeps = dict(kept or {}), [] if spares is None else spares, keeps
        self.processes: list[RankProcess] = []
        self.survivors: dict[int, RankProcess] = {}  # after the loss of a rank: processes that can take part again
        self.lost: Failure | None = None  # rank killed by the watchdog
        self.asked_to_regroup = False
        self._seen: dict[int, float] = {}  # when the end of a rank was noticed
        self._outlived: set[int] = set()  # ranks that a signal killed, without which the others continue
        self._left_since = float("inf")  # since when a rank has left its groups
        self._passed = 0  # stop requests already forwarded to the ranks
        self._looked, self._waited_for = 0.0, False

    def run(self, module: str, ranks: int, environment: Mapping[str, str]) -> Ending:
        """Start the ranks and wait for their end."""
        self.watchdog, self._began = watchdog.Watchdog(self.limits), time.monotonic()
        try:
            for rank in sorted(range(ranks), key=self.kept.__contains__):  # new ones first, as they take longest
                if self.stop.count and not self.kept:
                    break  # those that are kept save their state first
                self._start(module, rank, ranks, environment)
            if not self.processes:
                return Ending(128 + signal.SIGTERM, None, -1)  # as if they had started and were ended
            self.started(self.server.pid, self.scratch, [process.pid for process in self.processes])
            return self._watch()
        except (PreforkServerEnded, OSError) as error:
            cause = Failure(rank, 1, time.monotonic(), str(error), "could not be started")
            return Ending(1, cause, -1)
        finally:
            all_processes = {*self.processes, *self.kept.values()}
            end_processes([each.process for each in all_processes - {*self.survivors.values()}])
            if sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)  # a killed rank 0 leaves the cursor hidden by its progress bar

    def _start(self, module: str, rank: int, ranks: int, environment: Mapping[str, str]) -> None:
        variables = {
            **local_environment(ranks, self.device), "RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "SHOAL_SCRATCH": str(self.scratch),
            "SHOAL_OWNER": str(os.getpid()), **environment,
        }
        log, moves = {LOG: str(self._log(rank))}, self.limits.shrink == "replicas"  # a process may take other ranks
        if (process := self.kept.get(rank)) is not None:
            process.tell(variables | ({PLACE: str(process.place)} | log if moves else {}))
        else:
            Journal(self._log(rank)).append(self.header)  # after the output of earlier launches
            while self.spares and process is None:
                if (spare := self.spares.pop(0)).poll() is None:
                    spare.tell(variables | log)
                    process = spare
        if process is None:
            given = variables | (log if moves else {})
            process = RankProcess(self.server, module, given, self._log(rank), heard=rank == 0 or moves)
        process.place = rank if process.place < 0 else process.place
        self.processes.insert(rank, process)

    def _watch(self) -> Ending:
        ended = self._ended()
        while len(ended) < len(self.processes) and not self._failed() and not self._regrouped():
            self._pass_on()
            self._look()
            self._end_if_apart()
            self._pause(RECOVERY_SECONDS if self._waited_for else POLL_SECONDS)
            ended |= self._ended()
        self._look(at_once=True)
        furthest = max((record.steps for record in self._records() if record and record.begun >= 0), default=-1)
        if self._regrouped():
            self.survivors = dict(enumerate(self.processes))
            return Ending(0, None, furthest, regrouped=True)
        if not self._failed():
            for rank, process in enumerate(self.processes):
                if process.returncode and process.returncode != PREEMPTED:
                    print(f"rank {rank} {self._failure(rank).how}; the others continued without it", file=sys.stderr)
            return Ending(self._code(), None, furthest)
        ended |= self._ended()  # again: the cause ended first, but may have been polled just before
        if self.keeps and any(self._failure(rank).sure for rank in ended & self._bad()):
            self._let_leave(len(ended & self._bad()))
        else:
            self._send(signal.SIGTERM)
            self._wait(GRACE_SECONDS, lambda: any(
                self._failure(rank).sure for rank in (ended | self._fallen()) & self._bad()
            ))
        ended |= self._fallen()
        survivors = {
            rank: process for rank, process in enumerate(self.processes) if process.poll() is None and self._left(rank)
        }
        end_processes([each.process for rank, each in enumerate(self.processes) if rank not in survivors])
        # Ranks that ended after our signals count only if they recorded an exception of their own.
        failures = [self._failure(rank) for rank in range(len(self.processes)) if rank not in survivors]
        bad = self._bad()
        causes = [f for f in failures if f.rank in bad and (f.rank in ended or f.report)]
        if self.keeps and any(cause.sure for cause in causes):
            self.survivors = survivors
        else:
            end_processes([each.process for each in survivors.values()])
            causes += [failure for rank in survivors if (failure := self._failure(rank)).report]
        cause = min(causes, key=lambda failure: failure.order)
        return Ending(cause.code if cause.code > 0 else (128 - cause.code if cause.code else 1), cause, furthest)

    def _let_leave(self, lost: int) -> None:
        """Tell the survivors of ``lost`` ranks to leave their groups, and wait until they have."""
        for process in self.processes:
            process.tell(LEAVE)
        self.replace(lost)
        begin = time.monotonic()
        self._wait(self.limits.recovery_timeout_seconds, lambda: not self._leaving(time.monotonic() - begin))

    def _leaving(self, waited: float) -> list[int]:
        """Return the survivors that may still leave after ``waited`` seconds; not stopped ones, and those that started,
        which have little to keep."""
        found = []
        for rank, process in enumerate(self.processes):
            record = self._record(rank)
            if process.poll() is not None or self._left(rank):
                continue
            held = record is None or record.phase is Phase.START or watchdog.process_state(process.pid)[0] in ("T", "t")
            if not held or waited < HELD_SECONDS:
                found.append(rank)
        return found

    def _wait(self, seconds: float, done: Callable[[], bool]) -> None:
        """Wait until all ranks have ended or left, or until ``done``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not done():
            if all(rank in self._seen or self._left(rank) for rank in range(len(self.processes))):
                break
            self._pause(RECOVERY_SECONDS)

    def _pause(self, seconds: float) -> None:
        """Wait for some seconds, or until the server reports the end of a process."""
        if not self.server.pid or not self.server.listen(seconds):
            time.sleep(seconds)

    def _left(self, rank: int) -> bool:
        """Return whether a rank has left its groups, after the loss of another."""
        record = self._record(rank)
        return record is not None and record.phase is Phase.LEFT

    def _regrouped(self) -> bool:
        """Return whether all ranks have left their groups because they were asked to."""
        return self.asked_to_regroup and all(
            process.poll() is None and self._left(rank) for rank, process in enumerate(self.processes)
        )

    def _code(self) -> int:
        stopped = any(process.returncode == PREEMPTED for process in self.processes)
        return PREEMPTED if stopped and not (self.stop.count and not self.stop.preempted) else 0

    def _bad(self) -> set[int]:
        """Return the ranks that ended abnormally, but those that the others continue without."""
        return {rank for rank, process in enumerate(self.processes) if process.returncode is not None and (
            process.returncode not in (0, PREEMPTED) or self._early(rank)
        )} - self._outlived

    def _early(self, rank: int) -> bool:
        """Return whether a rank exited normally before it was done; False without a heartbeat record."""
        record = self._record(rank)
        return record is not None and record.phase is not Phase.DONE

    def _failed(self) -> bool:
        now = time.monotonic()
        left = any(rank not in self._seen and self._left(rank) for rank in range(len(self.processes)))
        left = left and not self.asked_to_regroup
        self._left_since = min(self._left_since, now) if left else float("inf")
        if now > self._left_since + GRACE_SECONDS:  # connections were lost, though no rank has ended
            return True
        if self.survivable and not self.stop.count:
            self._outlived |= {rank for rank in self._bad() - {0} if self.processes[rank].wait() < 0}
        return bool(self._bad())

    def _ended(self) -> set[int]:
        ended = {rank for rank, process in enumerate(self.processes) if process.poll() is not None}
        for rank in ended:
            self._seen.setdefault(rank, time.monotonic())
        return ended

    def _fallen(self) -> set[int]:
        """Return ranks that ended for reasons of their own: by a signal other than ours, or by an early normal exit."""
        codes = {rank: self.processes[rank].wait() for rank in self._ended()}
        return {
            rank for rank, code in codes.items()
            if (code < 0 and code != -signal.SIGTERM) or (code == 0 and self._early(rank))
        }

    def _failure(self, rank: int) -> Failure:
        code, record = self.processes[rank].wait(), self._record(rank)
        if self.lost and rank == self.lost.rank:
            return replace(self.lost, code=code)
        path = failure_path(self.scratch, rank)
        if not path.exists():
            return Failure(rank, code, self._seen.get(rank, float("inf")), record=record)
        recorded = read_json(path)
        return Failure(
            rank, code, recorded["when"], recorded["report"], record=record, diverged=recorded.get("diverged", False)
        )

    def print_cause(self, ending: Ending) -> None:
        """Print the cause of a failure to stderr, unless the end was requested."""
        cause, sent = ending.cause, (-signal.SIGTERM, -signal.SIGKILL)[: self.stop.count]
        if cause is None or (cause.code in sent and not cause.trouble):
            return
        if ending.usage:  # the error message suffices
            warn(f"shoal: error: {cause.report.rstrip()}")
            return
        if cause.diverged:
            warn(cause.report.rstrip())
            return
        others = "; the other ranks were stopped" if len(self.processes) > 1 else ""
        if self.survivors:
            others = f"; {len(self.survivors)} of {len(self.processes)} ranks keep their processes"
        log = self._log(cause.rank)
        written = read_tail(log, TAIL_BYTES).rpartition(self.header)[2]
        report = cause.report or redact("\n".join(written.splitlines()[-TAIL_LINES:]))
        print(f"rank {cause.rank} {cause.how}{cause.where}{others}. Its log: {log}", file=sys.stderr)
        if report.strip():
            warn(report.rstrip())
        if cause.recordings:
            warn(describe_recordings(self.log_folder.parent, cause.recordings, cause.rank))

    def _records(self) -> list[HeartbeatRecord | None]:
        return [self._record(rank) for rank in range(len(self.processes))]

    def _record(self, rank: int) -> HeartbeatRecord | None:
        return heartbeat.read(heartbeat.record_path(self.scratch, rank))

    def _look(self, *, at_once: bool = False) -> None:
        """Regularly call ``notice`` and kill a lost rank."""
        now = time.monotonic()
        due = at_once or now - self._looked >= LOOK_SECONDS
        if not due and not self._waited_for:
            return
        records = self._records()
        self._waited_for = self.notice(records)
        if not due:
            return
        self._looked = now
        signs = {
            rank: watchdog.Sign(record, *watchdog.process_state(process.pid)) if process.poll() is None
            else watchdog.Sign(None, "", 0.0)
            for rank, (process, record) in enumerate(zip(self.processes, records, strict=True))
        }
        # A killed rank may not have exited yet; asked again, it would give no stack.
        if not at_once and not self.lost and (trouble := self.watchdog.look(signs, now)):
            living = {rank: sign.record for rank, sign in signs.items() if sign.record}
            self.lost = watchdog.locate_lost_rank(trouble, living, self.scratch, self.log_folder)
            assert self.lost is not None  # all ranks are on this host
            self.processes[self.lost.rank].send_signal(signal.SIGKILL)

    def _end_if_apart(self) -> None:
        """Give up kept processes that do not meet the new ones in time: the next attempt replaces all ranks."""
        limit = self.limits.recovery_timeout_seconds
        if not self.kept or self.lost or time.monotonic() - self._began < limit:
            return
        records = self._records()
        apart = [rank for rank, record in enumerate(records) if record is None or not record.joined]
        if apart:
            how = f"did not join the others within {limit:g} s and was ended,"
            self.keeps, self.lost = False, Failure(apart[0], -signal.SIGKILL, trouble=how, record=records[apart[0]])
            self.processes[apart[0]].send_signal(signal.SIGKILL)

    def regroup(self) -> None:
        """Ask the ranks to keep their state after the current step, leave their groups and wait for another attempt."""
        self.asked_to_regroup = True
        with suppress(OSError):
            (self.scratch / REGROUP).touch()

    def _pass_on(self) -> None:
        """Forward stop requests: SIGTERM for the first, SIGKILL for the second."""
        if self.stop.count > self._passed:
            self._passed = self.stop.count
            if self._passed > 1:
                print("asked twice to stop: the ranks are killed, unsaved since the newest checkpoint", file=sys.stderr)
            self._send(signal.SIGTERM if self._passed == 1 else signal.SIGKILL)

    def _send(self, signum: int) -> None:
        with suppress(OSError):
            (self.scratch / REQUESTED).touch()
        for process in self.processes:
            process.send_signal(signum)  # ignores processes that have exited

    def _log(self, rank: int) -> Path:
        return self.log_folder / f"rank-{rank}.log"
