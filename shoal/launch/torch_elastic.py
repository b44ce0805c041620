"""Resuming under torch elastic and SLURM, which restart ranks themselves: find the run and fit it to the ranks.

torchrun restarts all workers when one fails (``--max-restarts``) and when nodes join or leave (``--nnodes 2:4``); SLURM
restarts the full job (``scontrol requeue``). The same command runs each time, so a rank must detect that its run
already exists: the given run folder contains it.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.device import COLLECTIVE_SECONDS
from shoal.launch.checks.memory import check_memory
from shoal.launch.rank_env import RankEnv
from shoal.launch.recovery.elastic_layout import replan
from shoal.launch.watch.peer_watch import read_previous_attempt
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUN_FILE, RunConfig
from shoal.training.check import check

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
IDLE_TIMEOUT = timedelta(days=365)
STORE_TIMEOUT = timedelta(seconds=COLLECTIVE_SECONDS)  # time for the active ranks to create their store


def restarts() -> bool:
    """Return whether torch elastic restarts this worker after a failure."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def check_elastic(run_folder: Path | None) -> None:
    """Reject settings with which torch elastic could not restart: no run folder, or one store for all rounds."""
    if not restarts():
        return
    if run_folder is None:
        raise UsageError(
            "torchrun --max-restarts needs --run-folder, by which a restarted worker finds its run."
            "\n  Name a folder, new or of the run to resume."
        )
    if os.environ.get(OWN_STORE) != "1":
        raise UsageError(
            f"torchrun --max-restarts needs {OWN_STORE}=1 in its environment: else all rounds share one store, and a "
            "restarted worker tries to connect to dead workers."
            f"\n  Start it as: {OWN_STORE}=1 torchrun ..."
        )


def refuse_shrink(config: RunConfig) -> None:
    """Reject `failover.shrink` on ranks that shoal has not started.

    Raises:
        UsageError: it is set.
    """
    if config.failover.shrink != "never":
        raise UsageError(
            f"failover.shrink = '{config.failover.shrink}' on ranks of torchrun or SLURM, which end all ranks when one "
            "is lost.\n  Leave it out; a restart on fewer nodes takes fewer replicas (failover.replan)."
        )


def refuse_again(member: RankEnv) -> None:
    """Raise the `UsageError` of the previous attempt, if any: torch elastic restarts after any exit code."""
    if restarts() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        for last in read_previous_attempt(member):
            if last.usage:
                raise UsageError(last.report)


def will_be_restarted(auto_resume: bool) -> bool:
    """Return whether this process's launcher restarts it, or has done so; ``auto_resume`` asserts it."""
    return auto_resume or restarts() or int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def should_resume(run_folder: Path | None, auto_resume: bool) -> bool:
    """Return whether to resume the run in ``run_folder`` without --resume."""
    return will_be_restarted(auto_resume) and run_folder is not None and (run_folder / RUN_FILE).is_file()


def adapt_to_ranks(config: RunConfig, shape: ModelShape, member: RankEnv, auto_resume: bool = False) -> RunConfig:
    """Fit the run to the ranks that torch elastic or SLURM has started: with fewer ranks, on the nearest layout.

    Ranks without a place in that layout must call `idle`. If the run is not restarted automatically, its layout must
    fit as it is. Each rank decides by itself, and all must decide the same, so all machines are assumed to have as much
    memory and as many ranks as this one.

    Raises:
        UsageError: no layout fits.
    """
    fewer = member.world_size < config.parallel.world_size
    if not (fewer and will_be_restarted(auto_resume) and config.failover.replan):
        return config

    def fits(changed: RunConfig) -> None:
        check(changed)
        for first in range(0, changed.parallel.world_size, member.local_world_size):
            last = min(first + member.local_world_size, changed.parallel.world_size)
            check_memory(changed, shape, device, range(first, last))

    device = member.device(config.train.device)
    now = replan(config, shape, member.world_size, fits=fits)
    if member.rank == 0:
        asked = config.parallel.world_size
        print(f"{member.world_size} of {asked} ranks available: now on {now.parallel.describe()}", file=sys.stderr)
    return now


def idle(member: RankEnv) -> int:
    """Wait on a rank without work until the active ranks and their store are gone; return the exit code.

    The agent would end the round if this worker exited.
    """
    try:
        host, port = member.master
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        store.wait(["never written"], IDLE_TIMEOUT)
    except RuntimeError:  # the store is gone
        pass
    return 0
