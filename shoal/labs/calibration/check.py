"""Compare estimated with measured step times of a small model on layouts of up to four ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch.distributed as dist

from shoal.base.files import write_atomically
from shoal.base.units import show_seconds
from shoal.labs.bench.race import time_in_turns
from shoal.labs.bench.step.workload import Workload, shoal_step
from shoal.labs.calibration.measure import Say, time_reference
from shoal.labs.calibration.profile import NAME
from shoal.launch.worker_pool import Pool
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.space import LayoutSpace, layouts
from shoal.report.charts import draw_scatter, new_figure, to_svg
from shoal.report.tables import table_lines
from shoal.spec.catalog.clusters import cluster, nodes
from shoal.spec.layout import Layout

REFERENCES = 3  # measurements of the machine's speed before and after each layout
STEPS = 2  # measured steps of a turn, after one that does not count
TIMEOUT = 300.0
RANKS = (1, 2, 3, 4)
NEAR = 0.10  # largest median error of right estimates
ORDERED = 0.9  # least Spearman correlation of right estimates
ROUND_TWO, FINAL = 12, 3
"""Layouts that `pick` measures again. One step is too few to order layouts that are nearly equal, and the fastest of
twelve is so partly by luck, so the last ones get measurements of their own."""
WORK = Workload("tiny", sequence_length=128, sequences=12)
"""A step of well under a second; 1 to 4 replicas share its 12 sequences evenly."""


@dataclass(frozen=True)
class MeasuredLayout:
    """One layout with its step times."""

    layout: Layout
    measured: float  # seconds of a step, corrected to the machine's speed when it was calibrated
    estimated: float  # seconds of a step
    slowdown: float = 1.0  # time of the machine's reference model over its time when it was calibrated

    @property
    def error(self) -> float:
        """Relative error of the estimate."""
        return self.estimated / self.measured - 1

    def describe(self) -> str:
        """Return the layout as text, with what `Layout.describe` leaves out."""
        recompute = f", recompute {self.layout.recompute}" if self.layout.recompute != "none" else ""
        kept = "" if self.layout.reshard_after_forward else ", kept after forward"
        return f"{self.layout.describe()}, micro-batch {self.layout.micro_batch}{recompute}{kept}"


def build_run(layout: Layout, name: str) -> EstimatedRun:
    """Return the run of `WORK` on a layout, with as many ranks of a machine as it has."""
    machine = cluster(f"{layout.world_size}x{name}")
    return EstimatedRun(WORK.shape, layout, machine, WORK.sequence_length, WORK.sequences, WORK.precision)


def draw_layouts(count: int) -> list[Layout]:
    """Draw layouts at random (always the same ones), in equal numbers for each of `RANKS` while there are enough."""
    draw = random.Random(0)
    found: list[Layout] = []
    remaining = [list_layouts(ranks) for ranks in RANKS]
    for each in remaining:
        draw.shuffle(each)
    while len(found) < count and any(remaining):
        found += [each.pop() for each in remaining if each][: count - len(found)]
    return found


def list_layouts(ranks: int) -> list[Layout]:
    """Return all layouts of a number of ranks, without context parallelism and uneven stages."""
    schedules = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")
    space = LayoutSpace(schedules, most_virtual=2, uneven=False, fixed={"cp": 1})
    run = build_run(Layout(dp=ranks), "H100")  # only the size of the cluster counts
    return [layout for layout in layouts(run, space) if layout.dp * layout.tp * layout.pp == ranks]


def compare(pool: Pool, chosen: list[Layout], rounds: int, say: Say, steps: int = STEPS) -> list[MeasuredLayout]:
    """Measure all layouts alternately, each in ``rounds`` turns, and estimate them."""
    seconds: list[list[float]] = [[] for _ in chosen]
    slowdowns: list[list[float]] = [[] for _ in chosen]
    for turn in range(rounds):
        for i, layout in enumerate(chosen):
            say((turn + i / len(chosen)) / rounds, f"turn {turn + 1} of {rounds}: {layout.describe()}")
            before = _measure_slowdown(pool, layout)
            ranks = pool.run(_time_steps, layout.world_size, WORK, layout, steps, timeout=TIMEOUT)
            slowdown = (before + _measure_slowdown(pool, layout)) / 2
            slowdowns[i].append(slowdown)
            seconds[i] += [max(each) / slowdown for each in zip(*ranks, strict=True)]
    return [
        MeasuredLayout(layout, median(times), Estimate(build_run(layout, NAME)).step_seconds, median(slower))
        for layout, times, slower in zip(chosen, seconds, slowdowns, strict=True)
    ]


def _measure_slowdown(pool: Pool, layout: Layout) -> float:
    """Return the current time of the reference over the calibrated one, on as many cores as a layout keeps busy."""
    machine = nodes()[NAME]
    assert machine.at_once and machine.reference, "a calibrated machine has both"
    ranks = pool.run(time_reference, min(layout.world_size, machine.at_once), REFERENCES, timeout=TIMEOUT)
    return median(max(each) for each in zip(*ranks, strict=True)) / machine.reference


def _time_steps(work: Workload, layout: Layout, steps: int) -> list[float]:
    """Return the seconds of some steps on one rank, after one that does not count."""
    fields = {name: getattr(layout, name) for name in Layout.model_fields if getattr(layout, name) is not None}
    step, numbers = shoal_step(work, dist.get_rank(), dist.get_world_size(), **fields), count()
    return time_in_turns({layout: lambda: step(next(numbers))}, steps, prepare=lambda key: dist.barrier())[layout]


def pick(pool: Pool, ranks: int, rounds: int, say: Say) -> list[MeasuredLayout]:
    """Measure one step of every layout, then the fastest of them again, and the fastest of these by new measurements.

    The layout with the lowest estimate is always among them.

    Args:
        rounds: turns of each layout in the second measurement; the last one takes three times as many.

    Returns:
        The layouts of the last measurement, the one with the lowest estimate first.
    """
    found = compare(pool, list_layouts(ranks), 1, lambda done, what: say(0.8 * done, what), steps=1)
    picked = min(found, key=lambda one: one.estimated).layout
    again = _select_fastest(found, picked, ROUND_TWO)
    found = compare(pool, again, rounds, lambda done, what: say(0.8 + 0.1 * done, what))
    last = _select_fastest(found, picked, FINAL)
    return compare(pool, last, 3 * rounds, lambda done, what: say(0.9 + 0.1 * done, what))


def _select_fastest(found: list[MeasuredLayout], picked: Layout, most: int) -> list[Layout]:
    """Return the picked layout and the fastest others."""
    others = [one.layout for one in sorted(found, key=lambda one: one.measured) if one.layout != picked]
    return [picked, *others[:most]]


def spearman(found: list[MeasuredLayout]) -> float:
    """Return Spearman's correlation of measured and estimated times; 1 for a single layout."""
    if len(found) < 2:
        return 1.0
    from scipy.stats import spearmanr  # which takes a second to import

    return spearmanr([one.measured for one in found], [one.estimated for one in found]).statistic


def lost_time(found: list[MeasuredLayout]) -> float:
    """Return by how much the layout with the lowest estimate is slower than the fastest one, as a fraction."""
    picked = min(found, key=lambda one: one.estimated)
    return picked.measured / min(one.measured for one in found) - 1


def is_right(found: list[MeasuredLayout]) -> bool:
    """Whether estimates are near the measurements (`NEAR`) and in their order (`ORDERED`)."""
    return _median_error(found) <= NEAR and spearman(found) >= ORDERED


def _median_error(found: list[MeasuredLayout]) -> float:
    return median(abs(one.error) for one in found)


def format_check(found: list[MeasuredLayout]) -> list[str]:
    """Return the table of a check, fastest layout first, and a line with its errors."""
    rows = [
        (one.describe(), f"{one.slowdown:.2f}", show_seconds(one.measured), show_seconds(one.estimated),
         f"{100 * one.error:+.1f} %")
        for one in sorted(found, key=lambda one: one.measured)
    ]  # fmt: skip
    return [
        f"{WORK.model}, {WORK.sequences} sequences of {WORK.sequence_length} tokens a step, {WORK.precision}; medians, "
        "divided by the slowdown of the machine since it was calibrated",
        *table_lines(("layout", "slowdown", "measured", "estimated", "error"), rows, right=1),
        f"median error {100 * _median_error(found):.1f} %; order (Spearman) {spearman(found):.3f}; the layout with the "
        f"lowest estimate takes {1 + lost_time(found):.3f} times as long as the fastest",
    ]


def write_scatter(path: Path, found: list[MeasuredLayout]) -> None:
    """Plot estimated against measured times, a colour for each number of ranks."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in sorted(found, key=lambda one: one.layout.world_size):
        ranks = one.layout.world_size
        name = f"{ranks} rank{'s' if ranks > 1 else ''}"
        groups.setdefault(name, []).append((1000 * one.measured, 1000 * one.estimated))
    figure, (axes,) = new_figure(560, 460, title="Step times")
    draw_scatter(axes, groups, unit="ms")
    write_atomically(path, to_svg(figure))
