"""Join this process to the ranks that shoal, torchrun or SLURM started."""

from __future__ import annotations

import faulthandler
import os
import sys
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import COLLECTIVE_SECONDS, die_with_parent, init_world, share_of_cores
from shoal.launch.rank_env import RankEnv, record_end, require_rank_env, scratch_folder, stack_path
from shoal.launch.rendezvous import create_store
from shoal.launch.watch.watchdog import write_stack_when_asked


def become_rank(
    device: str = "auto",
    threads: int = 0,
    timeout: float = COLLECTIVE_SECONDS,
    records: Path | None = None,
    member: RankEnv | None = None,
) -> RankEnv:
    """Make this process one rank of the world. Call it first, and only once.

    From then on an uncaught exception is recorded for the parent and ends the process immediately, without waiting for
    background threads. So leave the process group only on success; peers then fail after the cause.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: torch's CPU threads; 0 uses ``OMP_NUM_THREADS`` or divides the cores among the local ranks.
        timeout: timeout of every collective [s].
        records: folder in which this rank writes its stack on request.
        member: the rank; None uses `require_rank_env`.

    Raises:
        UsageError: the process was not started as a rank, or the device does not exist.
    """
    member = member or require_rank_env()
    place = scratch_folder() if member.how == "local" else records
    sys.excepthook = partial(_record_and_exit, place, member.rank)
    faulthandler.enable()
    if records is not None:
        write_stack_when_asked(stack_path(records, member.rank))
    if member.how != "slurm":  # SLURM itself ends the other tasks of a step
        die_with_parent(os.getppid())
    named = os.environ.get("OMP_NUM_THREADS", "")
    if threads or not named:
        torch.set_num_threads(threads or share_of_cores(member.local_world_size))
    elif member.how == "local" and named.isdigit() and int(named):
        # A forked process inherits torch's thread count from its server, not from its own variable.
        torch.set_num_threads(int(named))
    picked = member.device(device)
    if picked.type == "cpu":
        tune_process()
    init_world(member.rank, member.world_size, create_store(member, timeout), picked, timeout)
    return member


def _record_and_exit(
    folder: Path | None, rank: int, kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Record the exception for the parent, which shows only the earliest record, and exit (a ``sys.excepthook``)."""
    usage, report = record_end(folder, rank, error)
    # init_process_group wraps this hook in one that buffers sys.stderr until it returns, which it never does.
    print(report, file=sys.__stderr__, flush=True)
    sys.stdout.flush()
    os._exit(2 if usage else 1)
