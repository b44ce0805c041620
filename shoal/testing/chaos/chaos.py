"""Trials of a run under faults: one fault each, at a random moment, and what must hold afterwards.

A trial passes if the run ended (after what the message asks for, where it asks for something), its last state is that
of the undisturbed run (bit for bit on the same layout, else to rounding), no more steps were lost than promised, no
process and no half-written file is left, and the message names the cause.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.engine.checkpoint import CheckpointError, list_checkpoints, verify
from shoal.engine.data.prepare import prepare
from shoal.launch.prefork import PreforkServer
from shoal.launch.supervisor import PROCESSES_FILE, Supervisor
from shoal.pipeline.from_layout import build_layout_program
from shoal.spec.config import RunConfig, save_config
from shoal.testing.chaos.comparison import differences, done, last, reached
from shoal.testing.chaos.fault_injection import COMMITTING, DAMAGES, SAVING, VARIABLE, Planted, disturbed
from shoal.testing.chaos.fault_types import KINDS, MENDED, NEED_MOUNTS, OPS_OF, FaultType
from shoal.testing.chaos.mounts import fill, mount
from shoal.training.resilience.events import read_events
from shoal.training.resilience.host_memory_dir import run_dir
from shoal.training.run_folder import new_run

ROUNDING = {"fp64": 1e-8}
ROUGH = 2e-3
"""How far a parameter may be from the undisturbed run's after a run on another layout, by the run's precision,
relative to the largest of its tensor. In 32 bits and fewer Adam makes much of rounding: where all gradients of an
element were nothing else, its update is as large as any other's."""

ENDS = 5.0  # seconds in which the processes of a killed supervisor must be gone
POLL = 0.01
LEFTOVERS = ("*.partial", ".staging*", PROCESSES_FILE)


@dataclass
class Trial:
    """One fault, and what came of it.

    Attributes:
        fault: its name.
        moment: when it happened, in words.
        problems: what went wrong; a trial without any passed.
        lost: steps that were repeated, for each restart.
        seconds: from the last heartbeat to the end of the next step, for each restart that the run did itself.
        reached: the step that it reached before it was resumed by hand; None if it was not.
    """

    fault: str
    moment: str
    problems: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reached: int | None = None


class Chaos:
    """Trials of one run, each with another fault.

    Args:
        config: of the run; its folders and its cache are moved into ``folder``.
        folder: receives all files of the trials.
        server: forks the ranks.
        log: the file that this process and the server print into.
    """

    def __init__(self, config: RunConfig, folder: Path, server: PreforkServer, log: Path):
        data = config.data.model_copy(update={"cache": folder / "cache"})
        metrics = config.metrics.model_copy(update={"tensorboard": False})
        kept = config.checkpoint.model_copy(update={"keep": max(2, config.checkpoint.keep), "folder": ""})
        self.config = config.model_copy(update={"data": data, "metrics": metrics, "checkpoint": kept})
        self.folder, self.server, self.log = folder, server, log
        self.steps, self.ranks = config.train.steps, config.parallel.world_size
        program = build_layout_program(config.parallel, config.parallel.microbatches(config.train.global_batch))
        self.actions = [[action.op.value for action in actions] for actions in program.actions]
        prepare(self.config.data)
        self.reference = folder / "undisturbed"
        self.began = 0  # the step after which the newest run went on
        if code := self._supervise(self.reference):
            raise UsageError(f"the undisturbed run ended with code {code}.\n  Its log: {log}")

    def can_have(self, name: str) -> bool:
        """Whether this run can have this kind of fault."""
        if name == "bit-shard":
            return self.config.data.source != "synthetic"
        if name == "kill-collective":
            return any("R" in actions for actions in self.actions)
        if name in ("lost-node", "returned-node"):
            return self.ranks > 1 and self.config.parallel.sync == "all-reduce"
        return True

    def trial(self, name: str, rng: random.Random, number: int) -> Trial:
        """Run once with one fault of this kind at a random moment, and judge what came of it."""
        kind, folder = KINDS[name], self.folder / f"{number:04d}-{name}"
        begin = self.log.stat().st_size
        if name == "kill-supervisor":
            trial, rank = self._kill_supervisor(folder, rng), 0
        elif name in NEED_MOUNTS:
            trial, rank = self._disturb_disk(name, folder, rng), 0
        else:
            planted = self.draw(name, rng)
            op, rank = planted[0].op, planted[0].rank
            where = op if op in SAVING else f"{op} {planted[0].nth}"
            trial = Trial(name, f"rank {rank}, step {planted[0].step + 1}, {where}")
            code = self._supervise(folder, planted)
            self._expect(trial, kind, code)
            if code and not trial.problems:
                trial.reached = reached(folder)
                if kind.effect == "shard":
                    shutil.rmtree(self.config.data.cache / "shards")  # as the message says
                    prepare(self.config.data)
                self._expect(trial, MENDED, self._supervise(folder, resume=True))
        with self.log.open(errors="replace") as file:
            file.seek(begin)
            said = file.read()
        self._judge(trial, kind, folder, said, rank)
        if not trial.problems:
            shutil.rmtree(folder, ignore_errors=True)
        return trial

    def draw(self, name: str, rng: random.Random) -> list[Planted]:
        """Draw the rank, step and action of a fault."""
        kind, every = KINDS[name], self.config.checkpoint.every
        rank = 0 if kind.moment == COMMITTING else rng.randrange(self.ranks)
        first = min(2 * every + 1, self.steps - 1) if kind.late or kind.moment in SAVING else 0
        last = self.steps - 1 - (every if kind.moment in SAVING else 0)
        step = rng.randrange(first, max(first + 1, last))
        if kind.moment in SAVING:
            return [Planted(kind.effect, rank, min(step, max(0, last - 1)), kind.moment, fraction=rng.random())]
        op, nth = self._action(rank, OPS_OF[kind.moment], rng)
        fault = Planted(kind.effect, rank, step, op, nth, fraction=rng.random(), seed=rng.randrange(2**31))
        if name == "lost-node":
            return [replace(fault, then=[rank])]
        if name == "returned-node":
            step = rng.randrange(max(1, self.steps - 2))
            back = Planted(kind.effect, 0, rng.randrange(step, self.steps), "F", attempt=1, then=[])
            return [replace(fault, step=step, then=[rank]), back]
        return [fault]

    def _action(self, rank: int, ops: str, rng: random.Random) -> tuple[str, int]:
        actions = self.actions[rank * len(self.actions) // self.ranks]
        here = sorted({op for op in actions if op in ops}) or ["F"]
        op = rng.choice(here)
        return op, rng.randrange(actions.count(op))

    # ---- runs --------------------------------------------------------------------------------------------------------

    def _supervise(self, folder: Path, faults: Sequence[Planted] = (), *, resume: bool = False) -> int:
        """Run to the end, and return the exit code of `shoal train`."""
        os.environ[VARIABLE] = json.dumps([asdict(fault) for fault in faults])
        try:
            supervisor = supervisor_of(self.config, folder, self.server, resume=resume, faulty=bool(faults))
            code = supervisor.run()
            self.began = supervisor.began
            return code
        except (UsageError, OSError) as error:
            print(f"shoal: error: {error}", file=sys.stderr, flush=True)
            return 2 if isinstance(error, UsageError) else 1
        finally:
            del os.environ[VARIABLE]

    def _kill_supervisor(self, folder: Path, rng: random.Random) -> Trial:
        """Kill the supervisor (SIGKILL) of a run that was started as a user starts it, then resume the run."""
        step = rng.randrange(min(self.config.checkpoint.every + 1, self.steps - 2), self.steps - 1)
        trial = Trial("kill-supervisor", f"step {step}")
        toml = self.folder / "run.toml"
        save_config(self.config, toml)
        words = [sys.executable, "-m", "shoal", "train", str(toml), "--run-folder", str(folder)]
        parent = subprocess.Popen(words)
        saved = folder / "checkpoints"
        wait_until(lambda: parent.poll() is not None or (done(folder) >= step and list_checkpoints(saved)))
        if parent.poll() is not None:
            trial.problems.append(f"it ended with code {parent.returncode} before it could be killed")
        else:
            family = psutil.Process(parent.pid).children(recursive=True)
            time.sleep(rng.random() * 0.2)
            trial.reached = done(folder)
            parent.kill()
            parent.wait()
            _, alive = psutil.wait_procs(family, timeout=ENDS)
            if alive:
                trial.problems.append(f"{len(alive)} processes outlived their supervisor")
            for process in alive:
                process.kill()
            (folder / PROCESSES_FILE).unlink(missing_ok=True)  # nobody was left who could
            found, wanted = last(folder), last(self.reference)
            if found is None or wanted is None or found.name != wanted.name:
                self._expect(trial, MENDED, self._supervise(folder, resume=True))
        return trial

    def _disturb_disk(self, name: str, folder: Path, rng: random.Random) -> Trial:
        """Fill a small disk, or make the folder of checkpoints read-only, while the run goes on; then undo it."""
        kind = KINDS[name]
        step = rng.randrange(1, max(2, self.steps - self.config.checkpoint.every))
        trial = Trial(name, f"step {step}")
        folder.mkdir()
        size = 4 * sum(path.stat().st_size for path in self.reference.rglob("*") if path.is_file())
        mount(f"mount -t tmpfs -o size={size} tmpfs '{folder}'")
        run, checkpoints = folder / "run", folder / "run" / "checkpoints"
        try:
            def act() -> None:
                if not wait_until(lambda: done(run) >= step, seconds=120):
                    trial.problems.append(f"it did not come to step {step}")
                elif name == "disk-full":
                    fill(folder / "filler")
                else:
                    mount(f"mount --bind '{checkpoints}' '{checkpoints}' && mount -o remount,bind,ro '{checkpoints}'")
                disturbed(run).touch()

            thread = threading.Thread(target=act)
            thread.start()
            code = self._supervise(run, [Planted("wait", 0, step, "F")])
            thread.join()
            disturbed(run).unlink()
            self._expect(trial, kind, code)
            trial.reached = reached(run)
            (folder / "filler").unlink(missing_ok=True)
            if name == "read-only":
                mount(f"umount '{checkpoints}'")
            (run / PROCESSES_FILE).unlink(missing_ok=True)
            resume = bool(list_checkpoints(checkpoints))
            if not resume:
                shutil.rmtree(run)
            self._expect(trial, MENDED, self._supervise(run, resume=resume))
            shutil.copytree(run, folder.with_name(f"{folder.name}-kept"))
        finally:
            mount(f"umount -l '{folder}'")
        folder.rmdir()
        folder.with_name(f"{folder.name}-kept").rename(folder)
        return trial

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def _expect(self, trial: Trial, kind: FaultType, code: int) -> None:
        if code not in kind.codes and (kind.codes or not code):
            wanted = " or ".join(map(str, kind.codes)) or "another"
            trial.problems.append(f"ended with code {code}, not {wanted}")

    def _judge(self, trial: Trial, kind: FaultType, folder: Path, said: str, rank: int) -> None:
        events = read_events(folder)
        trial.lost = [event["lost"] for event in events if event["event"] == "recovered"]
        trial.seconds = [event["seconds"] for event in events if event["event"] == "recovered"]
        if trial.reached is not None:
            trial.lost.append(max(0, trial.reached - self.began))
        # A save that is not whole yet is no state, so a failure may cost the steps of two intervals.
        every = self.config.failover.memory_every or self.config.checkpoint.every
        bound = (2 * every or self.steps) + (self.config.checkpoint.every if kind.effect in DAMAGES else 0)
        if trial.lost and max(trial.lost) > bound:
            trial.problems.append(f"{max(trial.lost)} steps lost, and at most {bound} are promised")
        unasked = kind.effect == "slow" and not self.config.failover.stragglers_every
        if not unasked and not re.search(kind.says.replace("RANK", str(rank)), said):
            trial.problems.append(f"no message says {kind.says!r}")
        if self.server.pid and (left := psutil.Process(self.server.pid).children(recursive=True)):
            trial.problems.append(f"{len(left)} ranks are left")
        for pattern in LEFTOVERS:
            trial.problems += [f"left behind: {path.relative_to(folder)}" for path in folder.rglob(pattern)]
        if (memory := run_dir(folder, self.config.failover)).exists():
            trial.problems.append(f"left behind: {memory}")
        for _, path in list_checkpoints(folder / "checkpoints"):
            try:
                verify(path)
            except CheckpointError as error:
                if kind.effect not in DAMAGES:
                    trial.problems.append(str(error))
        rounding = ROUNDING.get(self.config.train.precision, ROUGH) if kind.rounded else None
        trial.problems += differences(last(self.reference), last(folder), rounding)


def supervisor_of(
    config: RunConfig, folder: Path, server: PreforkServer, *, resume: bool = False, faulty: bool = False
) -> Supervisor:
    """Supervise a run on this machine's CPU: a new one, unless it is resumed.

    Args:
        faulty: plant the faults that stand in the environment.
    """
    if not resume:
        new_run(config, folder)
    payload = {"config": plain(config), "folder": str(folder), "resume": resume, "made": True}
    module = "shoal.testing.chaos.fault_injection" if faulty else "shoal.launch.worker"
    return Supervisor(config, payload, folder, "cpu", survivable=False, module=module, server=server)


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> bool:
    """Poll a condition; return whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
