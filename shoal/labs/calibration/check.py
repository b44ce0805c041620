"""Steps of a small model on layouts of up to four ranks, measured and estimated."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch.distributed as dist
from scipy.stats import spearmanr

from shoal.base.files import write_whole
from shoal.base.units import show_seconds
from shoal.labs.bench.race import time_in_turns
from shoal.labs.bench.step.workload import Workload, shoal_step
from shoal.labs.calibration.measure import Say, reference
from shoal.launch.worker_pool import Pool
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.space import LayoutSpace, layouts
from shoal.report.charts import draw_scatter, new_figure, to_svg
from shoal.spec.catalog.clusters import cluster, nodes
from shoal.spec.layout import Layout

REFERENCES = 3  # measurements of how fast the machine is, between layouts
STEPS = 2  # of a turn, behind one that does not count
TIMEOUT = 300.0
RANKS = (1, 2, 3, 4)
NEAR = 0.10  # median error, up to which estimates are right
ROUND_TWO, FINAL = 12, 3
"""Layouts that are measured again: one step says too little of those that are nearly as fast, and the fastest of twelve
is so by luck in part, which measurements of its own do not have."""
WORK = Workload("tiny", sequence_length=128, sequences=12)
"""12 sequences, which 1 to 4 replicas share evenly, through a model that a step of takes well under a second."""
ORDERED = 0.9  # Spearman's correlation, from which on an order is right


@dataclass(frozen=True)
class Compared:
    """One layout.

    Attributes:
        measured: seconds of a step, had the machine been as fast as when it was calibrated.
        estimated: seconds of a step.
        slower: how much longer the machine took for the same work than when it was calibrated.
    """

    layout: Layout
    measured: float
    estimated: float
    slower: float = 1.0

    @property
    def error(self) -> float:
        """Of the estimate, relative."""
        return self.estimated / self.measured - 1

    @property
    def words(self) -> str:
        """The layout."""
        again = f", recompute {self.layout.recompute}" if self.layout.recompute != "none" else ""
        kept = "" if self.layout.reshard_after_forward else ", kept after forward"
        return f"{self.layout.describe()}, micro-batch {self.layout.micro_batch}{again}{kept}"


def run_of(layout: Layout, name: str) -> EstimatedRun:
    """The estimate of a layout on as many ranks of a machine as it has."""
    machine = cluster(f"{layout.world_size}x{name}")
    return EstimatedRun(WORK.shape, layout, machine, WORK.sequence_length, WORK.sequences, WORK.precision)


def drawn_layouts(count: int, seed: int = 0) -> list[Layout]:
    """Layouts of `RANKS`, as many of each number of ranks as there are, drawn at random."""
    draw = random.Random(seed)
    found: list[Layout] = []
    every = {n: every_layout(n) for n in RANKS}
    for each in every.values():
        draw.shuffle(each)
    while len(found) < count and any(every.values()):
        found += [each.pop() for each in every.values() if each][: count - len(found)]
    return found


def every_layout(ranks: int) -> list[Layout]:
    """All that so many ranks can have, without context parallelism and uneven stages."""
    schedules = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")
    space = LayoutSpace(schedules, most_virtual=2, uneven=False, fixed={"cp": 1})
    run = run_of(Layout(dp=ranks), "H100")  # only the size of the cluster counts
    return [layout for layout in layouts(run, space) if layout.dp * layout.tp * layout.pp == ranks]


def compare(pool: Pool, chosen: list[Layout], rounds: int, name: str, say: Say, steps: int = STEPS) -> list[Compared]:
    """Measure all layouts in turn, and estimate them.

    Args:
        rounds: turns of each.
        name: of the machine in the catalog.
        steps: of a turn, behind one that does not count.
    """
    seconds: list[list[float]] = [[] for _ in chosen]
    slower: list[list[float]] = [[] for _ in chosen]
    estimates = [Estimate(run_of(layout, name)).step_seconds for layout in chosen]
    for turn in range(rounds):
        for i, layout in enumerate(chosen):
            say((turn + i / len(chosen)) / rounds, f"turn {turn + 1} of {rounds}: {layout.describe()}")
            before = _speed(pool, layout, name)
            ranks = pool.run(_steps, layout.world_size, layout, steps, timeout=TIMEOUT)
            now = (before + _speed(pool, layout, name)) / 2
            slower[i].append(now)
            seconds[i] += [max(each) / now for each in zip(*ranks, strict=True)]
    return [
        Compared(layout, median(times), estimated, median(speeds))
        for layout, times, estimated, speeds in zip(chosen, seconds, estimates, slower, strict=True)
    ]


def _speed(pool: Pool, layout: Layout, name: str) -> float:
    """Seconds of the reference just now on as many cores as a layout keeps busy, of what they were."""
    machine = nodes()[name]
    assert machine.at_once and machine.reference, "a calibrated machine has both"
    ranks = pool.run(reference, min(layout.world_size, machine.at_once), REFERENCES, timeout=TIMEOUT)
    return median(max(each) for each in zip(*ranks, strict=True)) / machine.reference


def _steps(layout: Layout, steps: int) -> list[float]:
    """Seconds of some steps on one rank, after one that does not count."""
    fields = {name: getattr(layout, name) for name in Layout.model_fields if getattr(layout, name) is not None}
    step, numbers = shoal_step(WORK, dist.get_rank(), dist.get_world_size(), **fields), count()
    return time_in_turns({layout: lambda: step(next(numbers))}, steps, prepare=lambda key: dist.barrier())[layout]


def pick(pool: Pool, ranks: int, rounds: int, name: str, say: Say) -> list[Compared]:
    """Measure every layout for a step, then in turn the fastest of them, then by new measurements the fastest of these;
    the one estimated fastest is among them each time.

    Args:
        rounds: turns of each that is measured again, and a third of those of the last.
        name: of the machine in the catalog.

    Returns:
        Those that were measured last, the one that is estimated fastest first.
    """
    found = compare(pool, every_layout(ranks), 1, name, lambda done, what: say(0.8 * done, what), steps=1)
    picked = min(found, key=lambda one: one.estimated).layout
    again = _fastest(found, picked, ROUND_TWO)
    found = compare(pool, again, rounds, name, lambda done, what: say(0.8 + 0.1 * done, what))
    last = _fastest(found, picked, FINAL)
    return compare(pool, last, 3 * rounds, name, lambda done, what: say(0.9 + 0.1 * done, what))


def _fastest(found: list[Compared], picked: Layout, most: int) -> list[Layout]:
    """The picked layout, and the fastest others."""
    others = [one.layout for one in sorted(found, key=lambda one: one.measured) if one.layout != picked]
    return [picked, *others[:most]]


def spearman(found: list[Compared]) -> float:
    """Correlation of the ranks in both orders; 1 of a single layout."""
    if len(found) < 2:
        return 1.0
    return spearmanr([one.measured for one in found], [one.estimated for one in found]).statistic


def lost(found: list[Compared]) -> float:
    """By what part the layout that is estimated fastest takes longer than the fastest."""
    picked = min(found, key=lambda one: one.estimated)
    return picked.measured / min(one.measured for one in found) - 1


def is_right(found: list[Compared]) -> bool:
    """Whether estimates are near what was measured (`NEAR`), and in its order (`ORDERED`)."""
    return _median_error(found) <= NEAR and spearman(found) >= ORDERED


def _median_error(found: list[Compared]) -> float:
    return median(abs(one.error) for one in found)


def lines(found: list[Compared]) -> list[str]:
    """The table of a check."""
    rows = [
        f"{one.slower:>7.2f}{show_seconds(one.measured):>10}{show_seconds(one.estimated):>11}"
        f"{100 * one.error:>+8.1f} %  {one.words}"
        for one in sorted(found, key=lambda one: one.measured)
    ]
    return [
        f"{WORK.model}, {WORK.sequences} sequences of {WORK.sequence_length} tokens a step, {WORK.precision}; "
        "medians of turns, over how much slower the machine was just then than when it was calibrated",
        f"{'slower':>7}{'measured':>10}{'estimated':>11}{'off':>10}  layout", *rows,
        f"median error {100 * _median_error(found):.1f} %; order (Spearman) {spearman(found):.3f}; the layout that is "
        f"estimated fastest takes {1 + lost(found):.3f} of the fastest's time",
    ]  # fmt: skip


def write_scatter(path: Path, found: list[Compared]) -> None:
    """Draw estimated over measured times, a colour for each number of ranks."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in sorted(found, key=lambda one: one.layout.world_size):
        ranks = one.layout.world_size
        name = f"{ranks} rank{'s' if ranks > 1 else ''}"
        groups.setdefault(name, []).append((1000 * one.measured, 1000 * one.estimated))
    figure, (axes,) = new_figure(560, 460, title="Step times")
    draw_scatter(axes, groups, unit="ms")
    write_whole(path, to_svg(figure))
