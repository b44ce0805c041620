"""shoal with a fault planted in it: ``python -m tests.trainings.faulty [train ...]``; without words, a rank of
`launch`.

FAULT is KIND@STEP:RANK:OP, as in ``kill@5:1:B``: what rank 1 does when its fifth step comes to its first backward. Of
several with commas each is of one attempt, in order; those with & are of the same one; with FAULT_ALWAYS the first is
of every attempt. ``@+2`` is the second step of the attempt. LOST_DEVICES is a JSON list of what `LOST_FILE` is to hold
when each happens.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.launch.devices import LOST_FILE
from shoal.launch.worker import run_generations
from shoal.training.trainer import Trainer


def fail(kind: str) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(0)
        case "raise":
            raise ArithmeticError("the planted fault")
        case "usage":
            raise UsageError("the planted fault")
        case "stall":
            stuck_here()
        case "fill":  # the disks FULL, and be lost
            for disk in os.environ["FULL"].split(":"):
                with suppress(OSError), open(f"{disk}/filler", "wb", buffering=0) as filler:
                    while filler.write(bytes(1 << 16)):
                        pass
            os.kill(os.getpid(), signal.SIGKILL)
        case "free":
            for disk in os.environ["FULL"].split(":"):
                with suppress(FileNotFoundError):  # a later micro-batch
                    os.remove(f"{disk}/filler")
        case "hold":  # the lock of the interpreter, so that not even a thread gives a sign of life, and sleep
            while True:
                ctypes.PyDLL(None).sleep(1000)


def stuck_here() -> None:
    time.sleep(1000)


class Fault:
    """A recorder of the runtime, that fails at an action."""

    def __init__(self, trainer: Trainer, text: str, lost: list[int] | None):
        engine, self.lost, self.file = trainer.engine, lost, trainer.folder / LOST_FILE
        kind, _, place = text.partition("@")
        step, rank, op = place.split(":")
        self.kind, self.at, self.op = kind, int(step), op
        self.now, self.made, self._step = 0, 0, engine.step
        self.relative = step.startswith("+")  # of this attempt
        if int(rank) == engine.mesh.rank:
            engine.step = self.step
            engine.runtime.recorders.append(self)

    def step(self, number: int, **options: bool) -> object:
        self.made += 1
        self.now = self.made if self.relative else number + 1
        return self._step(number, **options)

    def begin(self, action) -> None:
        if (self.now, str(action.op)) == (self.at, self.op):
            if self.lost is not None:
                self.file.write_text(json.dumps(self.lost))
            fail(self.kind)

    def arrived(self, action) -> None:
        return

    def end(self, action) -> None:
        return


def plant() -> None:
    build = Trainer.__init__

    def init(trainer: Trainer, *args, **options) -> None:
        made = os.environ.get("SHOAL_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        attempt = 0 if "FAULT_ALWAYS" in os.environ else int(made)
        faults = dict(enumerate(os.environ.get("FAULT", "").split(","))).get(attempt, "").split("&")
        fault = next((one for one in faults if f":{os.environ['RANK']}:" in one), "")
        assert sum(issubclass(type(o), Trainer) for o in gc.get_objects()) == 1, "the trainer before stayed in memory"
        if fault and fault.endswith(f"@0:{os.environ['RANK']}:"):  # before all steps
            fail(fault.partition("@")[0])
        build(trainer, *args, **options)
        if fault and fault.endswith(f"@end:{os.environ['RANK']}:"):  # after all steps
            trainer.barrier = lambda: fail(fault.partition("@")[0])
        elif fault and "@end" not in fault and "@start" not in fault:
            lost = json.loads(os.environ.get("LOST_DEVICES", "[]"))
            Fault(trainer, fault, lost[attempt] if lost else None)

    Trainer.__init__ = init


if __name__ == "__main__":
    plant()
    first = os.environ.get("FAULT", "").split(",")[0]
    if first == f"stop@start:{os.environ.get('RANK')}:" and os.environ["SHOAL_ATTEMPT"] == "0":
        fail("stop")  # before the first sign of life
    sys.exit(main() if sys.argv[1:] else run_generations())
