"""One rank of a training run, from joining the world to leaving it: ``python -m shoal.launch.worker``."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from shoal.base.errors import UsageError
from shoal.base.terminal import outlive_readers, replace_unencodable
from shoal.engine.collectives.group import ThrottledLink
from shoal.engine.collectives.json_collectives import all_gather, broadcast, world
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Dataset
from shoal.engine.data.token_stream import SPLITS
from shoal.engine.device import (
    allow_reproducible_products,
    destroy_world,
    read_collective_trace,
    write_collective_traces,
)
from shoal.launch.rank_env import RankEnv, detect_rank_env, read_payload, record_end, scratch_folder
from shoal.launch.recovery.generations import Abandoned, Orders, forget, get_ready, is_peer_loss
from shoal.launch.rendezvous import become_rank, open_port_notice
from shoal.launch.watch.peer_watch import LastState, PeerWatch, find_cause, make_shared_folder, read_previous_attempt
from shoal.launch.watch.recordings import keep_recordings
from shoal.spec.config import RunConfig, build_config
from shoal.training.async_dp.trainers import trainer_class
from shoal.training.check import check
from shoal.training.resilience.events import describe_recordings, write_event
from shoal.training.resilience.heartbeat import Heartbeat, Phase, record_path
from shoal.training.resilience.host_memory_dir import release, run_dir
from shoal.training.run_folder import describe_changes, describe_rate, list_changes, new_run
from shoal.training.samples import open_samples, open_validation
from shoal.training.stop import PREEMPTED, REQUESTED, StopRequests
from shoal.training.trainer import Trainer

PARTING_SECONDS = 3.0


class Generation:
    """One start of this rank, from joining the world to leaving it.

    Args:
        folder: of the run; None for a new name. A rank that the supervisor has started finds it made.
        resume: whether to continue the run.
        restarted: whether this follows a failure, in which case the run starts at step 0 if nothing was saved.
        stop: see `Trainer`.
    """

    def __init__(
        self, config: RunConfig, folder: Path | None, member: RankEnv, stop: StopRequests, *, resume: bool,
        restarted: bool,
    ):
        self.config, self.folder, self.member, self.stop = config, folder, member, stop
        self.resume, self.restarted = resume, restarted
        self.before: list[LastState] = []
        if member.how != "local" and member.local_rank == 0:
            self.before = read_previous_attempt(member)
        self.records = scratch_folder() if member.how == "local" else make_shared_folder(member)
        self.beat = Heartbeat(self.records and record_path(self.records, member.rank), read_collective_trace)
        self.trainer: Trainer | None = None

    def run(self, built: Callable[[Trainer], None] | None = None) -> int:
        """Train; return the exit code.

        Args:
            built: callback that receives the trainer before its first step.

        Raises:
            Abandoned: the ranks are to meet again in another layout.
        """
        config, folder, member = self.config, self.folder, self.member
        if config.failover.reexecute_every:
            allow_reproducible_products()
        become_rank(member, config.train.device, config.train.threads, records=self.records)
        self.beat.phase(Phase.START)  # its second mark: it has joined
        device, link = member.device(config.train.device), ThrottledLink.from_gbs(config.testing.link_gbs)
        mesh = Mesh(config.parallel, member.rank, device, config.train.transport, link)
        if member.how != "local" and not self.resume:
            made = str(new_run(config, folder)) if member.rank == 0 else ""
            folder = Path(broadcast(made, world()))
            if member.local_rank == 0:
                release(run_dir(folder, config.failover))  # as in `shoal.launch.train`
        assert folder is not None, "a run that exists has a folder"
        if device.type == "cuda":
            write_collective_traces(folder / "logs")
        neighbours = None
        if self.records is not None and member.how != "local":  # from here on: loading may hang too
            neighbours = PeerWatch(member, self.records, config.failover, folder)
        samples: dict[str, Dataset] = {split: open_samples(config, split) for split in SPLITS}
        validation = open_validation(config)
        _agree_on_data({**samples, **validation})
        # Locally, the supervisor reports failures.
        follows = self.restarted and member.how != "local"
        lost = self._find_previous(folder) if follows else None
        self.trainer = trainer = trainer_class(config)(
            config,
            check(config),
            mesh,
            samples,
            folder,
            resume=self.resume,
            restarted=self.restarted,
            beat=self.beat,
            local_ranks=member.local_world_size,
            stop=self.stop,
            validation=validation,
        )
        if follows:
            self._report_previous(folder, lost)
        elif self.resume and not self.restarted and member.rank == 0:
            changed = list_changes(folder, config)
            for line in (*describe_changes(folder, changed), *describe_rate(folder, config, trainer.step)):
                trainer.display.note(line)
            write_event(
                folder, "resumed", step=trainer.step, ranks=member.world_size, how=member.how,
                layout=config.parallel.describe(), changed=changed,
            )
        if open_port := open_port_notice(member):
            trainer.display.note(open_port)
        if built is not None:
            built(trainer)
        if trainer.run():
            raise Abandoned
        trainer.barrier()
        self.beat.phase(Phase.DONE)
        if neighbours is not None:
            neighbours.leave()
        destroy_world()
        trainer.finalize()  # no rank waits for this one any more
        if trainer.step == config.train.steps or (member.how == "slurm" and member.rank):
            return 0
        if member.how == "slurm":  # SLURM ends a step at its first failing task: only rank 0 fails, after the others
            time.sleep(PARTING_SECONDS)
        return PREEMPTED

    def _find_previous(self, folder: Path) -> dict[str, Any] | None:
        """Return on rank 0 what ended the attempt before, with the recordings of its ranks. Collective."""
        every = all_gather([asdict(last) for last in self.before], world())
        lost = find_cause([LastState(**last) for last in chain.from_iterable(every)]) if self.member.rank == 0 else None
        if lost and (kept := keep_recordings(folder)):
            lost["recordings"] = [*kept]
        return lost

    def _report_previous(self, folder: Path, lost: dict[str, Any] | None) -> None:
        assert self.trainer is not None
        if self.member.rank == 0:
            if lost:
                write_event(folder, "failure", **lost)
                self.trainer.display.note(f"in the attempt before, rank {lost['rank']} {lost['how']}")
                if kept := lost.get("recordings"):
                    self.trainer.display.note(describe_recordings(folder, kept, lost["rank"]))
            write_event(
                folder, "resumed", step=self.trainer.step, ranks=self.member.world_size, how=self.member.how,
                layout=self.config.parallel.describe(),
            )

    def abandon(self, error: BaseException) -> None:
        """Leave the world for another generation; ``error`` is `Abandoned`, or the consequence of a rank's loss."""
        if self.records is not None and not isinstance(error, Abandoned):
            record_end(self.records, self.member.rank, error)
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            trainer.abandon()
        del trainer
        forget(error)
        gc.collect()  # of the model and its groups, to which nothing else refers
        destroy_world()
        self.beat.phase(Phase.LEFT)


def run(
    config: RunConfig, folder: Path | None, member: RankEnv, stop: StopRequests, *, resume: bool, restarted: bool
) -> int:
    """Train as a rank of torchrun or SLURM; return the exit code. See `Generation`."""
    replace_unencodable()
    outlive_readers()
    return Generation(config, folder, member, stop, resume=resume, restarted=restarted).run()


def run_generations(built: Callable[[Trainer], None] | None = None) -> int:
    """Train as a rank that the supervisor has started, until the run ends; return the exit code. See `Generation`."""
    replace_unencodable()
    outlive_readers()
    orders = Orders()
    if "RANK" not in os.environ:  # a spare
        get_ready()
        orders.next()
    while True:
        generation: Generation | None = None
        try:
            with orders.generation():
                member = detect_rank_env()
                assert member is not None
                payload = read_payload()
                generation = Generation(
                    build_config(payload["config"]), Path(payload["folder"]), member,
                    StopRequests(scratch_folder() / REQUESTED), resume=payload["resume"],
                    restarted=payload["restarted"],
                )
                return generation.run(built)
        except (Exception, Abandoned) as error:
            if generation is None or not is_peer_loss(error):
                raise
            generation.abandon(error)
        orders.next()
        generation.beat.close()


def _agree_on_data(samples: Mapping[str, Dataset]) -> None:
    """Check that all ranks read the same text: machines may have different files under one name.

    Raises:
        UsageError: the message names the ranks that differ from rank 0.
    """
    mine = [each.fingerprint for each in samples.values()]
    every = all_gather(mine, world())
    others = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
    if others:
        raise UsageError(
            f"data: ranks {', '.join(map(str, others[:8]))} read another corpus than rank 0 "
            f"({every[others[0]][0]}, not {every[0][0]})."
            "\n  Give all machines the same files (for stdlib, the same Python; for samples of a script, one seed)."
        )


if __name__ == "__main__":
    sys.exit(run_generations())
