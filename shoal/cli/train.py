"""`shoal train`: check everything, then start the ranks here, or join those that torchrun or SLURM started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.base.terminal import outlive_readers
from shoal.engine.data.corpus import check_read
from shoal.engine.data.prepare import prepare
from shoal.engine.device import pick_device
from shoal.launch.checks.memory_check import check_memory
from shoal.launch.checks.path_check import check_folders
from shoal.launch.rank_env import Membership, joined, record_end
from shoal.launch.supervisor import Supervisor
from shoal.launch.torch_elastic import check_elastic, goes_on, idle, on_ranks_there, refuse_again
from shoal.launch.watch.peer_watch import shared_folder
from shoal.spec.config import RunConfig
from shoal.training.async_dp.choose import goes_on_without
from shoal.training.check import check
from shoal.training.records.metrics import check_trackers
from shoal.training.resilience.host_memory_dir import free, home
from shoal.training.run_folder import check_resume, new_run
from shoal.training.stop import StopRequests


def train(
    config: RunConfig, *, ranks: int | None, run_folder: Path | None, resume: Path | None, keep_going: bool = False
) -> int:
    """Run a training to its end. What it writes is for this user alone, by the mask that its processes inherit.

    Args:
        ranks: processes there must be; None takes the layout's.
        run_folder: of a new run, which must not exist; None makes a name.
        resume: the folder of a run to continue; its newest good checkpoint is taken.
        keep_going: begin the run of ``run_folder``, or continue it if it has begun.

    Returns:
        The exit code.

    Raises:
        UsageError: whatever cannot be, before any process starts.
    """
    former = os.umask(0o077)
    outlive_readers()
    try:
        return _train(config, ranks, run_folder, resume, keep_going)
    finally:
        os.umask(former)


def _train(
    config: RunConfig, ranks: int | None, run_folder: Path | None, resume: Path | None, keep_going: bool
) -> int:
    member, stop = joined(), StopRequests()
    if member is not None:
        stop.listen(signal.SIGUSR1)  # the warning before the end, which comes once
    if resume is not None and run_folder is not None and resume != run_folder:
        raise UsageError(
            f"--run-folder {run_folder} and --resume {resume} name two folders: a resumed run stays in its own."
        )
    if keep_going and run_folder is None:
        raise UsageError("--keep-going needs --run-folder, by which the run is found when the job is started again.")
    if member is not None:
        check_elastic(resume or run_folder)
        refuse_again(member)
        config = on_ranks_there(config, check(config), member, keep_going)
        if member.rank >= config.parallel.world_size:
            return idle(member)
        member = member.among(config.parallel.world_size)
    again = resume is None and goes_on(run_folder, keep_going)
    if again:
        resume = run_folder
    if resume is None:
        check_read(config.data)
    shape = check(config, ranks=member.world_size if member else ranks)
    check_trackers(config.metrics)
    choice = config.train.device
    device = member.device(choice) if member else pick_device(choice, config.parallel.world_size - 1)
    here = _ranks_here(config, member)
    check_memory(config, shape, device, here)
    if resume is not None:
        check_resume(config, shape, resume, again=again)
    if member is None or member.local_rank == 0:
        check_folders(config, shape, resume or run_folder, resume=resume is not None, ranks=here)
    payload = {
        "config": plain(config),
        "folder": str(resume or run_folder) if resume or run_folder else None,
        "resume": resume is not None,
        "restarted": again,
    }
    if member:
        from shoal.launch.worker import run

        try:
            return run(payload, member=member, stop=stop)
        except (UsageError, OSError) as error:  # which the command line tells
            record_end(shared_folder(member), member.rank, error)
            raise
    prepare(config.data)
    if resume is None:
        made = new_run(config, run_folder)
        free(home(made, config.failover))  # what a run that had this name before, and is deleted, kept in memory
        payload["folder"] = str(made)
    payload["made"] = True
    folder = Path(payload["folder"])
    return Supervisor(config, payload, folder, device.type, survivable=goes_on_without(config)).run()


def _ranks_here(config: RunConfig, member: Membership | None) -> range:
    if member is None:
        return range(config.parallel.world_size)
    return member.neighbours()
