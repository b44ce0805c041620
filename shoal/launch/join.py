"""Join this process to the world of ranks that shoal, torchrun or SLURM started."""

from __future__ import annotations

import faulthandler
import os
import sys
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import COLLECTIVE_SECONDS, die_with_parent, init_world, usable_cores
from shoal.launch.rank_env import Membership, record_end, scratch_folder, stack_path, started_as
from shoal.launch.rendezvous import meeting_store
from shoal.launch.watch.watchdog import STACK_SIGNAL


def become_rank(
    device: str = "auto",
    threads: int = 0,
    timeout: float = COLLECTIVE_SECONDS,
    records: Path | None = None,
    membership: Membership | None = None,
) -> Membership:
    """Make this process one rank of the world: call it first, and once.

    An exception that nothing catches is from now on recorded for the parent and ends the process at once, without
    waiting for background threads: so leave the process group only on success, that peers fail after the cause.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: torch's CPU threads; 0 takes ``OMP_NUM_THREADS``, or else shares the cores between the local ranks.
        timeout: of every collective, in seconds.
        records: the folder where it writes its stack when it is asked for it.
        membership: which rank; None for what `started_as` says.

    Raises:
        UsageError: not started as a rank, or no such device.
    """
    membership = membership or started_as()
    place = scratch_folder() if membership.how == "local" else records
    sys.excepthook = partial(_record_and_exit, place, membership.rank)
    faulthandler.enable()
    if records is not None:
        stack = open(stack_path(records, membership.rank), "a")  # noqa: SIM115 -- for good
        faulthandler.register(STACK_SIGNAL, stack, all_threads=True)
    if membership.how != "slurm":  # which ends the tasks of a step itself
        die_with_parent(int(os.environ.get("SHOAL_PARENT", os.getppid())))
    named = os.environ.get("OMP_NUM_THREADS", "")
    if threads or not named:
        torch.set_num_threads(threads or share_of_cores(membership.local_world_size))
    elif membership.how == "local" and named.isdigit() and int(named):
        # A fork read the variable as it was for its nursery.
        torch.set_num_threads(int(named))
    picked = membership.device(device)
    if picked.type == "cpu":
        tune_process()
    store: dist.Store | None = None
    if membership.how == "local":
        store = dist.FileStore(str(scratch_folder() / "store"), membership.world_size)
    elif membership.how == "slurm":
        store = meeting_store(membership, timeout)
    init_world(membership.rank, membership.world_size, store, picked, timeout)
    return membership


def _record_and_exit(
    folder: Path | None, rank: int, kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """The rank's last act, as ``sys.excepthook``: tell the parent, which shows the earliest record alone."""
    usage, report = record_end(folder, rank, error)
    # init_process_group wraps this hook in one that holds sys.stderr back until it returns, which it never does.
    print(report, file=sys.__stderr__, flush=True)
    sys.stdout.flush()
    os._exit(2 if usage else 1)


def share_of_cores(local_ranks: int) -> int:
    """CPU threads of each rank of this machine."""
    return max(1, usable_cores() // local_ranks)
