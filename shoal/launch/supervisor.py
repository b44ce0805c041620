"""Keeps a run alive on this machine: starts its ranks, and starts them again from the newest state when one is lost.

What cannot be helped by a restart is not restarted: bad input, a stop that was asked for, and a first attempt that
raises before its first step. Restarts that bring the run no further than it was are bounded.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.base.errors import UsageError
from shoal.base.files import write_whole
from shoal.base.section import plain
from shoal.launch.checks.devices import devices_there, visible
from shoal.launch.checks.memory_check import check_memory
from shoal.launch.elastic_layout import replan
from shoal.launch.local_launcher import RankProcesses, start_nursery
from shoal.launch.prefork import Nursery
from shoal.launch.watch import watchdog
from shoal.launch.watch.rank_failure import Ending
from shoal.spec.config import RunConfig
from shoal.training.check import check
from shoal.training.resilience.effective_time import Account
from shoal.training.resilience.events import write_event
from shoal.training.resilience.heartbeat import HeartbeatRecord
from shoal.training.stop import PREEMPTED, StopRequests

PROCESSES_FILE = "processes.json"
"""In the folder of a run that is alive: the process ids, and where the ranks keep their records."""


@dataclass
class _Recovery:
    """From a failure to the next step."""

    since: float  # when the lost rank was last well
    furthest: int  # steps done then; -1 where none had begun


class Supervisor:
    """One run on this machine.

    Args:
        config: of the run, as it was asked for.
        payload: what each rank gets (`shoal.launch.worker.run`).
        folder: of the run, which is there.
        device: the type that every rank computes on.
        survivable: the run goes on by itself without a rank that was killed.
        module: what each rank is.
        nursery: one that is there already and stays.
    """

    def __init__(
        self,
        config: RunConfig,
        payload: dict[str, Any],
        folder: Path,
        device: str,
        *,
        survivable: bool,
        module: str = "shoal.launch.worker",
        nursery: Nursery | None = None,
    ):
        self.config, self.payload, self.folder, self.device = config, payload, folder, device
        self.survivable, self.module = survivable, module
        self.logs = folder / "logs"
        self.account = Account()
        self.attempt, self.fruitless, self.furthest = 0, 0, -1
        self.failures, self.lost = 0, 0
        self.recoveries: list[float] = []  # seconds of each
        self._recovery: _Recovery | None = None
        self._begun = False
        self.began = 0  # steps that were done when the newest attempt began
        self._layout = config.parallel  # of the attempt before
        self._nursery = nursery

    def run(self) -> int:
        """Train to the end, or as far as it goes; returns the exit code."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack, StopRequests() as self.stop:
            self.scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-launch-")))
            stack.callback((self.folder / PROCESSES_FILE).unlink, missing_ok=True)
            while True:
                ending = self._attempt(stack)
                if not self._goes_on(ending):
                    break
                self.attempt += 1
            code = PREEMPTED if ending.cause and self.stop.preempted else ending.code
            self._tell_end(code)
            return code

    # ---- attempts ----------------------------------------------------------------------------------------------

    def _attempt(self, stack: ExitStack) -> Ending:
        if self._nursery is None or self._nursery.ended:
            asked = self.config.parallel.world_size
            self._nursery = stack.enter_context(start_nursery(asked, self.logs, self.device))
        config, variables = self._plan()
        ranks = config.parallel.world_size
        scratch = self.scratch / f"attempt-{self.attempt}"
        scratch.mkdir()
        payload = self.payload | {"config": plain(config)}
        if self.attempt:
            payload |= {"resume": True, "restarted": True}
        (scratch / "payload.json").write_text(json.dumps(payload))
        self._begun = False
        self.crew = RankProcesses(
            self.logs, scratch, self.device, self.stop, self._nursery, self.config.failover,
            survivable=self.survivable, notice=self._notice, started=self._write_processes,
        )
        ending = self.crew.run(self.module, ranks, {"SHOAL_ATTEMPT": str(self.attempt), **variables})
        self.crew.tell(ending)
        return ending

    def _plan(self) -> tuple[RunConfig, dict[str, str]]:
        """The run on the devices that are there, and the variables that choose them.

        Raises:
            UsageError: it cannot be.
        """
        asked = self.config.parallel.world_size
        there = devices_there(
            self.folder, self.device, asked, self._nursery if self.attempt else None, self.logs / "devices.log"
        )
        if len(there) < asked and not self.config.failover.replan:
            raise UsageError(
                f"{len(there)} of the {asked} devices are there, and failover.replan = false."
                "\n  Bring the others back, or leave failover.replan out."
            )
        config = self.config
        if len(there) < asked:
            config = replan(config, check(config), len(there), fits=self._fits)
        if config.parallel != self._layout:
            self._layout = config.parallel
            self._say(f"{len(there)} of {asked} devices are there: now on {config.parallel.describe()}")
            write_event(
                self.folder, "replanned", attempt=self.attempt, devices=there, layout=config.parallel.describe(),
                ranks=config.parallel.world_size,
            )
        chosen = there[: config.parallel.world_size]
        narrowed = self.device == "cuda" and chosen != list(range(len(chosen)))
        return config, visible(chosen) if narrowed else {}

    def _fits(self, config: RunConfig) -> None:
        check_memory(config, check(config), torch.device(self.device), range(config.parallel.world_size))

    def _goes_on(self, ending: Ending) -> bool:
        """Whether there is another attempt."""
        cause = ending.cause
        if cause is None:
            return False
        if self.stop.count and cause.code < 0:  # by our own signals
            return False
        self.failures += 1
        step = None if cause.record is None or cause.record.begun < 0 else cause.record.steps
        write_event(
            self.folder, "failure", attempt=self.attempt, rank=cause.rank, host=watchdog.host(), how=cause.how,
            where=cause.where.strip() or None, step=step, report=cause.report or None,
        )
        if self.stop.count or ending.usage:
            return False
        limit = self.config.failover.restarts
        if limit and self.attempt == 0 and ending.furthest < 0 and not cause.sure:
            self._say("not restarted: it never came to its first step, so that it would hardly do so now")
            return False
        if ending.furthest > self.furthest:
            self.furthest, self.fruitless = ending.furthest, 0
        self.fruitless += 1
        if self.fruitless > limit:
            if limit:
                self._say(f"not restarted: {limit} restarts brought it no further than step {max(0, self.furthest)}")
            return False
        since = cause.since if cause.trouble else cause.record.alive if cause.record else time.monotonic()
        self._recovery = _Recovery(since, ending.furthest)
        self._say(f"restarting from the newest state (restart {self.fruitless} of at most {limit} without progress)")
        write_event(self.folder, "restart", attempt=self.attempt + 1)
        return True

    # ---- what is noticed ---------------------------------------------------------------------------------------

    def _notice(self, records: list[HeartbeatRecord | None]) -> None:
        """Keep the account, and notice when the run has recovered."""
        begun = [record for record in records if record is not None and record.begun >= 0]
        if not begun:
            return
        first = max(begun, key=lambda record: record.steps)
        if not self._begun:
            self.account.begun(first.begun)
            self._begun, self.began = True, first.begun
        self.account.stepped(first.steps, first.seconds)
        if self._recovery and first.steps > first.begun:
            recovery, self._recovery = self._recovery, None
            seconds, lost = time.monotonic() - recovery.since, max(0, recovery.furthest - first.begun)
            self.recoveries.append(seconds)
            self.lost += lost
            write_event(
                self.folder, "recovered", attempt=self.attempt, step=first.begun, lost=lost, seconds=round(seconds, 2)
            )

    def _write_processes(self) -> None:
        write_whole(self.folder / PROCESSES_FILE, json.dumps({
            "supervisor": os.getpid(), "nursery": self._nursery.pid if self._nursery else None, "attempt": self.attempt,
            "scratch": str(self.crew.scratch), "ranks": [process.pid for process in self.crew.processes],
        }))

    def _tell_end(self, code: int) -> None:
        counted, seconds = self.account.counted, self.account.seconds
        average = sum(self.recoveries) / len(self.recoveries) if self.recoveries else None
        write_event(
            self.folder, "end", code=code, seconds=round(seconds, 2), counted=round(counted, 2),
            effective=round(counted / seconds, 4), failures=self.failures, lost=self.lost,
            recovery=average and round(average, 2),
        )
        if self.recoveries:
            self._say(
                f"failures: {self.failures}; steps made again: {self.lost}; {average:.1f} s to the next step on average"
                f"; effective training time {round(counted / seconds, 4):.1%} of {seconds:.0f} s"
            )

    def _say(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)
