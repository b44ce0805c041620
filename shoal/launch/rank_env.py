"""Find out which rank this process is, from the environment that shoal, torchrun or SLURM made for it."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.base.errors import UsageError, redact
from shoal.base.files import write_whole
from shoal.engine.device import pick_device


@dataclass(frozen=True)
class RankEnv:
    """This process's place among the ranks of a run.

    Attributes:
        how: who started it: `RankProcesses`, torchrun (or whatever sets the same variables), or SLURM's srun.
        master: address and port where the ranks meet; None where they meet in a file.
    """

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this machine
    local_world_size: int
    how: Literal["local", "torchrun", "slurm"]
    master: tuple[str, int] | None = None

    @property
    def meeting_point(self) -> tuple[str, int]:
        """`master`, where the ranks do not meet in a file."""
        assert self.master is not None
        return self.master

    def device(self, choice: str) -> torch.device:
        """`pick_device` for this rank."""
        return pick_device(choice, self.local_rank, bound=self.how == "slurm")

    def neighbours(self) -> range:
        """The ranks of this machine (numbered machine by machine) that have a place in the world."""
        first = self.rank - self.local_rank
        return range(first, min(first + self.local_world_size, self.world_size))

    def among(self, ranks: int) -> RankEnv:
        """The same place among the first so many ranks alone; also in the environment, for what reads it there."""
        if self.how == "torchrun" and ranks < self.world_size:
            os.environ["WORLD_SIZE"] = str(ranks)
        return replace(self, world_size=min(ranks, self.world_size))


def detect_rank_env() -> RankEnv | None:
    """The rank that this process was started as; None where it is to start ranks itself, as also a lone SLURM task is.

    Raises:
        UsageError: the variables of torchrun are there in part, or are not numbers.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _from_torchrun()
    # An sbatch script itself also has SLURM_PROCID; only what srun starts has the list of the step's nodes.
    slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    if all(name in os.environ for name in slurm) and _number("SLURM_NTASKS") > 1:
        return _from_slurm()
    return None


def require_rank_env() -> RankEnv:
    """`detect_rank_env`, where this process must be a rank.

    Raises:
        UsageError: also where it is none.
    """
    if (member := detect_rank_env()) is None:
        raise UsageError("this process was started neither by shoal nor by torchrun or srun.")
    return member


def _from_torchrun() -> RankEnv:
    local = "SHOAL_SCRATCH" in os.environ
    needed = ["LOCAL_RANK", "LOCAL_WORLD_SIZE"] + ([] if local else ["MASTER_ADDR", "MASTER_PORT"])
    if missing := [name for name in needed if name not in os.environ]:
        raise UsageError(
            f"RANK and WORLD_SIZE are set, as torchrun does, but {', '.join(missing)} are not."
            "\n  Set them too, or unset RANK and WORLD_SIZE to start the ranks on this machine."
        )
    ranks, local_ranks = _number("WORLD_SIZE"), _number("LOCAL_WORLD_SIZE")
    place = _number("RANK", below=ranks), ranks, _number("LOCAL_RANK", below=local_ranks), local_ranks
    if local:
        return RankEnv(*place, "local")
    return RankEnv(*place, "torchrun", (os.environ["MASTER_ADDR"], _number("MASTER_PORT", below=1 << 16)))


def _from_slurm() -> RankEnv:
    tasks_per_node = _expand_counts(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    # Two steps of one job may run at once; the range is below that of the kernel's own choices.
    port = 20000 + (_number("SLURM_JOB_ID") * 7 + int(os.environ.get("SLURM_STEP_ID", "0"))) % 10000
    return RankEnv(
        rank=_number("SLURM_PROCID"),
        world_size=_number("SLURM_NTASKS"),
        local_rank=_number("SLURM_LOCALID"),
        local_world_size=tasks_per_node[int(os.environ.get("SLURM_NODEID", "0"))],
        how="slurm",
        master=(_first_host(os.environ["SLURM_STEP_NODELIST"]), port),
    )


def _first_host(nodes: str) -> str:
    """The first name in SLURM's notation: ``gpu[007-009,12],login`` gives ``gpu007``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert first is not None, nodes
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0])


def _expand_counts(counts: str) -> list[int]:
    """SLURM's notation of tasks per node: ``2(x3),1`` gives ``[2, 2, 2, 1]``."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _number(name: str, *, below: int | None = None) -> int:
    try:
        number = int(os.environ[name])
    except ValueError:
        raise UsageError(f"the environment variable {name} = {os.environ[name]!r} is not a number.") from None
    if below is not None and not 0 <= number < below:
        raise UsageError(f"the environment variable {name} = {number} is not one of 0 to {below - 1}.")
    return number


def scratch_folder() -> Path:
    """Where a rank that was started locally meets the others and its parent."""
    return Path(os.environ["SHOAL_SCRATCH"])


def read_payload() -> dict[str, Any]:
    """What the parent has for all ranks."""
    return json.loads((scratch_folder() / "payload.json").read_text())


def record_end(folder: Path | None, rank: int, error: BaseException) -> tuple[bool, str]:
    """Record what ended a rank, for its parent or the next attempt: whether it was bad input, and its report."""
    usage = isinstance(error, UsageError)
    report = redact(str(error) if usage else "".join(traceback.format_exception(error)))
    if folder is not None:
        ended = {"when": time.monotonic(), "report": report, "usage": usage}
        write_whole(record_path(folder, rank), json.dumps(ended))  # should a signal end this process meanwhile
    return usage, report


def record_path(scratch: Path, rank: int) -> Path:
    """Where a rank records what ended it."""
    return scratch / f"failure-{rank}.json"


def stack_path(scratch: Path, rank: int) -> Path:
    """Where a rank writes its stack when it is asked for it."""
    return scratch / f"stack-{rank}"
