"""The kinds of faults that `shoal chaos` knows: what each does, where, and what the run must say of it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.testing.chaos.fault_injection import COMMITTING, RAISED, STAGING


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        deed: of `Planted`; "" where it is done from outside.
        moment: of `inject.OPS`, for what a rank does to itself.
        says: what the messages must say, a pattern in which RANK is the rank.
        late: the run has checkpoints before it happens.
        codes: how the run may end: 0 where it mends itself; none for any other, after which it is mended and resumed.
        rounded: the layout changes, so that the last state is equal to rounding.
    """

    deed: str
    moment: str
    says: str
    late: bool = False
    codes: tuple[int, ...] = (0,)
    rounded: bool = False


KILLED = r"rank RANK was killed by SIGKILL"
KINDS = {
    "kill-forward": Kind("kill", "forward", KILLED),
    "kill-backward": Kind("kill", "backward", KILLED),
    "kill-collective": Kind("kill", "collective", KILLED),
    "kill-optimizer": Kind("kill", "optimizer", KILLED),
    "kill-staging": Kind("kill", STAGING, KILLED),
    "kill-committing": Kind("kill", COMMITTING, r"rank 0 was killed by SIGKILL"),
    "kill-supervisor": Kind("", "", "", late=True),
    "stop": Kind("stop", "any", r"rank RANK is stopped \(SIGSTOP\)"),
    "exit-0": Kind("exit", "any", r"rank RANK exited with code 0, though it was not done"),
    "exception": Kind("raise", "any", rf"rank RANK exited with code 1(.|\n)*ArithmeticError: {RAISED}"),
    "nan": Kind("nan", "forward", r"First on rank RANK ", codes=(0, 1)),
    "bit-checkpoint": Kind("flip", "any", r"step-\d+\S* is damaged", late=True),
    "truncated-checkpoint": Kind("truncate", "any", r"step-\d+\S* is damaged", late=True),
    "missing-file": Kind("remove", "any", r"step-\d+\S* cannot be read", late=True),
    "bit-shard": Kind("shard", "any", r"damaged shard \S+\.bin: its checksum", late=True, codes=(2,)),
    "disk-full": Kind("", "", r"[Nn]o space left on device", late=True, codes=()),
    "read-only": Kind("", "", r"[Rr]ead-only file system", late=True, codes=()),
    "slow": Kind("slow", "forward", r"slowest: rank RANK "),
    "lost-node": Kind("kill", "any", r"rank RANK was killed(.|\n)*devices are there: now on", rounded=True),
    "returned-node": Kind("kill", "any", r"devices are there: now on(.|\n)*devices are there: now on", rounded=True),
}  # fmt: skip
"""By name."""

MENDED = Kind("", "", "")
NEED_MOUNTS = {"disk-full", "read-only"}
OPS_OF = {"forward": "F", "backward": "BIW", "collective": "R", "optimizer": "S", "any": "FBIWRS"}
