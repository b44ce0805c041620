"""The faults of `shoal chaos`: what each does, when, and which message the run must print."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.testing.chaos.fault_injection import COMMITTING, RAISED, STAGING, START
from shoal.training.stop import PREEMPTED


@dataclass(frozen=True)
class FaultType:
    """A kind of fault."""

    effect: str  # see `Planted`; "" if it comes from outside the ranks
    moment: str  # a key of `MOMENT_OPS`, STAGING, COMMITTING or START; "" if it comes from outside
    message: str  # pattern of the expected message, in which RANK is the rank
    late: bool = False  # only after the run has saved checkpoints
    # exit codes that the run may have: 0 if it recovers by itself. A run that ends with another is repaired and
    # resumed.
    codes: tuple[int, ...] = (0,)
    rounded: bool = False  # the layout changes, so that the last state is equal only to rounding


KILLED = r"rank RANK was killed by SIGKILL"
ANY_KILLED = r"rank \d+ was killed by SIGKILL"  # of several, the one that ended first
KINDS = {
    "kill-forward": FaultType("kill", "forward", KILLED),
    "kill-backward": FaultType("kill", "backward", KILLED),
    "kill-collective": FaultType("kill", "collective", KILLED),
    "kill-optimizer": FaultType("kill", "optimizer", KILLED),
    "kill-staging": FaultType("kill", STAGING, KILLED),
    "kill-committing": FaultType("kill", COMMITTING, r"rank 0 was killed by SIGKILL"),
    "kill-start": FaultType("kill", START, r"rank RANK was killed by SIGKILL starting"),
    "kill-two": FaultType("kill", "any", ANY_KILLED),
    "kill-recovery": FaultType("kill", "any", ANY_KILLED + r"(.|\n)*" + ANY_KILLED),
    "kill-prefork": FaultType("kill-parent", "any", ANY_KILLED),
    "kill-supervisor": FaultType("", "", "", late=True),
    "preempt": FaultType("", "", "", codes=(0, PREEMPTED)),  # it may have ended just before
    "stop": FaultType("stop", "any", r"rank RANK is stopped \(SIGSTOP\)"),
    "exit-0": FaultType("exit", "any", r"rank RANK exited with code 0, though it was not done"),
    "exception": FaultType("raise", "any", rf"rank RANK exited with code 1(.|\n)*ArithmeticError: {RAISED}"),
    "nan": FaultType("nan", "forward", r"First on rank RANK ", codes=(0, 1)),
    "bit-checkpoint": FaultType("flip", "any", r"step-\d+\S* is damaged", late=True),
    "truncated-checkpoint": FaultType("truncate", "any", r"step-\d+\S* is damaged", late=True),
    "missing-file": FaultType("remove", "any", r"step-\d+\S* cannot be read", late=True),
    "bit-shard": FaultType("shard", "any", r"damaged shard \S+\.bin: its checksum", late=True, codes=(2,)),
    "disk-full": FaultType("", "", r"[Nn]o space left on device", late=True),
    "read-only": FaultType("", "", r"[Rr]ead-only file system", late=True),
    "memory-full": FaultType("", "", KILLED),
    "slow": FaultType("slow", "forward", r"slowest: rank RANK "),
    "lost-node": FaultType("kill", "any", r"rank RANK was killed(.|\n)*available: now on", rounded=True),
    "returned-node": FaultType(
        "kill", "any", r"available: now on(.|\n)*available: now on", rounded=True
    ),
}  # fmt: skip

REPAIRED = FaultType("", "", "")
NEED_MOUNTS = {"disk-full", "read-only", "memory-full"}
MOMENT_OPS = {"forward": "F", "backward": "BIW", "collective": "R", "optimizer": "S", "any": "FBIWRS"}
