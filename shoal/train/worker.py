"""One rank of a training run, from joining the world to leaving it: ``python -m shoal.train.worker``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.comm.link import Link
from shoal.comm.mesh import Mesh
from shoal.comm.world import destroy_world
from shoal.config import build
from shoal.data.batches import Dataset, open_dataset
from shoal.errors import UsageError
from shoal.failover.beat import Beat, Phase
from shoal.train.check import check
from shoal.train.launch import PREEMPTED
from shoal.train.membership import become_rank, read_payload
from shoal.train.relaxed.choose import trainer_of
from shoal.train.run_folder import new_run


def run(payload: dict[str, Any]) -> int:
    """Train as one rank; returns the exit code.

    Args:
        payload: "config", as plain values; "folder" of the run, or None for a new name; "resume", whether to continue
            it; "made", whether the folder is there already; "restarted", whether it is continued after a failure, and
            begins anew where nothing was saved yet.
    """
    beat = Beat.of_this_rank()
    config = build(payload["config"])
    member = become_rank(config.train.device, config.train.threads)
    device, link = member.device(config.train.device), Link(1e9 * gbs) if (gbs := config.train.link_gbs) else None
    mesh = Mesh(config.parallel, member.rank, device, config.train.transport, link)
    folder = payload["folder"]
    if not payload.get("made") and not payload["resume"]:
        made = [str(new_run(config, Path(folder) if folder else None)) if member.rank == 0 else ""]
        dist.broadcast_object_list(made)
        folder = made[0]
    seed = config.train.seed
    samples = {split: open_dataset(config.data, seed=seed, split=split) for split in ("train", "validation")}
    _agree_on_data(samples)
    trainer = trainer_of(config)(
        config,
        check(config),
        mesh,
        samples,
        Path(folder),
        resume=payload["resume"],
        restarted=payload.get("restarted", False),
        beat=beat,
        local_ranks=member.local_world_size,
    )
    trainer.run()
    trainer.leave()
    beat.phase(Phase.DONE)
    destroy_world()
    trainer.conclude()  # when no rank waits for this one any more
    return 0 if trainer.step == config.train.steps else PREEMPTED


def _agree_on_data(samples: dict[str, Dataset]) -> None:
    """Every rank must read the same text: machines may hold different files under one name.

    Raises:
        UsageError: naming the ranks that differ from rank 0.
    """
    mine = [samples["train"].fingerprint, samples["validation"].fingerprint]
    every: list[list[str]] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    others = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
    if others:
        raise UsageError(
            f"data: ranks {', '.join(map(str, others[:8]))} read another corpus than rank 0 "
            f"({every[others[0]][0]}, not {every[0][0]})."
            "\n  Give all machines the same files (and, for stdlib, the same Python)."
        )


if __name__ == "__main__":
    sys.exit(run(read_payload()))
