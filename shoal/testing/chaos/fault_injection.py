"""The worker of a run with planted faults, for `shoal chaos`: ``python -m shoal.testing.chaos.fault_injection``.

The faults of all attempts are one list in the environment (`VARIABLE`), from which every rank takes its own. A run that
is not under test imports nothing of this.
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

from shoal.engine.checkpoint import list_checkpoints
from shoal.launch.checks.devices import LOST_FILE
from shoal.launch.rank_env import read_payload
from shoal.launch.worker import run
from shoal.pipeline.program import Action
from shoal.training.trainer import Trainer

VARIABLE = "SHOAL_INJECT"
RAISED = "planted by shoal chaos"
SLEEP = 0.02  # seconds by which each action of a slow rank is longer


@dataclass(frozen=True)
class Planted:
    """One fault of one rank.

    Attributes:
        effect: what it does (`InjectedFault.do`).
        rank: the rank that has it.
        step: in which step, from 0.
        op: of the action in which it happens; STAGING or COMMITTING of a checkpoint, the first from that step on.
        nth: which of the step's actions of this op.
        fraction: how far into the action, as a part of the time that the last one of its kind took.
        attempt: of the run, from 0.
        then: what it writes into the file of lost devices, if anything.
        seed: of its other random choices.
    """

    effect: str
    rank: int
    step: int
    op: str
    nth: int = 0
    fraction: float = 0.0
    attempt: int = 0
    then: list[int] | None = None
    seed: int = 0


SAVING = STAGING, COMMITTING = "staging", "committing"
DAMAGES = ("flip", "truncate", "remove")  # of a file; each is also an effect


def disturbed(run: Path) -> Path:
    """The file, outside the run's disk, that tells a waiting rank that its run has been disturbed from outside."""
    return run.parent.with_name(f"{run.parent.name}-disturbed")


def plant(trainer: Trainer) -> None:
    """Plant the faults of this rank in this attempt."""
    mine = (trainer.mesh.rank, int(os.environ.get("SHOAL_ATTEMPT", 0)))
    for values in json.loads(os.environ.get(VARIABLE, "[]")):
        if ((planted := Planted(**values)).rank, planted.attempt) == mine:
            InjectedFault(trainer, planted)


class InjectedFault:
    """A `Recorder` that makes a fault happen at its moment."""

    def __init__(self, trainer: Trainer, planted: Planted):
        self.trainer, self.planted, self.random = trainer, planted, random.Random(planted.seed)
        self.step, self.count = -1, 0
        self.begun, self.lasted = 0.0, 0.0
        trainer.engine.runtime.recorders.insert(0, self)  # what it adds to an action is in what the others measure
        if planted.op == STAGING:
            self._around("_write_part")
        elif planted.op == COMMITTING:
            self._around("_commit")

    # ---- moments -----------------------------------------------------------------------------------------------------

    def begin(self, action: Action) -> None:
        """As `Recorder`."""
        if self.trainer.step != self.step:
            self.step, self.count = self.trainer.step, 0
        self.begun = time.monotonic()
        if action.op.value != self.planted.op:
            return
        if (self.step, self.count) == (self.planted.step, self.planted.nth):
            self.soon(self.planted.fraction * self.lasted)
        self.count += 1

    def arrived(self, action: Action) -> None:
        """As `Recorder`."""

    def end(self, action: Action) -> None:
        """As `Recorder`."""
        if self.planted.effect == "slow" and self.step >= self.planted.step:
            time.sleep(SLEEP)
        if action.op.value == self.planted.op:
            self.lasted = time.monotonic() - self.begun

    def _around(self, name: str) -> None:
        """Make the fault happen while a checkpoint is written in the background."""
        original: Callable[..., Any] = getattr(self.trainer.states.disk, name)

        def around(*args: Any) -> Any:
            if self.trainer.step >= self.planted.step:
                self.soon(self.planted.fraction * max(self.lasted, 1e-3))
            begin = time.monotonic()
            result = original(*args)
            self.lasted = time.monotonic() - begin
            return result

        setattr(self.trainer.states.disk, name, around)

    def soon(self, seconds: float) -> None:
        """Do it after some seconds, in the middle of an action, if the effect can; else now."""
        if self.planted.effect in ("kill", "stop") and seconds > 0:
            threading.Timer(seconds, self.do).start()
        else:
            self.do()

    # ---- effects -----------------------------------------------------------------------------------------------------

    def do(self) -> None:
        """Make the fault happen."""
        folder = self.trainer.folder
        if self.planted.then is not None:
            (folder / LOST_FILE).write_text(json.dumps(self.planted.then))
        match self.planted.effect:
            case "kill":
                end_here()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(0)
            case "raise":
                raise ArithmeticError(RAISED)
            case "nan":
                self.spoil()
            case "wait":
                while not disturbed(folder).exists():
                    time.sleep(SLEEP)
            case "shard":
                shards = (self.trainer.config.data.cache / "shards").glob("*/*.bin")  # the next attempt checks them
                damage(sorted(shards), "flip", self.random)
                end_here()
            case how if how in DAMAGES:
                self.trainer.states.wait()  # else a better one appears meanwhile
                newest = list_checkpoints(folder / "checkpoints")[-1].path
                damage(sorted(Path(str(newest)).glob("*.safetensors")), how, self.random)
                end_here()

    def spoil(self) -> None:
        """Put a NaN into the output of one layer of this rank from now on."""

        def spoiled(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros_like(output)
            mask.view(-1)[0] = float("nan")
            return output + mask

        modules = (pair for stage in self.trainer.engine.stages for pair in stage.module.named_modules())
        layers = [module for name, module in modules if re.fullmatch(r"layers\.\d+", name)]
        self.random.choice(layers).register_forward_hook(spoiled)


def end_here() -> NoReturn:
    """Kill this process, as the kernel does when memory is exhausted."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def damage(files: list[Path], how: str, rng: random.Random) -> Path:
    """Flip one bit of one of the files, cut it short, or remove it; returns which."""
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
    sys.exit(run(read_payload(), plant))
