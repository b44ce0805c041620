"""Start training: check everything, then start the ranks or join the ranks of torchrun or SLURM."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import PositiveInt

from shoal.base.errors import UsageError
from shoal.base.terminal import outlive_readers
from shoal.engine.data.corpus import check_read
from shoal.engine.device import pick_device
from shoal.launch.checks.folders import check_folders
from shoal.launch.checks.memory import check_memory
from shoal.launch.local_launcher import start_rank_server
from shoal.launch.rank_env import RankEnv, detect_rank_env, record_end
from shoal.launch.supervisor import Supervisor
from shoal.launch.torch_elastic import adapt_to_ranks, check_elastic, idle, refuse_again, refuse_shrink, should_resume
from shoal.launch.watch.peer_watch import make_shared_folder
from shoal.spec.config import RunConfig
from shoal.training.async_dp.engines import survives_rank_loss
from shoal.training.check import check, check_weights
from shoal.training.records.metrics import check_trackers
from shoal.training.resilience.host_memory_dir import release, run_dir
from shoal.training.run_folder import check_resume, new_run, with_own_tokenizer
from shoal.training.samples import prepare_samples, try_samples
from shoal.training.stop import StopRequests


def train(
    config: RunConfig,
    *,
    ranks: PositiveInt | None = None,
    run_folder: str | Path | None = None,
    resume: str | Path | None = None,
    auto_resume: bool = False,
    started: Callable[[Path], object] = lambda folder: None,
) -> int:
    """Train a model, on local processes started here or as a rank of torchrun or SLURM.

    Progress is shown on the terminal; metrics and checkpoints are written to the run folder. Only this user can read
    them, as the processes inherit a restrictive umask.

    Args:
        ranks: expected number of processes (default: the layout's).
        run_folder: folder of a new run, which must not exist (default: a new one under ``runs/``).
        resume: folder of a run to continue from its newest good checkpoint, on any layout.
        auto_resume: start the run of ``run_folder``, or resume it if it already exists.
        started: called with the run folder before the ranks start; not on the ranks of torchrun or SLURM.

    Returns:
        The exit code: 0 after the last step or a requested stop, 75 if the run was preempted and should be restarted, 1
        after a failure.

    Raises:
        UsageError: the run is impossible; raised before any process starts.

    >>> import shoal
    >>> config = shoal.RunConfig(
    ...     model={"name": "tiny", "layers": 1, "hidden": 32, "heads": 2},
    ...     parallel={"dp": 2, "micro_batch": 2},
    ...     data={"source": "synthetic", "sequence_length": 32},
    ...     train={"steps": 2, "global_batch": 4, "device": "cpu"},
    ... )
    >>> shoal.train(config, run_folder="runs/example")
    0
    """
    mask = os.umask(0o077)
    outlive_readers()
    try:
        named, resumed = (None if folder is None else Path(folder) for folder in (run_folder, resume))
        with _planned(config) as planned:
            return _train(planned, ranks, named, resumed, auto_resume, started)
    finally:
        os.umask(mask)


@contextmanager
def _planned(config: RunConfig) -> Iterator[RunConfig]:
    """Yield a config whose definition has a plan for its layout: see `shoal.planning.auto.own_loss.with_plan`."""
    if not config.model.module or config.parallel.tp == 1:
        yield config
        return
    from shoal.planning.auto.own_loss import with_plan  # 0.15 s that all other runs need not pay

    with tempfile.TemporaryDirectory(prefix="shoal-plan-") as made:
        yield with_plan(config, Path(made))


def _train(
    config: RunConfig, ranks: int | None, run_folder: Path | None, resume: Path | None, auto_resume: bool,
    started: Callable[[Path], object],
) -> int:
    member, stop = detect_rank_env(), StopRequests()
    if member is not None:
        stop.listen(signal.SIGUSR1)  # the warning of an imminent end is sent only once
    if resume is not None and run_folder is not None and resume != run_folder:
        raise UsageError(
            f"--run-folder {run_folder} and --resume {resume} name two folders: a resumed run stays in its own."
        )
    if resume is not None:
        config = with_own_tokenizer(config, resume)
    if auto_resume and run_folder is None:
        raise UsageError("--auto-resume needs --run-folder, by which the run is found when the job is started again.")
    if member is not None:
        refuse_shrink(config)
        check_elastic(resume or run_folder)
        refuse_again(member)
        config = adapt_to_ranks(config, check(config), member, auto_resume)
        if member.rank >= config.parallel.world_size:
            return idle(member)
        member = member.among(config.parallel.world_size)
    restarted = resume is None and should_resume(run_folder, auto_resume)
    folder = resume or run_folder
    resumed = folder if resume or restarted else None
    device = _check_run(config, member, ranks, run_folder, resumed, restarted)
    if member is not None:
        from shoal.launch.worker import run

        try:
            return run(config, folder, member, stop, resume=resumed is not None, restarted=restarted)
        except (UsageError, OSError) as error:  # the command line prints it
            record_end(make_shared_folder(member), member.rank, error)
            raise
    with start_rank_server(config, device) as server:  # before data is prepared by several threads
        prepare_samples(config)
        if resumed is None:
            folder = new_run(config, run_folder)
            release(run_dir(folder, config.failover))  # states that a deleted run of the same name left in memory
        assert folder is not None
        started(folder)
        return Supervisor(
            config, folder, device, survivable=survives_rank_loss(config), resume=resumed is not None,
            restarted=restarted, server=server,
        ).run()


def _check_run(
    config: RunConfig, member: RankEnv | None, ranks: int | None, run_folder: Path | None, resumed: Path | None,
    restarted: bool,
) -> str:
    """Reject an impossible run before anything is created; return the device type of this process."""
    if resumed is None:
        check_read(config.data)
        check_weights(config)
    shape = check(config, ranks=member.world_size if member else ranks)
    check_trackers(config.metrics)
    if member is None:
        try_samples(config)
    choice, last = config.train.device, config.parallel.world_size - 1
    device = member.device(choice) if member else pick_device(choice, last)
    local_ranks = member.neighbours() if member else range(config.parallel.world_size)
    if not config.model.module:  # what its activations take is not known
        check_memory(config, shape, device, local_ranks)
    if resumed is not None:
        check_resume(config, shape, resumed, again=restarted)
    if member is None or member.local_rank == 0:
        check_folders(config, shape, resumed or run_folder, resume=resumed is not None, ranks=local_ranks)
    return device.type
