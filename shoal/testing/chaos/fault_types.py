"""The kinds of faults that `shoal chaos` knows: what each does, where, and what the run must say of it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.testing.chaos.fault_injection import COMMITTING, RAISED, STAGING


@dataclass(frozen=True)
class FaultType:
    """A kind of fault.

    Attributes:
        effect: of `Planted`; "" if it comes from outside the ranks.
        moment: a key of `OPS_OF`, STAGING or COMMITTING; "" if it comes from outside.
        says: a pattern that the messages must match, in which RANK is the rank.
        late: it happens only after the run has saved checkpoints.
        codes: the exit codes that the run may have: 0 if it recovers by itself; () for any but 0. A run that ends with
            another than 0 is repaired and resumed.
        rounded: the layout changes, so that the last state is the same only to rounding.
    """

    effect: str
    moment: str
    says: str
    late: bool = False
    codes: tuple[int, ...] = (0,)
    rounded: bool = False


KILLED = r"rank RANK was killed by SIGKILL"
KINDS = {
    "kill-forward": FaultType("kill", "forward", KILLED),
    "kill-backward": FaultType("kill", "backward", KILLED),
    "kill-collective": FaultType("kill", "collective", KILLED),
    "kill-optimizer": FaultType("kill", "optimizer", KILLED),
    "kill-staging": FaultType("kill", STAGING, KILLED),
    "kill-committing": FaultType("kill", COMMITTING, r"rank 0 was killed by SIGKILL"),
    "kill-supervisor": FaultType("", "", "", late=True),
    "stop": FaultType("stop", "any", r"rank RANK is stopped \(SIGSTOP\)"),
    "exit-0": FaultType("exit", "any", r"rank RANK exited with code 0, though it was not done"),
    "exception": FaultType("raise", "any", rf"rank RANK exited with code 1(.|\n)*ArithmeticError: {RAISED}"),
    "nan": FaultType("nan", "forward", r"First on rank RANK ", codes=(0, 1)),
    "bit-checkpoint": FaultType("flip", "any", r"step-\d+\S* is damaged", late=True),
    "truncated-checkpoint": FaultType("truncate", "any", r"step-\d+\S* is damaged", late=True),
    "missing-file": FaultType("remove", "any", r"step-\d+\S* cannot be read", late=True),
    "bit-shard": FaultType("shard", "any", r"damaged shard \S+\.bin: its checksum", late=True, codes=(2,)),
    "disk-full": FaultType("", "", r"[Nn]o space left on device", late=True, codes=()),
    "read-only": FaultType("", "", r"[Rr]ead-only file system", late=True, codes=()),
    "slow": FaultType("slow", "forward", r"slowest: rank RANK "),
    "lost-node": FaultType("kill", "any", r"rank RANK was killed(.|\n)*devices are there: now on", rounded=True),
    "returned-node": FaultType(
        "kill", "any", r"devices are there: now on(.|\n)*devices are there: now on", rounded=True
    ),
}  # fmt: skip
"""By name."""

MENDED = FaultType("", "", "")
NEED_MOUNTS = {"disk-full", "read-only"}
OPS_OF = {"forward": "F", "backward": "BIW", "collective": "R", "optimizer": "S", "any": "FBIWRS"}
