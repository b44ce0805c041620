"""Rank of a run with injected faults: ``python -m shoal.testing.chaos.fault_injection``.

The environment variable `VARIABLE` lists the faults of all ranks and attempts; each rank selects its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from shoal.engine.checkpoint import list_checkpoints, save
from shoal.engine.runtime import Recorder
from shoal.launch.devices import LOST_FILE
from shoal.launch.worker import run_generations
from shoal.pipeline.program import Action
from shoal.training.trainer import Trainer

VARIABLE = "SHOAL_INJECT"
RAISED = "planted by shoal chaos"
SLEEP = 0.02  # delay of each action of a slow rank [s]


@dataclass(frozen=True)
class Planted:
    """One fault of one rank; steps and attempts count from 0."""

    effect: str  # see `InjectedFault.act`
    rank: int
    step: int
    op: str  # of the action in which it happens; STAGING, COMMITTING: in the first checkpoint from this step on; START
    nth: int = 0  # index among the step's actions with this op
    fraction: float = 0.0  # delay within the action, relative to the duration of the previous one of its kind
    attempt: int = 0
    lost_devices: list[int] | None = None  # written into the file of lost devices, unless None
    seed: int = 0  # of its other random choices


SAVING = STAGING, COMMITTING = "staging", "committing"
START = "start"  # before the first step of an attempt
DAMAGES = ("flip", "truncate", "remove")  # of a file; each is also an effect


def disturbed_path(run: Path) -> Path:
    """Return the file, outside the run's disk, that exists once the run's disk has been disturbed from outside."""
    return run.parent.with_name(f"{run.parent.name}-disturbed")


def plant(trainer: Trainer) -> None:
    mine = (trainer.mesh.rank, int(os.environ.get("SHOAL_ATTEMPT", 0)))
    for values in json.loads(os.environ.get(VARIABLE, "[]")):
        if ((planted := Planted(**values)).rank, planted.attempt) == mine:
            InjectedFault(trainer, planted)


class InjectedFault(Recorder):
    """`Recorder` of a rank's actions that triggers a fault at its moment."""

    def __init__(self, trainer: Trainer, planted: Planted):
        self.trainer, self.planted, self.random = trainer, planted, random.Random(planted.seed)
        self.step, self.count = -1, 0
        self.begun, self.lasted = 0.0, 0.0
        trainer.engine.runtime.recorders.insert(0, self)  # first, so that the other recorders measure its delays
        if planted.op == START:
            self.act()
        elif planted.op == STAGING:
            self._around(save, "write_part")
        elif planted.op == COMMITTING:
            self._around(trainer.states.disk, "_commit")

    # ---- moments -----------------------------------------------------------------------------------------------------

    def begin(self, action: Action) -> None:
        if self.trainer.step != self.step:
            self.step, self.count = self.trainer.step, 0
        self.begun = time.monotonic()
        if action.op.value != self.planted.op:
            return
        if (self.step, self.count) == (self.planted.step, self.planted.nth):
            self._act_in(self.planted.fraction * self.lasted)
        self.count += 1

    def end(self, action: Action) -> None:
        if self.planted.effect == "slow" and self.step >= self.planted.step:
            time.sleep(SLEEP)
        if action.op.value == self.planted.op:
            self.lasted = time.monotonic() - self.begun

    def _around(self, owner: object, name: str) -> None:
        """Trigger the fault in a function of the background writer of checkpoints."""
        original: Callable[..., Any] = getattr(owner, name)

        def around(*args: Any) -> Any:
            if self.trainer.step >= self.planted.step:
                self._act_in(self.planted.fraction * max(self.lasted, 1e-3))
            begin = time.monotonic()
            result = original(*args)
            self.lasted = time.monotonic() - begin
            return result

        setattr(owner, name, around)

    def _act_in(self, seconds: float) -> None:
        """Act after some seconds, in the middle of an action, if the effect is a signal; otherwise immediately."""
        if self.planted.effect in ("kill", "stop") and seconds > 0:
            threading.Timer(seconds, self.act).start()
        else:
            self.act()

    # ---- effects -----------------------------------------------------------------------------------------------------

    def act(self) -> None:
        folder = self.trainer.folder
        if self.planted.lost_devices is not None:
            (folder / LOST_FILE).write_text(json.dumps(self.planted.lost_devices))
        match self.planted.effect:
            case "kill":
                kill_self()
            case "kill-parent":  # the prefork server, with which all ranks die
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(0)
            case "raise":
                raise ArithmeticError(RAISED)
            case "nan":
                self._insert_nan()
            case "wait":
                while not disturbed_path(folder).exists():
                    time.sleep(SLEEP)
            case "shard":
                shards = (self.trainer.config.data.cache / "shards").glob("*/*.bin")  # the next attempt checks them
                damage(sorted(shards), "flip", self.random)
                kill_self()
            case how if how in DAMAGES:
                self.trainer.states.wait()  # otherwise a newer, intact checkpoint could appear
                newest = list_checkpoints(folder / "checkpoints")[-1].path
                damage(sorted(Path(str(newest)).glob("*.safetensors")), how, self.random)
                kill_self()

    def _insert_nan(self) -> None:
        """Put a NaN into the output of one layer of this rank from now on."""

        def with_nan(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros_like(output)
            mask.view(-1)[0] = float("nan")
            return output + mask

        modules = (pair for stage in self.trainer.engine.stages for pair in stage.module.named_modules())
        layers = [module for name, module in modules if re.fullmatch(r"layers\.\d+", name)]
        self.random.choice(layers).register_forward_hook(with_nan)


def kill_self() -> NoReturn:
    """Kill this process, as the kernel does when memory is exhausted."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def damage(files: list[Path], how: str, rng: random.Random) -> Path:
    """Flip a bit of a randomly chosen file, truncate it or remove it; return the file."""
    file = rng.choice(files)
    if how == "remove":
        file.unlink()
        return file
    place = rng.randrange(file.stat().st_size)
    with open(file, "r+b") as opened:
        if how == "truncate":
            opened.truncate(place)
        else:
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return file


if __name__ == "__main__":
    sys.exit(run_generations(plant))
