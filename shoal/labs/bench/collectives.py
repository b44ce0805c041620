"""Collectives by every algorithm over point-to-point transfers, beside the backend's own, in turn on the same ranks."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import write_whole
from shoal.base.units import show_bytes, show_seconds
from shoal.engine.cpu_tuning import tune_process
from shoal.labs.collectives.description import VECTORS, Collective, Description
from shoal.labs.collectives.price import bus_bandwidth
from shoal.labs.collectives.run import run_blocks, run_vector
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.launch.worker_pool import Pool
from shoal.report.lines import lines
from shoal.report.svg import FAINT, Canvas

BACKEND = "backend"
WIDTH, HEIGHT = 560.0, 330.0  # of one chart

# torch 2.13 renamed these two; both names exist in one release or the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class CollectiveTiming:
    """One algorithm at one size.

    Attributes:
        size: S, bytes of the largest input or output of one rank.
        seconds: the median over the turns; in each, that of the slowest rank.
        bus: bus bandwidth as nccl-tests defines it, bytes/s.
        ratio: seconds over the backend's.
    """

    collective: str
    ranks: int
    size: int
    algorithm: str
    seconds: float
    bus: float
    ratio: float


def collectives_named(only: str) -> list[Collective]:
    """The collectives of a list of names with commas, or all of them.

    Raises:
        UsageError: there is no collective of a name.
    """
    if only == "all":
        return list(Collective)
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in list(Collective):
            near = did_you_mean(name, Collective)
            raise UsageError(f"bench collectives --only {only}: there is no collective '{name}'; {near}")
    return [Collective(name) for name in names]


def measure(
    collectives: Sequence[Collective],
    ranks: Sequence[int],
    sizes: Sequence[float],
    turns: int,
    say: Callable[[str], None],
) -> Iterator[CollectiveTiming]:
    """Measure every algorithm of some collectives, in float32.

    Args:
        sizes: S in bytes; rounded up so that all blocks are equal, and measured once where several then coincide.
        turns: of each contender, A B C A B C, after one that is not counted.
        say: told what is going on.

    Raises:
        RankError: an algorithm's result is not the backend's.
    """
    with Pool(max(ranks), tune_process) as pool:
        for collective in collectives:
            for n in ranks:
                for each in sorted({max(1, ceil(wanted / 4 / n)) for wanted in sizes}):
                    size = 4 * n * each
                    say(f"{collective} of {size:,} bytes on {n} ranks")
                    limit = seconds_at_most(n, collective, size, turns)
                    times = pool.run(_race, n, collective, each, turns, timeout=limit)
                    seconds = {
                        name: median(max(rank[name][turn] for rank in times) for turn in range(turns))
                        for name in times[0]
                    }
                    for name, took in seconds.items():
                        bus = bus_bandwidth(collective, n, size, took)
                        yield CollectiveTiming(collective.value, n, size, name, took, bus, took / seconds[BACKEND])


def seconds_at_most(n: int, collective: Collective, size: int, turns: int) -> float:
    """What a race takes if nothing hangs: of each run ten milliseconds and 10 ns a byte for each rank, since all may
    share a core."""
    return 170.0 + (turns + 1) * (1 + len(TEXTBOOK[collective])) * n * (1e-2 + 1e-8 * size)


def _race(collective: Collective, each: int, turns: int) -> dict[str, list[float]]:
    """On one rank: the seconds of every turn of every contender."""
    n = dist.get_world_size()
    per_node = max(d for d in range(1, n) if n % d == 0)
    runs = {BACKEND: _backend(collective, each)}
    for name in TEXTBOOK[collective]:
        runs[name] = _ours(describe(collective, name, n, per_node=per_node), each)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    wanted: Tensor | None = None
    for turn in range(turns + 1):
        for name, (prepare, run) in runs.items():
            prepare()
            dist.barrier()
            start = time.perf_counter()
            result = run()
            took = time.perf_counter() - start
            if turn > 0:
                seconds[name].append(took)
            elif name == BACKEND:
                wanted = result.clone()
            else:
                assert wanted is not None, "the backend is the first"
                if not torch.equal(result, wanted) and not (collective is Collective.REDUCE and dist.get_rank()):
                    raise RuntimeError(f"{collective} by {name}: another result than the backend's")
    return seconds


def _input(numel: int) -> Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    return torch.arange(numel).add_(dist.get_rank()).remainder_(7).float()


Contender = tuple[Callable[[], object], Callable[[], Tensor]]
"""What is done before the clock starts, and what is timed."""


def _ours(description: Description, each: int) -> Contender:
    group = dist.group.WORLD
    assert group is not None, "this process is one of a pool"
    if description.collective in VECTORS:
        own = _input(each * description.ranks)
        x = own.clone()
        return lambda: x.copy_(own), lambda: run_vector(description, x, group)
    x = _input(each * len(description.initial(dist.get_rank())))
    sizes = [each] * description.blocks
    return lambda: None, lambda: run_blocks(description, x, sizes, group)


def _backend(collective: Collective, each: int) -> Contender:
    """The same by torch.distributed itself; rank 0 is the root."""
    n = dist.get_world_size()
    root = dist.get_rank() == 0
    own = _input(each * (1 if collective in (Collective.GATHER, Collective.ALL_GATHER) else n))
    x, part, whole = own.clone(), own.new_empty(each), own.new_empty(each * n)

    def after(work: dist.Work | None, result: Tensor) -> Tensor:
        if work is not None:
            work.wait()
        return result

    calls: dict[Collective, Callable[[], Tensor]] = {
        Collective.BROADCAST: lambda: after(dist.broadcast(x, 0), x),
        Collective.REDUCE: lambda: after(dist.reduce(x, 0), x),
        Collective.ALL_REDUCE: lambda: after(dist.all_reduce(x), x),
        Collective.SCATTER: lambda: after(dist.scatter(part, list(x.split(each)) if root else None, 0), part),
        Collective.GATHER: lambda: after(
            dist.gather(x, list(whole.split(each)) if root else None, 0), whole if root else whole[:0]
        ),
        Collective.ALL_GATHER: lambda: after(_all_gather(whole, x), whole),
        Collective.REDUCE_SCATTER: lambda: after(_reduce_scatter(part, x), part),
        Collective.ALL_TO_ALL: lambda: after(dist.all_to_all_single(whole, x), whole),
    }
    return lambda: x.copy_(own), calls[collective]


# ---- what is shown -------------------------------------------------------------------------------------------------


def table(rows: list[CollectiveTiming]) -> Table:
    """Bus bandwidths and times, the fastest of ours in bold."""
    view = Table(title="collectives: the backend's own beside algorithms over point-to-point transfers")
    for column in ("collective", "ranks", "S", "algorithm"):
        view.add_column(column)
    for column in ("time", "bus", "x backend's time"):
        view.add_column(column, justify="right")
    for i, row in enumerate(rows):
        race = [r for r in rows if _contest(r) == _contest(row) and r.algorithm != BACKEND]
        style = "dim" if row.algorithm == BACKEND else "bold" if row == min(race, key=lambda r: r.seconds) else ""
        view.add_row(
            row.collective, str(row.ranks), show_bytes(row.size), row.algorithm, show_seconds(row.seconds),
            f"{show_bytes(row.bus)}/s", f"{row.ratio:.2f}", style=style,
            end_section=i + 1 == len(rows) or _contest(rows[i + 1]) != _contest(row),
        )
    return view


def _contest(row: CollectiveTiming) -> tuple[str, int, int]:
    return row.collective, row.ranks, row.size


def write(rows: list[CollectiveTiming], out: Path) -> None:
    """The table as CSV: bytes, seconds, bytes/s."""
    text = io.StringIO()
    writer = csv.DictWriter(text, asdict(rows[0]))
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_whole(out, text.getvalue())


def plot(rows: list[CollectiveTiming]) -> str:
    """Bus bandwidth over size, a chart for each collective and number of ranks, as an SVG file."""
    ranks = sorted({row.ranks for row in rows})
    names = list(dict.fromkeys(row.collective for row in rows))
    canvas = Canvas()
    canvas.text(30, 40, "Bus bandwidth of collectives", size=21, font_weight=650)
    words = "in nccl-tests' definition; median of turns; backend's own dashed"
    canvas.text(30, 62, words, size=13, fill=FAINT)
    for y, name in enumerate(names):
        for x, n in enumerate(ranks):
            of_race = [row for row in rows if (row.collective, row.ranks) == (name, n)]
            if not of_race:  # it was not measured any more
                continue
            series: dict[str, list[tuple[float, float]]] = {}
            for row in of_race:
                series.setdefault(row.algorithm, []).append((row.size, row.bus))
            chart = lines(
                f"{name} on {n} ranks", series, width=WIDTH, height=HEIGHT, dots=True, dashed=frozenset({BACKEND}),
                x=("S", show_bytes), y=("", lambda bus: f"{show_bytes(bus)}/s"),
            )
            canvas.place(30 + x * (WIDTH + 30), 90 + y * (HEIGHT + 30), chart)
    return canvas.document(
        30 + len(ranks) * (WIDTH + 30), 100 + len(names) * (HEIGHT + 30), "Bus bandwidth of collectives"
    )
