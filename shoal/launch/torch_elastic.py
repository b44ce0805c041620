"""Resuming under torch elastic and SLURM, which start ranks again themselves: which run, and on how many ranks.

torchrun restarts all workers when one fails (``--max-restarts``), and when nodes come or go (``--nnodes 2:4``); SLURM
restarts the whole job (``scontrol requeue``). Each time the same command runs, so a rank finds out for itself that its
run has begun: the folder that it is told to use holds it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.device import COLLECTIVE_SECONDS
from shoal.launch.checks.memory_check import check_memory
from shoal.launch.elastic_layout import replan
from shoal.launch.rank_env import RankEnv
from shoal.launch.watch.postmortem import read_previous_attempt
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUN_FILE, RunConfig
from shoal.training.check import check

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
IDLE_TIMEOUT = timedelta(days=365)
COME_TIMEOUT = timedelta(seconds=COLLECTIVE_SECONDS)  # within which the ranks that work have made their store


def restarts(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torch elastic will start this worker again when one fails."""
    return int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def check_elastic(run_folder: Path | None, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse what torch elastic could not restart.

    Raises:
        UsageError: the run has no name that the next round would know; or the rounds share a store, in which ranks find
            the addresses of those that have died.
    """
    if not restarts(environment):
        return
    if run_folder is None:
        raise UsageError(
            "torchrun --max-restarts needs --run-folder, by which a restarted worker finds its run."
            "\n  Name a folder, new or of the run that is to go on."
        )
    if environment.get(OWN_STORE) != "1":
        raise UsageError(
            f"torchrun --max-restarts needs {OWN_STORE}=1 in its environment: else all rounds meet in one store, and a "
            "restarted worker tries to connect to those that have died."
            f"\n  Start it as: {OWN_STORE}=1 torchrun ..."
        )


def refuse_again(member: RankEnv, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse at once what ended the attempt before as bad input: torch elastic restarts whatever the exit code.

    Raises:
        UsageError: the same.
    """
    if restarts(environment) and int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        for last in read_previous_attempt(member):
            if last.usage:
                raise UsageError(last.report)


def will_be_restarted(keep_going: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether whoever started this process starts it again, or has done so; ``keep_going`` says so."""
    return keep_going or restarts(environment) or int(environment.get("SLURM_RESTART_COUNT", "0")) > 0


def should_resume(run_folder: Path | None, keep_going: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to resume the run in its folder though the command does not say so."""
    return will_be_restarted(keep_going, environment) and run_folder is not None and (run_folder / RUN_FILE).is_file()


def adapt_to_ranks(config: RunConfig, shape: ModelShape, member: RankEnv, keep_going: bool = False) -> RunConfig:
    """The run on as many ranks as torch elastic or SLURM has brought together: if fewer, on the nearest layout.

    Ranks that the nearest layout leaves over are to `idle`. Where nobody starts the run again, the layout must fit.
    Every rank decides for itself, and all must decide alike: so machines are taken to have as much memory and as many
    ranks as this one.

    Raises:
        UsageError: no layout fits.
    """
    fewer = member.world_size < config.parallel.world_size
    if not (fewer and will_be_restarted(keep_going) and config.failover.replan):
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
        print(f"{member.world_size} of {asked} ranks are there: now on {now.parallel.describe()}", file=sys.stderr)
    return now


def idle(member: RankEnv) -> int:
    """A rank for which there is no work in this round: wait for its end, so that the agent has its worker.

    Returns:
        The exit code, once the ranks that work are gone, and with them the store.
    """
    try:
        host, port = member.meeting_point
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=COME_TIMEOUT)
        store.wait(["what nobody writes"], IDLE_TIMEOUT)
    except RuntimeError:  # the store is gone
        return 0
    return 0
