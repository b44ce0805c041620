"""Detect this process's rank from the environment set by shoal, torchrun or SLURM."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.base.errors import DivergenceError, UsageError, redact
from shoal.base.files import read_json, write_atomically
from shoal.engine.device import pick_device

PLACE = "SHOAL_PLACE"  # variable: see `RankEnv.place`


@dataclass(frozen=True)
class RankEnv:
    """Position of this process among the ranks of a run."""

    rank: int
    world_size: int
    local_rank: int  # index among the ranks of this machine
    local_world_size: int
    # launcher: `RankProcesses` ("local"), torchrun (or anything that sets its variables), or SLURM's srun
    how: Literal["local", "torchrun", "slurm"]
    master: tuple[str, int] = ("", 0)  # rendezvous address and port, unless the ranks rendezvous through a folder
    # index of the device of a process that may have had another rank; None takes the local rank
    place: int | None = None

    def device(self, choice: str) -> torch.device:
        """Select the device of this rank. See `pick_device`."""
        index = self.local_rank if self.place is None else self.place
        return pick_device(choice, index, bound=self.how == "slurm")

    def neighbours(self) -> range:
        """Return the ranks of this machine that are in the world (ranks are numbered machine by machine)."""
        first = self.rank - self.local_rank
        return range(first, min(first + self.local_world_size, self.world_size))

    def among(self, ranks: int) -> RankEnv:
        """Return the same position in a world of the first ``ranks`` ranks; also set torchrun's variables to it."""
        if self.how == "torchrun" and ranks < self.world_size:
            os.environ["WORLD_SIZE"] = str(ranks)
        return replace(self, world_size=min(ranks, self.world_size))


def detect_rank_env() -> RankEnv | None:
    """Return the rank that this process was started as; None if it is to start ranks itself (also a lone SLURM task).

    Raises:
        UsageError: variables of torchrun are missing or are not numbers.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _from_torchrun()
    # An sbatch script also has SLURM_PROCID; only tasks started by srun have the list of the step's nodes.
    slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    if all(name in os.environ for name in slurm) and _number("SLURM_NTASKS") > 1:
        return _from_slurm()
    return None


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
        return RankEnv(*place, "local", place=int(os.environ.get(PLACE, place[2])))
    return RankEnv(*place, "torchrun", (os.environ["MASTER_ADDR"], _number("MASTER_PORT", below=1 << 16)))


def _from_slurm() -> RankEnv:
    tasks_per_node = _expand_counts(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    # Two steps of one job may run concurrently; the range is below the kernel's ephemeral ports.
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
    """Return the first host of a SLURM node list: ``gpu[007-009,12],login`` gives ``gpu007``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert first is not None, nodes
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0])


def _expand_counts(counts: str) -> list[int]:
    """Expand SLURM's tasks per node: ``2(x3),1`` gives ``[2, 2, 2, 1]``."""
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
    """Return the folder of the rendezvous, payload and records of locally started ranks."""
    return Path(os.environ["SHOAL_SCRATCH"])


def read_payload() -> dict[str, Any]:
    return read_json(scratch_folder() / "payload.json")


def record_end(folder: Path | None, rank: int, error: BaseException) -> tuple[bool, str]:
    """Record what ended a rank, for its parent or the next attempt; return whether it was bad input, and the report."""
    usage, diverged = isinstance(error, UsageError), isinstance(error, DivergenceError)
    report = redact(str(error) if usage or diverged else "".join(traceback.format_exception(error)))
    if folder is not None:
        ended = {"when": time.monotonic(), "report": report, "usage": usage, "diverged": diverged}
        with suppress(OSError):  # a full disk: the parent then reports how the process ended
            write_atomically(failure_path(folder, rank), json.dumps(ended))  # atomic, as a signal may kill this process
    return usage, report


def failure_path(scratch: Path, rank: int) -> Path:
    """Return the file in which a rank records what ended it."""
    return scratch / f"failure-{rank}.json"


def stack_path(scratch: Path, rank: int) -> Path:
    """Return the file to which a rank writes its stack on request."""
    return scratch / f"stack-{rank}"
