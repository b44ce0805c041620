"""The cost of saving: the same training steps without saves, and with saves to disk, to memory and to another node.

The variants take turns, each with one save. The stall of a save is what the `save` methods return; the cores and memory
that its background work takes from the steps show in the time of the turn.
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
from shoal.engine.device import tune_process
from shoal.labs.bench.benchmark import TIME_LIMIT, Benchmark, Notify, Row, all_met, check_folder, make_table
from shoal.labs.bench.race import Variant, check_agreement, quartiles, slowest_rank, take_turns, time_in_turns
from shoal.labs.bench.step.workload import Workload, build_engine
from shoal.launch.worker_pool import Pool
from shoal.spec.catalog import model_shape
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.memory_checkpoint import InMemoryCheckpointer, RankTopology
from shoal.training.resilience.restore import restore
from shoal.training.step.engine import Engine

KINDS = ("nothing saved", "on disk", "in memory", "in memory, and on the next node")
RESTORES = 5  # measurements of a restore
TARGET = 0.05
"""Maximum stall of a save, as a fraction of a step."""


def describe_cost(
    name: str, times: Sequence[float], plain: Sequence[float], stalls: Sequence[float], every: int
) -> Row:
    """Describe the cost of one way of saving.

    Args:
        times, plain: seconds of its turns, and of the turns without saves.
        stalls: seconds for which each save stalls the slowest rank, at least two or none. The first one also allocates.
        every: steps in a turn.
    """
    ratios = [a / b for a, b in zip(times, plain, strict=True)]
    row: dict[str, object] = {
        "saved": name, "ms / step": 1e3 * median(times) / every, "time": f"x {median(ratios):.3f}",
        "quartiles": "{:.3f} to {:.3f}".format(*quartiles(ratios)),
    }
    if not stalls:
        return row | dict.fromkeys(("stall ms", "first stall ms", "of a step", "target", "met"))
    stall = median(stalls[1:])
    fraction = stall / (median(plain) / every)
    return row | {
        "stall ms": 1e3 * stall, "first stall ms": 1e3 * stalls[0], "of a step": f"{fraction:.1%}",
        "target": f"{TARGET:.0%}", "met": fraction <= TARGET,
    }


class CheckpointBenchmark(Benchmark):
    """Training steps with no saves, and with saves on disk, in memory and in another node's memory, in turns; exit code
    1 if a save stalls training for more than 5 % of a step."""

    turns: PositiveInt = 8
    """Turns of each; medians over all turns are compared."""

    every: int = Field(10, ge=2)
    """Steps between two saves, and in a turn."""

    sequences: PositiveInt = 8
    """Sequences of 256 tokens in a step, over all ranks: a multiple of the ranks."""

    ranks: PositiveInt = 2
    """Ranks of one thread, each of them a node when states are sent to another node."""

    model: str = "bench-10m"
    """Model of the catalog."""

    disk: Path = Path(tempfile.gettempdir())
    """Folder on the disk to save on."""

    memory: Path = FailoverConfig().memory_folder
    """Folder in memory (tmpfs)."""

    def run(self, console: Console, notify: Notify) -> bool:
        if self.sequences % self.ranks:
            raise UsageError(
                f"bench checkpoint --sequences {self.sequences}: use a multiple of --ranks {self.ranks}."
            )
        check_folder(self.disk, "bench checkpoint --disk")
        check_folder(self.memory, "bench checkpoint --memory")
        model_shape(self.model)  # rejects an unknown model
        costs = self.measure(notify)
        restored = {place: median(seconds) for place, seconds in self.time_restores().items()}
        console.print(make_table(f"training with a save every {self.every} steps", costs))
        console.print(
            f"restored on {self.ranks} ranks in {restored['memory']:.3f} s from memory (the next node's if there is "
            f"one), in {restored['disk']:.3f} s from disk (medians of {RESTORES})", highlight=False, soft_wrap=True,
        )
        return all_met(costs)

    def measure(self, notify: Notify) -> list[Row]:
        """Time all ways of saving in turns, with one save in each turn.

        Raises:
            RaceError: they computed different losses.
        """
        with ExitStack() as stack:
            folders = {kind: Path(stack.enter_context(
                tempfile.TemporaryDirectory(dir=self.disk if kind == "on disk" else self.memory)
            )) for kind in KINDS}  # fmt: skip
            variants = [
                Variant(
                    kind, partial(step_with_saves, kind=kind, folder=folders[kind], every=self.every),
                    Workload(self.model, sequences=self.sequences), self.ranks,
                ) for kind in KINDS
            ]  # fmt: skip
            results = take_turns(variants, self.turns, self.every, self.every, notify)
            stalls = [_read_stalls(folder, self.ranks) for folder in folders.values()]
        check_agreement(results, tolerance=0.0)
        plain, *_ = turns = [[sum(turn.seconds) for turn in result.turns] for result in results]
        return [
            describe_cost(name, times, plain, stalled, self.every)
            for name, times, stalled in zip(KINDS, turns, stalls, strict=True)
        ]

    def time_restores(self) -> dict[str, list[float]]:
        """Return the seconds of restoring all ranks from disk, and from memory (if there are several ranks, after the
        first node has lost its own)."""
        workload = Workload(self.model, sequences=self.sequences)
        with (
            tempfile.TemporaryDirectory(dir=self.disk) as disk, tempfile.TemporaryDirectory(dir=self.memory) as memory,
            Pool(self.ranks, tune_process) as pool,
        ):  # fmt: skip
            ranks = pool.run(_time_restores, self.ranks, workload, Path(disk), Path(memory), timeout=TIME_LIMIT)
        return slowest_rank(ranks)


def _read_stalls(folder: Path, ranks: int) -> list[float]:
    """Return the seconds of each save on the rank that it stalled longest."""
    files = [folder / f"stalls-{rank}" for rank in range(ranks)]
    seconds = [[float(word) for word in file.read_text().split()] for file in files if file.exists()]
    return [max(save) for save in zip(*seconds, strict=True)]


def step_with_saves(
    workload: Workload, rank: int, ranks: int, *, kind: str, folder: Path, every: int
) -> Callable[[int], float]:
    """Build a training step on dp with ZeRO-1 that saves once in every ``every`` steps."""
    engine, group = _build(workload)
    saver: Checkpointer | InMemoryCheckpointer | None = None
    if kind == "on disk":
        saver = Checkpointer(folder / "checkpoints", group=group, keep=1, asynchronous=True)
    elif kind != "nothing saved":
        places = RankTopology.collect(group, ranks if kind == "in memory" else 1)
        saver = InMemoryCheckpointer(folder / "home", folder, group=group, places=places, state=engine.state())

    def step(number: int) -> float:
        loss = engine.step(number).loss
        if saver and (number + 1) % every == every // 2:  # in the middle, so that its background work is in the turn
            with open(folder / f"stalls-{rank}", "a") as file:
                file.write(f"{saver.save(number, engine.state(), {})}\n")
        return loss if rank == 0 else 0.0

    return step


def _build(workload: Workload) -> tuple[Engine, dist.ProcessGroup | None]:
    ranks = dist.get_world_size()
    engine = build_engine(workload, dist.get_rank(), ranks, dp=ranks, zero=1, bucket_mb=8)
    return engine, dist.new_group(backend="gloo") if ranks > 1 else None


def _time_restores(workload: Workload, disk: Path, memory: Path) -> dict[str, list[float]]:
    engine, group = _build(workload)
    checkpoints = Checkpointer(disk / "checkpoints", group=group, keep=1, asynchronous=False)
    checkpoints.save(1, engine.state(), {})
    checkpoints.close()
    places = RankTopology.collect(group, 1)
    kept = InMemoryCheckpointer(memory / "home", memory, group=group, places=places)
    kept.save(1, engine.state(), {})
    kept.wait()
    if dist.get_world_size() > 1 and dist.get_rank() == 0:
        shutil.rmtree(memory / "home" / "node-00000")

    def restore_from(disk: Path, home: Path) -> None:
        found, _ = restore(disk, home, engine.state(), group=group, model=None)
        engine.restored(1)
        assert found is not None and found.step == 1

    nowhere = memory / "empty"
    tiers = {"memory": (nowhere, memory / "home"), "disk": (disk / "checkpoints", nowhere)}
    calls = {tier: partial(restore_from, *folders) for tier, folders in tiers.items()}
    seconds = time_in_turns(calls, RESTORES, warmup=0, prepare=lambda place: dist.barrier())
    kept.close()
    return seconds
