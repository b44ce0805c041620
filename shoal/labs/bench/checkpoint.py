"""What saving costs a training: the same steps without it, onto the disk, into memory, and into another node's memory.

The contenders take turns of as many steps as there are between two saves, so that each turn has one save. What a save
holds up is what `Checkpointer.save` and `InMemoryCheckpointer.save` say; what it costs besides, in cores and memory
that its background work takes from the steps, is in the time of the whole turn.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist
from rich.table import Table

from shoal.engine.checkpoint import Checkpointer
from shoal.engine.cpu_tuning import tune_process
from shoal.labs.bench.crew import TIMEOUT, Contender, ContenderProcesses
from shoal.labs.bench.race import Lap, check_agreement, quartiles
from shoal.labs.bench.step.shoal_engine import build
from shoal.labs.bench.step.workload import Workload
from shoal.launch.worker_pool import Pool
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


@dataclass(frozen=True)
class Cost:
    """What one way of saving costs.

    Attributes:
        name: a key of `KINDS`.
        seconds: of a step, the mean of a turn, median over turns.
        stall: seconds that a save holds up the slowest rank, median over saves without the first; None without saves.
        first: of the first save, which allocates its memory.
        ratio: of a turn's time to that of the turn without saves beside it, median and quartiles.
    """

    name: str
    seconds: float
    stall: float | None
    first: float | None
    ratio: tuple[float, float, float]


@dataclass(frozen=True)
class SavingCosts:
    """What all ways of saving cost.

    Attributes:
        costs: of each way, the first of which saves nothing.
        restoring: seconds to go on from the memory of the next node, of each measurement.
    """

    costs: list[Cost]
    restoring: list[float]

    def share(self, cost: Cost) -> float | None:
        """What a save holds up, as part of a step that saves nothing."""
        return None if cost.stall is None else cost.stall / self.costs[0].seconds

    @property
    def met(self) -> bool:
        """Whether no way of saving holds up more than the target."""
        return all((part := self.share(cost)) is None or part <= TARGET for cost in self.costs[1:])


def measure_model(
    model: str, *, sequences: int, ranks: int, every: int, turns: int, disk: Path, memory: Path,
    say: Callable[[str], None],
) -> SavingCosts:
    """Measure what saving and restoring a model costs; arguments as `measure` has them.

    Args:
        model: of the catalog.
        sequences: of 256 tokens in a step, over all ranks.
    """
    workload = Workload(model, sequences=sequences)
    costs = measure(workload, ranks, every, turns, disk, memory, say=say)
    return SavingCosts(costs, seconds_to_restore(workload, ranks, memory, repeats=RESTORES))


def measure(
    workload: Workload, ranks: int, every: int, turns: int, disk: Path, memory: Path, say: Callable[[str], None]
) -> list[Cost]:
    """Let the ways of saving take turns.

    Args:
        every: steps between two saves, and in a turn.
        turns: of each, after one that warms up.
        disk, memory: folders on a disk and in memory, in which folders of its own are made and removed.
        say: told what is going on.

    Raises:
        Disagreement: they computed different losses.
    """
    with ExitStack() as stack:
        folder = {
            kind: Path(stack.enter_context(tempfile.TemporaryDirectory(dir=disk if kind == "disk" else memory)))
            for kind in KINDS.values()
        }
        contenders = [
            Contender(name, partial(saving, kind=kind, folder=folder[kind], every=every), workload, ranks)
            for name, kind in KINDS.items()
        ]
        crews = [stack.enter_context(ContenderProcesses(contender)) for contender in contenders]
        laps = [Lap(contender) for contender in contenders]
        for turn in range(turns + 1):
            say(f"turn {turn} of {turns}")
            for crew, lap in zip(crews, laps, strict=True):
                lap.turns.append(crew.run(every))
        check_agreement(laps, tolerance=0.0)
        times = [[sum(turn.seconds) for turn in lap.turns[1:]] for lap in laps]
        return [
            _cost(name, times[i], times[0], every, _stalls(folder[kind], ranks))
            for i, (name, kind) in enumerate(KINDS.items())
        ]


def _cost(name: str, times: list[float], plain: list[float], every: int, stalls: list[float]) -> Cost:
    ratios = [a / b for a, b in zip(times, plain, strict=True)]
    low, high = quartiles(ratios)
    later = median(stalls[1:]) if len(stalls) > 1 else None
    return Cost(name, median(times) / every, later, stalls[0] if stalls else None, (median(ratios), low, high))


def _stalls(folder: Path, ranks: int) -> list[float]:
    """Of each save, on the rank that was held up longest."""
    files = [folder / f"stalls-{rank}" for rank in range(ranks)]
    told = [[float(word) for word in file.read_text().split()] for file in files if file.exists()]
    return [max(save) for save in zip(*told, strict=True)] if told else []


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


def seconds_to_restore(workload: Workload, ranks: int, memory: Path, repeats: int) -> list[float]:
    """How long all ranks of this host take to go on from the memory of the next node, their own being lost."""
    limit = TIMEOUT * (1 + repeats)  # to build, and to restore each time, takes no longer than a first step
    with tempfile.TemporaryDirectory(dir=memory) as folder, Pool(ranks, tune_process) as pool:
        every = pool.run(_restored, ranks, workload, Path(folder), repeats, timeout=limit)
        return [max(times) for times in zip(*every, strict=True)]


def _restored(workload: Workload, folder: Path, repeats: int) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine = build(workload, rank, ranks, dp=ranks, zero=1, bucket_mb=8)
    group = dist.new_group(backend="gloo") if ranks > 1 else None
    kept = InMemoryCheckpointer(folder / "home", folder, group=group, node_ranks=1)
    kept.save(1, engine.state(), {})
    kept.wait()
    if ranks > 1 and rank == 0:
        shutil.rmtree(folder / "home" / "node-00000")
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        found, _ = restore(folder / "checkpoints", folder / "home", engine.state(), group=group, model=None)
        engine.restored(1)
        seconds.append(time.perf_counter() - begin)
        assert found is not None and found.step == 1
    kept.close()
    return seconds


def table(found: SavingCosts, every: int) -> Table:
    """A row for each way of saving."""
    view = Table(title=f"a training that saves every {every} steps")
    view.add_column("saved")
    for column in ("ms / step", "time", "quartiles", "a save holds up ms", "the first", "of a step", "target"):
        view.add_column(column, justify="right")
    for cost in found.costs:
        middle, low, high = cost.ratio
        view.add_row(
            cost.name, f"{cost.seconds * 1e3:.1f}", f"x {middle:.3f}", f"{low:.3f} to {high:.3f}",
            *_stalled(found, cost),
        )
    return view


def _stalled(found: SavingCosts, cost: Cost) -> Sequence[str]:
    """The cells of what a save holds up."""
    part = found.share(cost)
    if cost.stall is None or cost.first is None or part is None:
        return [""] * 4
    verdict = "[green]met" if part <= TARGET else "[red]missed"
    return f"{cost.stall * 1e3:.2f}", f"{cost.first * 1e3:.1f}", f"{part:.1%}", f"{TARGET:.0%} {verdict}"
