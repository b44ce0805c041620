"""Collectives: algorithms over point-to-point transfers beside the backend's, and shared memory beside gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from pydantic import PositiveInt
from rich.console import Console
from rich.text import Text
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.base.files import check_writable
from shoal.base.section import NonEmpty
from shoal.base.units import BYTES, parse, show_bytes, show_seconds
from shoal.engine.collectives.group import allocate
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_gather_single, all_reduce, reduce_scatter_single
from shoal.engine.device import tune_process
from shoal.labs.bench.benchmark import TIME_LIMIT, Benchmark, Notify, Row, choose_names, make_table, write_records
from shoal.labs.bench.race import CPU, slowest_rank, time_in_turns
from shoal.labs.collectives.description import VECTORS, Collective, Description
from shoal.labs.collectives.price import bus_bandwidth
from shoal.labs.collectives.run import run_blocks, run_vector
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import Layout

BACKEND = "backend"
MOST_RANKS = 32


class CollectivesBenchmark(Benchmark):
    """Collectives of the backend beside every algorithm over point-to-point transfers, by size and ranks."""

    only: str = "all-reduce"
    """Comma-separated list of collectives, or all."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks."""

    sizes: NonEmpty[str] = ("4kB", "64kB", "1MB", "16MB")
    """Bytes of the largest input or output of a rank."""

    turns: PositiveInt = 9
    """Measurements of each, in turns; the median counts."""

    out: Path | None = None
    """Also write the table to this file, .csv."""

    def run(self, console: Console, notify: Notify) -> bool:
        wanted = [Collective(name) for name in choose_names(self.only, list(Collective), "bench collectives --only")]
        sizes = sorted({parse(size, BYTES, where="--sizes") for size in self.sizes})
        if sizes[0] == 0:
            raise UsageError("--sizes: use sizes above 0, such as --sizes 64kB 16MB")
        if not all(2 <= n <= MOST_RANKS for n in self.ranks):
            raise UsageError(f"--ranks {' '.join(map(str, self.ranks))}: use 2 to {MOST_RANKS} processes each")
        check_writable(self.out, "--out", ".csv", new=True)
        rows: list[Row] = []
        try:
            for row in measure(wanted, sorted(set(self.ranks)), sizes, self.turns, notify):
                rows.append(row)
        finally:  # the finished ones also after an error or Ctrl-C
            if rows:
                _print_table(rows, console)
                if self.out:
                    write_records(rows, self.out)
        return True


def measure(
    collectives: Sequence[Collective], ranks: Sequence[int], sizes: Sequence[float], turns: int, notify: Notify
) -> Iterator[Row]:
    """Measure every algorithm of some collectives, in float32.

    Args:
        sizes: S in bytes, rounded up so that all blocks are equal; sizes that then coincide are measured once.

    Yields:
        For each algorithm the size S [bytes], the largest input or output of one rank; the median over the turns of the
        slowest rank's seconds; the bus bandwidth as in nccl-tests [bytes/s]; and the ratio of seconds to the backend's.

    Raises:
        RankError: an algorithm's result differs from the backend's.
    """
    with Pool(max(ranks), tune_process) as pool:
        for collective, n in product(collectives, ranks):
            for each in sorted({max(1, ceil(wanted / 4 / n)) for wanted in sizes}):
                size = 4 * n * each
                notify(f"{collective} of {size:,} bytes on {n} ranks")
                times = pool.run(_time, n, collective, each, turns, timeout=TIME_LIMIT)
                seconds = {name: median(taken) for name, taken in slowest_rank(times).items()}
                for name, taken in seconds.items():
                    yield {
                        "collective": collective.value, "ranks": n, "size": size, "algorithm": name, "seconds": taken,
                        "bus": bus_bandwidth(collective, n, size, taken), "ratio": taken / seconds[BACKEND],
                    }


def _time(collective: Collective, each: int, turns: int) -> dict[str, list[float]]:
    """Check every algorithm and return its seconds in every turn, on one rank."""
    n = dist.get_world_size()
    per_node = max(d for d in range(1, n) if n % d == 0)
    runs = {BACKEND: _prepare_backend(collective, each)}
    for name in TEXTBOOK[collective]:
        runs[name] = _prepare(describe(collective, name, n, per_node=per_node), each)

    def begin_together(name: str) -> None:
        fill, _ = runs[name]
        fill()
        dist.barrier()

    expected: Tensor | None = None
    for name, (_, call) in runs.items():  # the backend first
        begin_together(name)
        result = call()
        if expected is None:
            expected = result.clone()
        elif not torch.equal(result, expected) and not (collective is Collective.REDUCE and dist.get_rank()):
            raise RuntimeError(f"{collective} by {name}: the result differs from the backend's")
    calls = {name: call for name, (_, call) in runs.items()}
    return time_in_turns(calls, turns, warmup=0, prepare=begin_together)


def _input(numel: int) -> Tensor:
    """Return small integers, whose sums are exact in any order."""
    return torch.arange(numel).add_(dist.get_rank()).remainder_(7).float()


Prepared = tuple[Callable[[], object], Callable[[], Tensor]]
"""A function that fills the buffers, and the function to time."""


def _prepare(description: Description, each: int) -> Prepared:
    group = dist.group.WORLD
    assert group is not None, "this process is one of a pool"
    if description.collective in VECTORS:
        own = _input(each * description.ranks)
        x = own.clone()
        return lambda: x.copy_(own), lambda: run_vector(description, x, group)
    x = _input(each * len(description.initial(dist.get_rank())))
    sizes = [each] * description.blocks
    return lambda: None, lambda: run_blocks(description, x, sizes, group)


def _prepare_backend(collective: Collective, each: int) -> Prepared:
    """Prepare the collective of torch.distributed, with rank 0 as the root."""
    n = dist.get_world_size()
    root = dist.get_rank() == 0
    own = _input(each * (1 if collective in (Collective.GATHER, Collective.ALL_GATHER) else n))
    x, part, full = own.clone(), own.new_empty(each), own.new_empty(each * n)

    calls: dict[Collective, tuple[Callable[[], object], Tensor]] = {
        Collective.BROADCAST: (lambda: dist.broadcast(x, 0), x),
        Collective.REDUCE: (lambda: dist.reduce(x, 0), x),
        Collective.ALL_REDUCE: (lambda: dist.all_reduce(x), x),
        Collective.SCATTER: (lambda: dist.scatter(part, list(x.split(each)) if root else None, 0), part),
        Collective.GATHER: (
            lambda: dist.gather(x, list(full.split(each)) if root else None, 0), full if root else full[:0]
        ),
        Collective.ALL_GATHER: (lambda: all_gather_single(full, x), full),
        Collective.REDUCE_SCATTER: (lambda: reduce_scatter_single(part, x), part),
        Collective.ALL_TO_ALL: (lambda: dist.all_to_all_single(full, x), full),
    }
    call, result = calls[collective]
    return lambda: x.copy_(own), lambda: (call(), result)[1]


def _print_table(rows: Sequence[Row], console: Console) -> None:
    """Print times and bus bandwidths, the fastest algorithm in bold."""

    def heading(row: Row) -> str:
        return f"{row['collective']} of {show_bytes(row['size'])} on {row['ranks']} ranks"

    ours = sorted((row for row in rows if row["algorithm"] != BACKEND), key=lambda row: -row["seconds"])
    fastest = {heading(row): row for row in ours}
    console.print(make_table("collectives: the backend's own beside algorithms over point-to-point transfers", [
        {
            "heading": heading(row), "algorithm": Text(row["algorithm"], "bold" * (row == fastest.get(heading(row)))),
            "time": show_seconds(row["seconds"]), "bus": f"{show_bytes(row['bus'])}/s",
            "x backend's time": row["ratio"],
        } for row in rows
    ], above="heading"))  # fmt: skip


# ---- shared memory beside gloo ---------------------------------------------------------------------------------------

IN_A_ROW = 5  # all-reduces in one measurement
WAYS = ("shared memory", "common memory", "gloo")
"""Through rings in shared memory (for activations), on tensors in shared memory (for gradients), and by gloo."""


class TransportBenchmark(Benchmark):
    """All-reduce between CPU ranks of this host: through and in shared memory against gloo, in turns."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks, each 2 or more, of one thread."""

    sizes: NonEmpty[PositiveInt] = (4, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
    """Sizes in KiB, of float32."""

    repeats: PositiveInt = 15
    """Measurements of each, of 5 consecutive all-reduces; the median counts."""

    def run(self, console: Console, notify: Notify) -> bool:
        if min(self.ranks) < 2:
            raise UsageError("bench transport --ranks 1: one rank exchanges nothing; use 2 or more.")
        timings = [timing for ranks in self.ranks for timing in self.measure(ranks)]
        console.print(make_table("all-reduce between CPU ranks of one host", timings))
        return True

    def measure(self, ranks: int) -> Iterator[Row]:
        """Time all `WAYS` in turns, on processes of one thread each."""
        sizes = [size * 1024 for size in self.sizes]
        with Pool(ranks, setup=tune_process) as pool:
            found = pool.run(time_all_reduces, ranks, sizes, self.repeats, timeout=TIME_LIMIT)[0]
        for size, seconds in found.items():
            us = {way: 1e6 * median(times) for way, times in seconds.items()}
            gains = {f"gloo / {way}": us["gloo"] / us[way] for way in WAYS[:2]}
            yield {"ranks": ranks, "KiB": size // 1024, **{f"{way} us": us[way] for way in WAYS}, **gains}


def time_all_reduces(
    sizes: Sequence[int], repeats: int, ways: Sequence[str] = WAYS
) -> dict[int, dict[str, list[float]]]:
    """Time all-reduces on one rank of the default process group; return the seconds of every turn, by size in bytes and
    by way."""
    group = Mesh(Layout(tp=dist.get_world_size()), dist.get_rank()).group("tp")
    assert group is not None, "a group of several ranks"
    if group.shared is None and "gloo" in ways:
        raise RuntimeError("these processes share no memory, so shoal uses gloo here too")
    reduce = {way: dist.all_reduce if way == "gloo" else partial(all_reduce, group=group) for way in ways}
    seconds = {}
    for size in sizes:
        numel = max(1, size // 4)
        tensors = {way: torch.zeros(numel) for way in ways}
        tensors["common memory"] = allocate(numel, torch.float32, CPU, group)
        calls = {way: partial(reduce[way], tensors[way]) for way in ways}

        def begin_together(way: str, calls: Mapping[str, Callable[[], object]] = calls) -> None:
            dist.barrier()
            calls[way]()

        seconds[size] = time_in_turns(calls, repeats, prepare=begin_together, in_a_row=IN_A_ROW)
    return seconds
