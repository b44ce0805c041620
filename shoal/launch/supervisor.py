"""Keep a run alive on this machine: start its ranks, and restart them from the newest state when one is lost.

Bad input, requested stops and a first attempt that raises before its first step are not restarted. The number of
restarts without progress is limited.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import torch

from shoal.base.errors import UsageError
from shoal.base.files import make_folder, write_atomically
from shoal.base.journal import best_effort
from shoal.base.section import plain
from shoal.base.terminal import warn
from shoal.engine.checkpoint import newest
from shoal.launch.checks.memory import check_memory
from shoal.launch.devices import find_devices, visible_devices_variable
from shoal.launch.local_launcher import RankProcess, RankProcesses, start_rank_server
from shoal.launch.prefork import PreforkServer, PreforkServerEnded, end_processes, local_environment
from shoal.launch.recovery.elastic_layout import replan
from shoal.launch.recovery.generations import READY, TRIED
from shoal.launch.watch.rank_failure import Ending
from shoal.launch.watch.recordings import keep_recordings
from shoal.spec.config import RunConfig
from shoal.training.check import check
from shoal.training.resilience.effective_time import EffectiveTime
from shoal.training.resilience.events import write_event
from shoal.training.resilience.heartbeat import HeartbeatRecord
from shoal.training.resilience.owned_folders import temporary_folder
from shoal.training.run_folder import get_checkpoint_folder, resume_command
from shoal.training.stop import PREEMPTED, StopRequests

PROCESSES_FILE = "processes.json"
"""File in the folder of a live run with its process ids and the folder of the heartbeat records."""

REPLACE_SECONDS = 2.0  # between two tries to replace lost processes while the others continue


class Supervisor:
    """Supervisor of one run on this machine.

    Args:
        folder: existing run folder.
        survivable: whether the ranks themselves continue after one was killed.
        resume, restarted: of the first attempt, see `shoal.launch.worker.Generation`.
        server: existing prefork server, which is not closed.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        device: str,
        *,
        survivable: bool,
        resume: bool = False,
        restarted: bool = False,
        module: str = "shoal.launch.worker",
        server: PreforkServer | None = None,
    ):
        self.config, self.folder, self.device = config, folder, device
        self.survivable, self.resume, self.restarted, self.module = survivable, resume, restarted, module
        self.logs = folder / "logs"
        self.time = EffectiveTime()
        self.attempt, self.fruitless, self.furthest = 0, 0, -1
        self.failures, self.lost = 0, 0
        self.recoveries: list[float] = []  # duration of each [s]
        self._recovery: tuple[float, int] | None = None  # pending recovery: start time, steps done at the failure
        self._kept: dict[int, RankProcess] = {}  # processes of the survivors of a lost rank
        self._spares: list[RankProcess] = []  # processes that wait for the place of a lost rank
        self._waiting: list[RankProcess] = []  # survivors and replacements without a rank in the present layout
        self._placed = True  # whether the devices are numbered as without losses
        self._listed = 0  # devices at the start of the newest attempt, tested or not
        self._regrouping = False  # whether the pending recovery follows no loss, but lets replicas join
        self._tried = 0.0  # when lost processes were last replaced
        self._begun = False
        self.began = 0  # steps done at the start of the newest attempt
        self._diverged = -1  # steps done at the last divergence
        self._layout = config.parallel  # layout of the previous attempt
        self._server = server

    def run(self) -> int:
        """Train to the end, restarting as needed; return the exit code."""
        make_folder(self.logs)
        with ExitStack() as stack, StopRequests() as self.stop:
            stack.callback(self._remove_processes)
            try:
                while self._should_restart(ending := self._attempt(stack)):
                    self.attempt += 1
            finally:
                self._end_kept()
                end_processes([spare.process for spare in self._spares])
            code = PREEMPTED if ending.code and self.stop.preempted else ending.code
            self._report_end(code)
            return code

    # ---- attempts ----------------------------------------------------------------------------------------------

    def _attempt(self, stack: ExitStack) -> Ending:
        if self._server is None or self._server.ended:
            self._server = stack.enter_context(start_rank_server(self.config, self.device))
        config, variables = self._plan()
        ranks = config.parallel.world_size
        scratch = stack.enter_context(
            temporary_folder(self.folder, self.config.failover.memory_folder, self.folder)
        )
        again = self.attempt > 0
        payload = {
            "config": plain(config), "folder": str(self.folder), "resume": self.resume or again,
            "restarted": self.restarted or again,
        }
        (scratch / "payload.json").write_text(json.dumps(payload))
        self._begun = False
        self._ranks = processes = RankProcesses(
            self.logs, scratch, self.device, self.stop, self._server, self.config.failover, kept=self._kept,
            spares=self._spares,
            keeps=self._keeps(), survivable=self.survivable, replace=self._start_spares, notice=self._notice,
            started=self._write_processes,
        )
        ending = processes.run(self.module, ranks, {"SHOAL_ATTEMPT": str(self.attempt), **variables})
        self._kept = processes.survivors
        if ending.cause is not None and not ending.usage:
            ending = replace(ending, cause=replace(ending.cause, recordings=keep_recordings(self.folder)))
        processes.print_cause(ending)
        return ending

    def _keeps(self) -> bool:
        """Return whether the survivors of a lost rank keep their processes."""
        failover = self.config.failover
        all_reduce = self.config.parallel.sync == "all-reduce"
        return all_reduce and failover.restarts > 0 and failover.recovery_timeout_seconds > 0

    def _end_kept(self) -> None:
        end_processes([each.process for each in self._alive])
        self._kept, self._waiting = {}, []

    @property
    def _alive(self) -> list[RankProcess]:
        return [each for each in (*self._kept.values(), *self._waiting) if each.poll() is None]

    def _start_spares(self, lost: int = 0) -> None:
        """Start missing spares, as far as the system can, or as many as ranks were lost, whose places they take."""
        failover = self.config.failover
        wanted = max(failover.spares, lost if failover.shrink == "never" else 0)
        self._spares[:] = [spare for spare in self._spares if spare.poll() is None]
        environment = local_environment(self.config.parallel.world_size, self.device)
        with suppress(PreforkServerEnded, OSError):
            while self._server and len(self._spares) < wanted:
                log = self.logs / "spares.log"
                self._spares.append(RankProcess(self._server, self.module, environment, log, heard=True))

    def _plan(self) -> tuple[RunConfig, dict[str, str]]:
        """Return the run on the available devices, and the variables that select them.

        Raises:
            UsageError: the run is impossible on these devices.
        """
        asked = self.config.parallel.world_size
        self._listed = len(find_devices(self.folder, self.device, asked, None))
        tested = self.attempt > 0 and not (self._regrouping and self._placed)  # replacements have tried theirs
        available = find_devices(self.folder, self.device, asked, self._server if tested else None)
        if len(available) < asked and not self.config.failover.replan:
            raise UsageError(
                f"{len(available)} of {asked} devices available, and failover.replan = false."
                "\n  Restore the others, or leave failover.replan out."
            )
        variables: dict[str, str] = {}
        if on_those_left := self._plan_on_those_left(available):
            config, count = on_those_left, f"{len(self._alive)} of {asked} ranks"
        else:
            config, count = self.config, f"{len(available)} of {asked} devices"
            self._placed = len(available) == asked
            if not self._placed:
                config = replan(config, check(config), len(available), fits=self._fits)
            chosen = available[: config.parallel.world_size]
            if self.device == "cuda" and chosen != list(range(len(chosen))):
                variables = visible_devices_variable(chosen)
            if variables or config.parallel != self._layout:
                self._end_kept()
        if config.parallel != self._layout:
            self._layout = config.parallel
            warn(f"{count} available: now on {config.parallel.describe()}")
            write_event(
                self.folder, "replanned", attempt=self.attempt, devices=available, layout=config.parallel.describe(),
                ranks=config.parallel.world_size,
            )
        return config, variables

    def _plan_on_those_left(self, available: list[int]) -> RunConfig | None:
        """Give ranks to the processes that can take part at once, where `failover.shrink` allows fewer replicas.

        Returns:
            The run with the replicas that they suffice for; with all of them if not even for one, so that the missing
            processes are started first. None if all have to be started.
        """
        if self.config.failover.shrink == "never" or not self._kept or not self._placed:
            return None
        self._spares[:] = [spare for spare in self._spares if spare.poll() is None]
        missing = sorted({*available} - {each.place for each in self._alive})
        for place, spare in zip(missing, tuple(self._spares), strict=False):
            spare.place = place
            self._spares.remove(spare)
            self._waiting.append(spare)
        present = {each.place: each for each in self._alive if each.place in available}
        end_processes([each.process for each in self._alive if each.place not in present])
        chosen = {place: each for place, each in sorted(present.items()) if each.can_join}
        try:
            config = replan(self.config, check(self.config), len(chosen), fits=self._fits, replicas=True)
        except UsageError:
            if len(available) < self.config.parallel.world_size:
                return None
            config, chosen = self.config, present
        ranks = config.parallel.world_size
        others = (each for place, each in chosen.items() if place >= ranks)
        spread = {rank: chosen.get(rank) or next(others, None) for rank in range(ranks)}
        self._kept = {rank: each for rank, each in spread.items() if each}
        self._waiting = [each for each in present.values() if each not in self._kept.values()]
        return config

    def _replace_lost(self) -> None:
        """Start processes for lost ones while the others continue; once all can take part, let them join."""
        asked, alive = self.config.parallel.world_size, self._alive
        if len(alive) == asked and all(each.can_join for each in alive):
            self._ranks.regroup()
        if len(alive) == asked or time.monotonic() < self._tried + REPLACE_SECONDS:
            return
        self._tried = time.monotonic()
        with suppress(PreforkServerEnded, OSError, UsageError):  # the next try may succeed
            lost = {*find_devices(self.folder, self.device, asked, None)} - {each.place for each in alive}
            for place in sorted(lost):
                ready = self._ranks.scratch / f"ready-{place}"
                ready.unlink(missing_ok=True)
                tried = f"cuda:{place}" if self.device == "cuda" else "cpu"
                environment = {**local_environment(asked, self.device), READY: str(ready), TRIED: tried}
                assert self._server is not None
                process = RankProcess(self._server, self.module, environment, self.logs / "spares.log", heard=True)
                process.place, process.ready = place, ready
                self._waiting.append(process)

    def _take_returned(self) -> None:
        """After a restart on fewer devices, start all ranks again from memory once more devices are listed."""
        if self.config.failover.shrink == "never" or time.monotonic() < self._tried + REPLACE_SECONDS:
            return
        self._tried = time.monotonic()
        with suppress(UsageError):
            asked = self.config.parallel.world_size
            if len(find_devices(self.folder, self.device, asked, None)) > self._listed:
                self._ranks.regroup()

    def _fits(self, config: RunConfig) -> None:
        check_memory(config, check(config), torch.device(self.device), range(config.parallel.world_size))

    def _should_restart(self, ending: Ending) -> bool:
        """Return whether to start another attempt; record the failure."""
        cause, self._regrouping, self._tried = ending.cause, ending.regrouped, 0.0
        if ending.regrouped:
            self._recovery = time.monotonic(), ending.furthest
            return True
        if cause is None:
            return False
        if self.stop.count and cause.code < 0:  # killed by our own signals
            return False
        self.failures += 1
        write_event(self.folder, "failure", attempt=self.attempt, **cause.event())
        if self.stop.count or ending.usage:
            return False
        limit = self.config.failover.restarts
        if cause.diverged and ending.furthest == self._diverged:
            warn(
                f"not restarting: the run has diverged again after step {ending.furthest}, so no restart helps."
                "\n  Lower optimizer.learning_rate or optimizer.clip_norm, or check the data of this step."
            )
            return False
        if cause.diverged:
            self._diverged = ending.furthest
        if limit and self.attempt == 0 and ending.furthest < 0 and not cause.sure:
            warn("not restarting: the first attempt failed before step 1")
            return False
        if ending.furthest > self.furthest:
            self.furthest, self.fruitless = ending.furthest, 0
        self.fruitless += 1
        if self.fruitless > limit:
            if limit:
                warn(f"not restarting: {limit} restarts made no progress past step {max(0, self.furthest)}")
            return False
        since = cause.when if cause.trouble else cause.record.last_sign if cause.record else time.monotonic()
        if self._recovery is None:  # else the recovery itself has failed, and its time continues
            self._recovery = min(since, time.monotonic()), ending.furthest
        if 1 < self.fruitless == limit:  # the last try replaces all processes
            self._end_kept()
        warn(f"restarting from the newest state (restart {self.fruitless} of at most {limit} without progress)")
        write_event(self.folder, "restart", attempt=self.attempt + 1, kind=self._kind)
        return True

    @property
    def _kind(self) -> str:
        """Kind of the recovery: some processes stay, or all are replaced."""
        return "in process" if self._kept else "restart"

    # ---- what is noticed ---------------------------------------------------------------------------------------

    def _notice(self, records: list[HeartbeatRecord | None]) -> bool:
        """Update the effective time, and detect when the run has recovered; return whether it still has to."""
        begun = [record for record in records if record is not None and record.begun >= 0]
        if not begun:
            return self._recovery is not None
        first = max(begun, key=lambda record: record.steps)
        if not self._begun:
            self.time.begun(first.begun)
            self._begun, self.began = True, first.begun
            self._start_spares()
        self.time.stepped(first.steps, first.seconds)
        if self._recovery and first.steps > first.begun:
            (since, furthest), self._recovery = self._recovery, None
            seconds, lost = time.monotonic() - since, max(0, furthest - first.begun)
            if not self._regrouping:
                self.recoveries.append(seconds)
            self.lost += lost
            write_event(
                self.folder, "joined" if self._regrouping else "recovered", attempt=self.attempt, step=first.begun,
                lost=lost, seconds=round(seconds, 2), kind=self._kind,
            )
            self._regrouping = False
        if self._layout != self.config.parallel and self._recovery is None:
            if not self._placed:
                self._take_returned()
            elif self._kept:
                self._replace_lost()
        return self._recovery is not None

    def _write_processes(self, server: int, scratch: Path, ranks: list[int]) -> None:
        processes = {
            "supervisor": os.getpid(), "prefork": server, "ranks": ranks, "attempt": self.attempt,
            "scratch": str(scratch),
        }
        with best_effort(self.folder / PROCESSES_FILE):  # only tools read it
            write_atomically(self.folder / PROCESSES_FILE, json.dumps(processes))

    def _remove_processes(self) -> None:
        with suppress(OSError):
            (self.folder / PROCESSES_FILE).unlink()

    def _report_end(self, code: int) -> None:
        counted, seconds = self.time.counted, self.time.seconds
        average = sum(self.recoveries) / len(self.recoveries) if self.recoveries else None
        write_event(
            self.folder, "end", code=code, seconds=round(seconds, 2), counted=round(counted, 2),
            effective=round(counted / seconds, 4), failures=self.failures, lost=self.lost,
            recovery=average and round(average, 2),
        )
        if self.stop.count and code and not counted:
            again = resume_command(self.folder, self.config)
            saved = newest(get_checkpoint_folder(self.config, self.folder))
            what = "another step; continue" if saved else "the first step, so nothing is saved; start again"
            warn(f"stopped before the end of {what} with: {again}")
        if self.recoveries:
            warn(
                f"failures: {self.failures}; steps repeated: {self.lost}; {average:.1f} s to the next step on average"
                f"; effective training time {round(counted / seconds, 4):.1%} of {seconds:.0f} s"
            )
