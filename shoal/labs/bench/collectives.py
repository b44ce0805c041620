"""Collectives by every algorithm over point-to-point transfers, beside the backend's own, in turn on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import ceil
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.base.files import check_writable, write_whole
from shoal.base.section import NonEmpty
from shoal.base.units import BYTES, parse, show_bytes, show_seconds
from shoal.engine.cpu_tuning import tune_process
from shoal.labs.bench.benchmark import Benchmark, Row, Say, choose_names, make_table, write_records
from shoal.labs.bench.race import slowest_rank, time_in_turns
from shoal.labs.collectives.description import VECTORS, Collective, Description
from shoal.labs.collectives.price import bus_bandwidth
from shoal.labs.collectives.run import run_blocks, run_vector
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.launch.worker_pool import Pool
from shoal.report.charts import draw_lines, new_figure, to_svg

BACKEND = "backend"
MOST_RANKS = 32

# torch 2.13 renamed these two; both names exist in one release or the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectivesBenchmark(Benchmark):
    """Collectives of the backend beside every algorithm over point-to-point transfers, by size and ranks."""

    only: str = "all-reduce"
    """Some of the collectives, with commas, or all."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks."""

    sizes: NonEmpty[str] = ("4kB", "64kB", "1MB", "16MB")
    """Bytes of the largest input or output of one rank."""

    turns: PositiveInt = 9
    """Measurements of each; the median counts."""

    out: Path | None = None
    """Also write the table to this file, .csv."""

    plot: Path | None = None
    """Also draw the bus bandwidth over the size to this file, .svg."""

    def run(self, console: Console, say: Say) -> bool:
        """Measure, print, write and draw."""
        wanted = [Collective(name) for name in choose_names(self.only, list(Collective), "bench collectives --only")]
        sizes = sorted({parse(size, BYTES, where="--sizes") for size in self.sizes})
        if sizes[0] == 0:
            raise UsageError("--sizes: give sizes above 0, such as --sizes 64kB 16MB")
        if not all(2 <= n <= MOST_RANKS for n in self.ranks):
            raise UsageError(f"--ranks {' '.join(map(str, self.ranks))}: 2 to {MOST_RANKS} processes each")
        check_writable(self.out, "--out", ".csv", new=True)
        check_writable(self.plot, "--plot", ".svg", new=True)
        rows: list[Row] = []
        try:
            for row in measure(wanted, sorted(set(self.ranks)), sizes, self.turns, say):
                rows.append(row)
        finally:  # also of those that are measured where another fails, or Ctrl-C ends it
            if rows:
                console.print(table(rows))
                if self.out:
                    write_records(rows, self.out)
                if self.plot:
                    write_whole(self.plot, plot(rows))
        return True


def measure(
    collectives: Sequence[Collective], ranks: Sequence[int], sizes: Sequence[float], turns: int, say: Say
) -> Iterator[Row]:
    """Measure every algorithm of some collectives, in float32.

    Args:
        sizes: S in bytes; rounded up so that all blocks are equal, and measured once where several then coincide.
        turns: of each contender, A B C A B C, after one that is not counted.

    Yields:
        Of each algorithm the size S, bytes of the largest input or output of one rank; the median over the turns of the
        slowest rank's seconds; the bus bandwidth as nccl-tests defines it, bytes/s; and seconds over the backend's.

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
                    seconds = {name: median(took) for name, took in slowest_rank(times).items()}
                    for name, took in seconds.items():
                        bus = bus_bandwidth(collective, n, size, took)
                        yield {
                            "collective": collective.value, "ranks": n, "size": size, "algorithm": name,
                            "seconds": took, "bus": bus, "ratio": took / seconds[BACKEND],
                        }


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

    def begin_together(name: str) -> None:
        fill, _ = runs[name]
        fill()
        dist.barrier()

    wanted: Tensor | None = None
    for name, (_, call) in runs.items():  # the backend is the first
        begin_together(name)
        result = call()
        if wanted is None:
            wanted = result.clone()
        elif not torch.equal(result, wanted) and not (collective is Collective.REDUCE and dist.get_rank()):
            raise RuntimeError(f"{collective} by {name}: another result than the backend's")
    calls = {name: call for name, (_, call) in runs.items()}
    return time_in_turns(calls, turns, warmup=0, prepare=begin_together)


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


def table(rows: Sequence[Row]) -> Table:
    """Times and bus bandwidths, the fastest of ours in bold."""

    def contest(row: Row) -> str:
        return f"{row['collective']} of {show_bytes(row['size'])} on {row['ranks']} ranks"

    ours = sorted((row for row in rows if row["algorithm"] != BACKEND), key=lambda row: -row["seconds"])
    fastest = {contest(row): row for row in ours}
    return make_table("collectives: the backend's own beside algorithms over point-to-point transfers", [
        {
            "contest": contest(row), "algorithm": "[bold]" * (row == fastest.get(contest(row))) + row["algorithm"],
            "time": show_seconds(row["seconds"]), "bus": f"{show_bytes(row['bus'])}/s",
            "x backend's time": row["ratio"],
        } for row in rows
    ], above="contest")  # fmt: skip


def plot(rows: Sequence[Row]) -> str:
    """Bus bandwidth over size, a chart for each collective and number of ranks, as an SVG file."""
    ranks = sorted({row["ranks"] for row in rows})
    names = list(dict.fromkeys(row["collective"] for row in rows))
    figure, charts = new_figure(
        560 * len(ranks), 60 + 300 * len(names), rows=len(names), columns=len(ranks),
        title="Bus bandwidth of collectives, as nccl-tests defines it; median of turns; the backend's own dashed",
    )
    for axes, (name, n) in zip(charts, product(names, ranks), strict=True):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if (row["collective"], row["ranks"]) == (name, n):
                series.setdefault(row["algorithm"], []).append((row["size"], row["bus"]))
        axes.set_visible(bool(series))  # some pairs are not measured
        if series:
            draw_lines(
                axes, f"{name} on {n} ranks", series, dots=True, dashed=frozenset({BACKEND}), x=("S", show_bytes),
                y=("", lambda bus: f"{show_bytes(bus)}/s"),
            )
    return to_svg(figure)
