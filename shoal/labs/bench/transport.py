"""The all-reduce of CPU ranks of one host: through memory that they share, in it, and through gloo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from pydantic import PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import NonEmpty
from shoal.engine.collectives.group import Group, allocate
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.cpu_tuning import tune_process
from shoal.labs.bench.benchmark import Benchmark, Row, Say, make_table
from shoal.labs.bench.race import CPU, time_in_turns
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import Layout

IN_A_ROW = 5  # all-reduces in one measurement, as many layers make them
WAYS = ("shared memory", "common memory", "gloo")
"""Through rings in shared memory (as activations go), of tensors that lie in it (as gradients do), and by gloo."""


class TransportBenchmark(Benchmark):
    """All-reduce between CPU ranks of this host, through and in shared memory against gloo; all in turn."""

    ranks: NonEmpty[PositiveInt] = (2, 4)
    """Numbers of ranks, each of 2 or more; one thread a rank."""

    sizes: NonEmpty[PositiveInt] = (4, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
    """KiB of float32."""

    repeats: PositiveInt = 15
    """Measurements of each, of 5 all-reduces in a row; the median counts."""

    def run(self, console: Console, say: Say) -> bool:
        """Time all-reduces for each number of ranks and size."""
        if min(self.ranks) < 2:
            raise UsageError("bench transport --ranks 1: one rank has nobody to exchange with; give 2 or more.")
        sizes = [size * 1024 for size in self.sizes]
        timings = [timing for ranks in self.ranks for timing in measure(ranks, sizes, self.repeats)]
        console.print(make_table("all-reduce between CPU ranks of one host", timings))
        return True


def measure(ranks: int, sizes: Sequence[int], repeats: int) -> list[Row]:
    """Time all `WAYS` in turn, on processes of one thread each."""
    with Pool(ranks, setup=tune_process) as pool:
        found = pool.run(time_all_reduces, ranks, sizes, repeats, timeout=seconds_at_most(ranks, sizes, repeats))[0]
    rows: list[Row] = []
    for size, seconds in found.items():
        us = {way: 1e6 * median(times) for way, times in seconds.items()}
        gains = {f"gloo / {way}": us["gloo"] / us[way] for way in WAYS[:2]}
        rows.append({"ranks": ranks, "KiB": size // 1024, **{f"{way} us": us[way] for way in WAYS}, **gains})
    return rows


def seconds_at_most(ranks: int, sizes: Sequence[int], repeats: int) -> float:
    """What all that takes if nothing hangs: of one all-reduce a millisecond and 10 ns a byte, ten times what they take
    by gloo, for each rank, since all may share a core."""
    count = len(WAYS) * (repeats + 1) * (IN_A_ROW + 1)
    return 600.0 + count * ranks * sum(1e-3 + 1e-8 * size for size in sizes)


def time_all_reduces(
    sizes: Sequence[int], repeats: int, ways: Sequence[str] = WAYS
) -> dict[int, dict[str, list[float]]]:
    """Time all-reduces on one rank of the default process group.

    Args:
        sizes: bytes.

    Returns:
        By size and way, the seconds of an all-reduce in every turn.
    """
    group = Mesh(Layout(tp=dist.get_world_size()), dist.get_rank()).group("tp")
    assert group is not None, "a group of several ranks"
    if group.shared is None and "gloo" in ways:
        raise RuntimeError("these processes share no memory: shoal takes gloo here too")
    return {size: _time_size(group, size, repeats, ways) for size in sizes}


def _time_size(group: Group, size: int, repeats: int, ways: Sequence[str]) -> dict[str, list[float]]:
    numel = max(1, size // 4)
    tensors = {way: torch.zeros(numel) for way in ways} | {"common memory": allocate(numel, torch.float32, CPU, group)}
    reduce = {way: dist.all_reduce if way == "gloo" else partial(all_reduce, group=group) for way in ways}

    def begin_together(way: str) -> None:
        dist.barrier()
        reduce[way](tensors[way])

    calls = {way: partial(reduce[way], tensors[way]) for way in ways}
    return time_in_turns(calls, repeats, prepare=begin_together, in_a_row=IN_A_ROW)
