"""Trials of a run under faults: one fault each, at a random moment, and the checks afterwards.

A trial passes if the run ended (after the repair that its message asks for, if any), its last state is that of the
undisturbed run (bit for bit on the same layout, else to rounding), no more steps were lost than promised, no process
and no partly written file remains, and the message names the cause.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from shoal.base.errors import UsageError
from shoal.base.polling import wait_until
from shoal.engine.checkpoint import CheckpointError, list_checkpoints, verify
from shoal.engine.data.prepare import prepare
from shoal.launch.prefork import PreforkServer, safe_environment
from shoal.launch.supervisor import PROCESSES_FILE, Supervisor
from shoal.pipeline.from_layout import build_layout_program
from shoal.spec.config import RunConfig, save_config
from shoal.testing.chaos.fault_injection import (
    COMMITTING,
    DAMAGES,
    SAVING,
    START,
    VARIABLE,
    Planted,
    disturbed_path,
)
from shoal.testing.chaos.fault_types import KINDS, MOMENT_OPS, NEED_MOUNTS, REPAIRED, FaultType
from shoal.testing.chaos.mounts import full_disk, read_only, small_disk
from shoal.testing.chaos.outcome import (
    ROUGH,
    ROUNDING,
    compare_checkpoints,
    last_checkpoint,
    step_of_failure,
    steps_done,
)
from shoal.training.async_dp.engines import survives_rank_loss
from shoal.training.records.metrics import read_metrics
from shoal.training.resilience.events import read_events
from shoal.training.resilience.host_memory_dir import run_dir
from shoal.training.run_folder import new_run
from shoal.training.stop import PREEMPTED, StopRequests

EXIT_SECONDS = 5.0  # in which the processes of a killed supervisor must exit
LIMIT_SECONDS = 300.0  # of one wait
LEFTOVERS = ("*.partial", ".staging*", PROCESSES_FILE)


@dataclass
class Trial:
    fault: str
    moment: str  # description of when it happened
    problems: list[str] = field(default_factory=list)  # none if the trial passed
    lost: list[int] = field(default_factory=list)  # repeated steps of each restart
    seconds: list[float] = field(default_factory=list)  # from the last heartbeat to the next step, of each own restart
    in_process: int = 0  # restarts in which survivors kept their processes
    reached: int | None = None  # steps done before the run was resumed by hand; None if it was not


class Chaos:
    """Trials of one run, each with one fault.

    Args:
        folder: folder of all files of the trials, also of the run's cache.
        log: file to which this process and the server print.
    """

    def __init__(self, config: RunConfig, folder: Path, server: PreforkServer, log: Path):
        self.config = config.replace(
            data={"cache": folder / "cache"}, metrics={"tensorboard": False, "sample_prompt": ""},
            checkpoint={"keep": max(2, config.checkpoint.keep), "folder": ""},
        )
        self.folder, self.server, self.log = folder, server, log
        self.others = self._forks()  # not of these runs
        self.steps, self.ranks = config.train.steps, config.parallel.world_size
        self.shrinks = config.failover.shrink != "never"
        program = build_layout_program(config.parallel, config.parallel.microbatches(config.train.global_batch))
        self.actions = [[action.op.value for action in actions] for actions in program.actions]
        prepare(self.config.data)
        self.reference = folder / "undisturbed"
        self.began = 0  # steps done at the start of the newest run
        if code := self._supervise(self.reference):
            raise UsageError(f"the undisturbed run ended with code {code}.\n  Its log: {log}")

    def can_have(self, name: str) -> bool:
        if name == "bit-shard":
            return self.config.data.reads != "synthetic"
        if name == "kill-collective":
            return any("R" in actions for actions in self.actions)
        if name in ("kill-two", "kill-recovery"):
            return self.ranks > 1
        if name in ("lost-node", "returned-node"):
            return self.ranks > 1 and self.config.parallel.sync == "all-reduce"
        return name != "memory-full" or self.config.parallel.sync == "all-reduce"

    def trial(self, name: str, rng: random.Random, number: int) -> Trial:
        """Run once with one fault of this kind at a random moment, and check the outcome."""
        kind, folder = KINDS[name], self.folder / f"{number:04d}-{name}"
        begin = self.log.stat().st_size
        if name == "kill-supervisor":
            trial, rank = self._kill_supervisor(folder, rng), 0
        elif name == "preempt":
            trial, rank = self._preempt(folder, rng), 0
        elif name == "memory-full":
            trial, rank = self._fill_memory(folder, rng)
        elif name in NEED_MOUNTS:
            trial, rank = self._disturb_disk(name, folder, rng), 0
        else:
            planted = self.draw(name, rng)
            op, rank = planted[0].op, planted[0].rank
            where = op if op in (*SAVING, START) else f"{op} {planted[0].nth}"
            trial = Trial(name, f"rank {rank}, step {planted[0].step + 1}, {where}")
            code = self._supervise(folder, planted, own_server=kind.effect == "kill-parent")
            self._expect(trial, kind, code)
            if code and not trial.problems:
                trial.reached = step_of_failure(folder)
                if kind.effect == "shard":
                    shutil.rmtree(self.config.data.cache / "shards")  # as the message says
                    prepare(self.config.data)
                self._expect(trial, REPAIRED, self._supervise(folder, resume=True))
        self._judge(trial, kind, folder, read_from(self.log, begin), rank)
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
        if kind.moment == START:
            return [Planted(kind.effect, rank, 0, START)]
        op, nth = self._action(rank, MOMENT_OPS[kind.moment], rng)
        fault = Planted(kind.effect, rank, step, op, nth, fraction=rng.random(), seed=rng.randrange(2**31))
        if name in ("kill-two", "kill-recovery"):
            other = rng.choice([each for each in range(self.ranks) if each != rank])
            if name == "kill-recovery" and self.shrinks:
                other = 0  # which any layout has
            if name == "kill-recovery":
                return [fault, Planted(kind.effect, other, 0, START, attempt=1)]
            op, nth = self._action(other, MOMENT_OPS[kind.moment], rng)
            return [fault, replace(fault, rank=other, op=op, nth=nth)]
        if name == "lost-node":
            return [replace(fault, lost_devices=[rank])]
        if name == "returned-node":
            step = rng.randrange(max(1, self.steps - 2))
            back = Planted(kind.effect, 0, rng.randrange(step, self.steps), "F", attempt=1, lost_devices=[])
            return [replace(fault, step=step, lost_devices=[rank]), back]
        return [fault]

    def _action(self, rank: int, ops: str, rng: random.Random) -> tuple[str, int]:
        actions = self.actions[rank * len(self.actions) // self.ranks]
        present = sorted({op for op in actions if op in ops}) or ["F"]
        op = rng.choice(present)
        return op, rng.randrange(actions.count(op))

    # ---- runs --------------------------------------------------------------------------------------------------------

    def _supervise(
        self, folder: Path, faults: Sequence[Planted] = (), *, resume: bool = False, own_server: bool = False,
        preempted: bool = False, config: RunConfig | None = None,
    ) -> int:
        """Run to the end; return the exit code of `shoal train`. A request to stop ends the trials too, unless it is
        the fault (``preempted``)."""
        os.environ[VARIABLE] = json.dumps([asdict(fault) for fault in faults])
        try:
            supervisor = create_supervisor(
                config or self.config, folder, None if own_server else self.server, resume=resume, faulty=bool(faults)
            )
            code = supervisor.run()
            if supervisor.stop.count and not preempted:
                raise KeyboardInterrupt
            self.began = supervisor.began
            return code
        except (UsageError, OSError) as error:
            print(f"shoal: error: {error}", file=sys.stderr, flush=True)
            return 2 if isinstance(error, UsageError) else 1
        finally:
            del os.environ[VARIABLE]

    def _preempt(self, folder: Path, rng: random.Random) -> Trial:
        """Ask the run to stop, as Ctrl-C and job managers do; then resume it from the step after which it stopped."""
        step, pause = rng.randrange(1, max(2, self.steps - 4)), rng.random() * 0.05
        trial = Trial("preempt", f"step {step}")

        def ask(ended: threading.Event) -> None:
            wait_until(lambda: ended.is_set() or steps_done(folder) >= step, LIMIT_SECONDS)
            if not ended.wait(pause):
                os.kill(os.getpid(), signal.SIGTERM)

        with StopRequests(), beside(ask):  # a request may come when the run has just ended by itself
            code = self._supervise(folder, preempted=True)
        self._expect(trial, KINDS["preempt"], code)
        if code == PREEMPTED:
            saved = last_checkpoint(folder)
            trial.reached = read_metrics(folder)[-1].step
            self._expect(trial, REPAIRED, self._supervise(folder, resume=True))
            if self.began != trial.reached:
                trial.problems.append(f"stopped after step {trial.reached} with {saved and saved.name} as its newest")
        return trial

    def _kill_supervisor(self, folder: Path, rng: random.Random) -> Trial:
        """Kill the supervisor (SIGKILL) of a run that was started by the command, then resume the run."""
        step = rng.randrange(min(self.config.checkpoint.every + 1, self.steps - 2), self.steps - 1)
        trial = Trial("kill-supervisor", f"step {step}")
        toml = self.folder / "run.toml"
        save_config(self.config, toml)
        words = [sys.executable, "-m", "shoal", "train", str(toml), "--run-folder", str(folder)]
        parent = subprocess.Popen(words, env=safe_environment(os.environ))
        saved = folder / "checkpoints"
        wait_until(
            lambda: parent.poll() is not None or (steps_done(folder) >= step and list_checkpoints(saved)), LIMIT_SECONDS
        )
        if parent.poll() is not None:
            trial.problems.append(f"it ended with code {parent.returncode} before it could be killed")
            return trial
        family = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(rng.random() * 0.2)
        trial.reached = steps_done(folder)
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(family, timeout=EXIT_SECONDS)
        if alive:
            trial.problems.append(f"{len(alive)} processes outlived their supervisor")
        for process in alive:
            process.kill()
        (folder / PROCESSES_FILE).unlink(missing_ok=True)  # the killed supervisor could not
        found, wanted = last_checkpoint(folder), last_checkpoint(self.reference)
        if found is None or wanted is None or found.name != wanted.name:
            self._expect(trial, REPAIRED, self._supervise(folder, resume=True))
        return trial

    def _disturb_disk(self, name: str, folder: Path, rng: random.Random) -> Trial:
        """Fill a small disk, or make the checkpoint folder read-only, until the run has reported it."""
        kind, begin = KINDS[name], self.log.stat().st_size
        step = rng.randrange(1, max(2, self.steps - self.config.checkpoint.every))
        trial = Trial(name, f"step {step}")
        size = 4 * sum(path.stat().st_size for path in self.reference.rglob("*") if path.is_file())
        run, checkpoints, kept = folder / "run", folder / "run" / "checkpoints", folder.with_name(f"{folder.name}-kept")

        def reported() -> bool:
            return re.search(kind.message, read_from(self.log, begin)) is not None

        def act(ended: threading.Event) -> None:
            try:
                if not wait_until(lambda: ended.is_set() or steps_done(run) >= step, seconds=120) or ended.is_set():
                    trial.problems.append(f"it did not reach step {step}")
                    return
                with full_disk(folder) if name == "disk-full" else read_only(checkpoints):
                    disturbed_path(run).touch()
                    wait_until(lambda: ended.is_set() or reported(), LIMIT_SECONDS)
            except subprocess.CalledProcessError as error:
                trial.problems.append(f"{name}: {error.stderr.decode(errors='replace').strip()}")
            finally:
                with suppress(FileNotFoundError):  # no run began
                    disturbed_path(run).touch()  # the waiting rank continues

        with small_disk(folder, size):
            with beside(act):
                code = self._supervise(run, [Planted("wait", 0, step, "F")])
            disturbed_path(run).unlink(missing_ok=True)
            self._expect(trial, kind, code)
            shutil.copytree(run, kept)
        kept.rename(folder)
        return trial

    def _fill_memory(self, folder: Path, rng: random.Random) -> tuple[Trial, int]:
        """Fill the memory folder of a run that saves each step there, then kill a rank; return also this rank."""
        step, rank = rng.randrange(1, max(2, self.steps - 3)), rng.randrange(self.ranks)
        trial, memory = Trial("memory-full", f"rank {rank}, step {step + 2}"), folder.with_name(f"{folder.name}-memory")
        state = sum(path.stat().st_size for path in self.reference.rglob("*.safetensors"))
        config = self.config.replace(failover={"memory_every": 1, "memory_folder": memory})

        def act(ended: threading.Event) -> None:
            wait_until(lambda: ended.is_set() or steps_done(folder) >= step, seconds=120)
            with full_disk(memory):
                disturbed_path(folder).touch()
                ended.wait()

        faults = [Planted("wait", 0, step, "F"), Planted("kill", rank, step + 1, "F")]
        with small_disk(memory, 8 * state + (16 << 20)):
            with beside(act):
                self._expect(trial, KINDS["memory-full"], self._supervise(folder, faults, config=config))
            disturbed_path(folder).unlink(missing_ok=True)
            trial.problems += [f"remains: {path}" for path in memory.iterdir()]
        return trial, rank

    def _forks(self) -> set[psutil.Process]:
        """Return the forks of the server that are alive."""
        return set(psutil.Process(self.server.pid).children(recursive=True)) if self.server.pid else set()

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _expect(self, trial: Trial, kind: FaultType, code: int) -> None:
        if code not in kind.codes:
            trial.problems.append(f"ended with code {code}, not {' or '.join(map(str, kind.codes))}")

    def _judge(self, trial: Trial, kind: FaultType, folder: Path, output: str, rank: int) -> None:
        events = read_events(folder)
        trial.lost = [event["lost"] for event in events if event["event"] == "recovered"]
        trial.seconds = [event["seconds"] for event in events if event["event"] == "recovered"]
        trial.in_process = sum(event["event"] == "recovered" and event["kind"] == "in process" for event in events)
        if trial.reached is not None:
            trial.lost.append(max(0, trial.reached - self.began))
        # An incomplete save cannot be resumed, so a failure may cost the steps of two intervals.
        every = self.config.failover.memory_every or self.config.checkpoint.every
        bound = (2 * every or self.steps) + (self.config.checkpoint.every if kind.effect in DAMAGES else 0)
        if trial.lost and max(trial.lost) > bound:
            trial.problems.append(f"{max(trial.lost)} steps lost, but at most {bound} are promised")
        unread = kind.effect in DAMAGES and self.config.failover.memory_every  # states in memory come first
        unread = unread or (kind.effect == "slow" and not self.config.failover.stragglers_every)
        message = kind.message
        if trial.fault == "returned-node" and self.shrinks:  # the run may end before the replica can join
            message = KINDS["lost-node"].message
        if not unread and not re.search(message.replace("RANK", str(rank)), output):
            trial.problems.append(f"no message matches {message!r}")
        if left := self._forks() - self.others:
            trial.problems.append(f"{len(left)} ranks still run")
        for pattern in LEFTOVERS:
            trial.problems += [f"remains: {path.relative_to(folder)}" for path in folder.rglob(pattern)]
        if (memory := run_dir(folder, self.config.failover)).exists():
            trial.problems.append(f"remains: {memory}")
        for _, path in list_checkpoints(folder / "checkpoints"):
            try:
                verify(path)
            except CheckpointError as error:
                if kind.effect not in DAMAGES:
                    trial.problems.append(str(error))
        rounded = kind.rounded or (self.shrinks and any(event["event"] == "replanned" for event in events))
        rounding = ROUNDING.get(self.config.train.precision, ROUGH) if rounded else None
        trial.problems += compare_checkpoints(last_checkpoint(self.reference), last_checkpoint(folder), rounding)


def create_supervisor(
    config: RunConfig, folder: Path, server: PreforkServer | None, *, resume: bool = False, faulty: bool = False
) -> Supervisor:
    """Create the supervisor of a run on this machine's CPU; with ``faulty``, inject the faults of the environment."""
    if not resume:
        new_run(config, folder)
    module = "shoal.testing.chaos.fault_injection" if faulty else "shoal.launch.worker"
    survivable = survives_rank_loss(config)
    return Supervisor(config, folder, "cpu", survivable=survivable, resume=resume, module=module, server=server)


@contextmanager
def beside(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call a function in a thread during the context, with an event that is set at its end."""
    ended = threading.Event()
    thread = threading.Thread(target=act, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def read_from(log: Path, begin: int) -> str:
    """Read a log from a byte on."""
    with log.open(errors="replace") as file:
        file.seek(begin)
        return file.read()
