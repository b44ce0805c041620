"""What saving costs a training: the same steps without it, onto the disk, into memory, and into another node's memory.

The contenders take turns of as many steps as there are between two saves, so that each turn has one save. What a save
holds up is what `Checkpointer.save` and `InMemoryCheckpointer.save` say; what it costs besides, in cores and memory
that its background work takes from the steps, is in the time of the whole turn.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist
from pydantic import Field, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.engine.checkpoint import Checkpointer
from shoal.engine.cpu_tuning import tune_process
from shoal.labs.bench.benchmark import Benchmark, Row, Say, all_met, check_folder, make_table
from shoal.labs.bench.contender import TIMEOUT, Contender
from shoal.labs.bench.race import check_agreement, quartiles, slowest_rank, take_turns, time_in_turns
from shoal.labs.bench.step.shoal_engine import build
from shoal.labs.bench.step.workload import Workload
from shoal.launch.worker_pool import Pool
from shoal.spec.catalog import model_shape
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.memory_checkpoint import InMemoryCheckpointer
from shoal.training.resilience.restore import restore
from shoal.training.step.engine import Engine

KINDS = {
    "nothing saved": "none",
    "on disk": "disk",
    "in memory": "memory",
    "in memory, and on the next node": "nodes",
}
RESTORES = 5  # measurements of how long it takes to go on from memory
TARGET = 0.05
"""The most that a save may hold up training, as part of a step."""


def describe_cost(
    name: str, times: Sequence[float], plain: Sequence[float], stalls: Sequence[float], every: int
) -> Row:
    """What one way of saving costs.

    Args:
        times, plain: seconds of its turns, and of the turns without saves beside them.
        stalls: seconds that each save holds up the slowest rank; the first one also allocates its memory, and does not
            count.
        every: steps in a turn.
    """
    ratios = [a / b for a, b in zip(times, plain, strict=True)]
    stall = median(stalls[1:]) if len(stalls) > 1 else None
    share = None if stall is None else stall / (median(plain) / every)
    return {
        "saved": name, "ms / step": 1e3 * median(times) / every, "time": f"x {median(ratios):.3f}",
        "quartiles": "{:.3f} to {:.3f}".format(*quartiles(ratios)),
        "a save holds up ms": None if stall is None else 1e3 * stall,
        "the first": 1e3 * stalls[0] if stalls else None,
        "of a step": None if share is None else f"{share:.1%}",
        "target": None if share is None else f"{TARGET:.0%}",
        "met": None if share is None else share <= TARGET,
    }


class CheckpointBenchmark(Benchmark):
    """Training steps that save nothing, on disk, in memory, and in another node's memory, in turn; exit code 1 if a
    save holds up more than 5 % of a step."""

    turns: PositiveInt = 8
    """Turns of each; what is compared are medians over all."""

    every: int = Field(10, ge=2)
    """Steps between two saves, and in a turn."""

    sequences: PositiveInt = 8
    """Sequences of 256 tokens in a step, over all ranks: a multiple of the ranks."""

    ranks: PositiveInt = 2
    """Ranks of one thread, each of which is a node where states go to another."""

    model: str = "bench-10m"
    """A model of the catalog."""

    disk: Path = Path(tempfile.gettempdir())
    """A folder on the disk to save on."""

    memory: Path = FailoverConfig().memory_folder
    """A folder in memory (tmpfs)."""

    def run(self, console: Console, say: Say) -> bool:
        """Measure what saving and restoring costs."""
        if self.sequences % self.ranks:
            raise UsageError(
                f"bench checkpoint --sequences {self.sequences}: give a multiple of --ranks {self.ranks}."
            )
        check_folder(self.disk, "bench checkpoint --disk")
        check_folder(self.memory, "bench checkpoint --memory")
        model_shape(self.model)  # refuses a model that does not exist
        costs = self.measure(say)
        restoring = self.seconds_to_restore()
        console.print(make_table(f"a training that saves every {self.every} steps", costs))
        console.print(
            f"restored on {self.ranks} ranks in {median(restoring):.3f} s (median of {len(restoring)}), "
            "from the next node's memory where there is one", highlight=False,
        )
        return all_met(costs)

    def measure(self, say: Say) -> list[Row]:
        """Let the ways of saving take turns; in a turn of each there is one save.

        Raises:
            Disagreement: they computed different losses.
        """
        with ExitStack() as stack:
            folders = {
                kind: Path(stack.enter_context(
                    tempfile.TemporaryDirectory(dir=self.disk if kind == "disk" else self.memory)
                )) for kind in KINDS.values()
            }
            contenders = [
                Contender(
                    name, partial(saving, kind=kind, folder=folders[kind], every=self.every),
                    Workload(self.model, sequences=self.sequences), self.ranks,
                ) for name, kind in KINDS.items()
            ]  # fmt: skip
            laps = take_turns(contenders, self.turns, self.every, self.every, say)
            stalls = [_stalls(folder, self.ranks) for folder in folders.values()]
        check_agreement(laps, tolerance=0.0)
        plain, *_ = turns = [[sum(turn.seconds) for turn in lap.turns] for lap in laps]
        return [
            describe_cost(name, times, plain, held_up, self.every)
            for name, times, held_up in zip(KINDS, turns, stalls, strict=True)
        ]

    def seconds_to_restore(self) -> list[float]:
        """Return the seconds in which all ranks of this host resume from the next node's memory, their own lost."""
        limit = TIMEOUT * (1 + RESTORES)  # to build, and to restore each time, takes no longer than a first step
        workload = Workload(self.model, sequences=self.sequences)
        with tempfile.TemporaryDirectory(dir=self.memory) as folder, Pool(self.ranks, tune_process) as pool:
            every = pool.run(_restored, self.ranks, workload, Path(folder), timeout=limit)
        return slowest_rank(every)["restore"]


def _stalls(folder: Path, ranks: int) -> list[float]:
    """Of each save, on the rank that was held up longest."""
    files = [folder / f"stalls-{rank}" for rank in range(ranks)]
    seconds = [[float(word) for word in file.read_text().split()] for file in files if file.exists()]
    return [max(save) for save in zip(*seconds, strict=True)]


def saving(workload: Workload, rank: int, ranks: int, *, kind: str, folder: Path, every: int) -> Callable[[int], float]:
    """A training step on dp with ZeRO-1, with a save after each ``every``-th."""
    engine = build(workload, rank, ranks, dp=ranks, zero=1, bucket_mb=8)
    save = _saver(engine, kind, folder, ranks)

    def step(number: int) -> float:
        loss = engine.step(number).loss
        if save and (number + 1) % every == every // 2:  # in the middle, so that the turn has what follows a save
            with open(folder / f"stalls-{rank}", "a") as file:
                file.write(f"{save(number)}\n")
        return loss if rank == 0 else 0.0

    return step


def _saver(engine: Engine, kind: str, folder: Path, ranks: int) -> Callable[[int], float] | None:
    group = dist.new_group(backend="gloo") if ranks > 1 else None
    if kind == "none":
        return None
    if kind == "disk":
        checkpoints = Checkpointer(folder / "checkpoints", group=group, keep=1, asynchronous=True)
        return lambda number: checkpoints.save(number, engine.state(), {})
    kept = InMemoryCheckpointer(folder / "home", folder, group=group, node_ranks=1 if kind == "nodes" else ranks)
    kept.prepare(engine.state())
    return lambda number: kept.save(number, engine.state(), {})


def _restored(workload: Workload, folder: Path) -> dict[str, list[float]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine = build(workload, rank, ranks, dp=ranks, zero=1, bucket_mb=8)
    group = dist.new_group(backend="gloo") if ranks > 1 else None
    kept = InMemoryCheckpointer(folder / "home", folder, group=group, node_ranks=1)
    kept.save(1, engine.state(), {})
    kept.wait()
    if ranks > 1 and rank == 0:
        shutil.rmtree(folder / "home" / "node-00000")

    def go_on() -> None:
        found, _ = restore(folder / "checkpoints", folder / "home", engine.state(), group=group, model=None)
        engine.restored(1)
        assert found is not None and found.step == 1

    seconds = time_in_turns({"restore": go_on}, RESTORES, warmup=0, prepare=lambda name: dist.barrier())
    kept.close()
    return seconds
