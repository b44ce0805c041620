"""The all-reduce of CPU ranks of one host: through memory that they share, in it, and through gloo."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from rich.table import Table

from shoal.engine.collectives.group import allocate
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.cpu_tuning import tune_process
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import Layout

IN_A_ROW = 5  # all-reduces in one measurement, as many layers make them
WAYS = ("shared memory", "common memory", "gloo")
"""Through rings in shared memory (as activations go), of tensors that lie in it (as gradients do), and by gloo."""


@dataclass(frozen=True)
class TransportTiming:
    """One size of tensor.

    Attributes:
        ranks: that take part.
        size: bytes, float32.
        seconds: of one all-reduce by transport, median.
    """

    ranks: int
    size: int
    seconds: dict[str, float]

    def gain(self, way: str) -> float:
        """Time of gloo over that of another way."""
        return self.seconds["gloo"] / self.seconds[way]


def measure(ranks: int, sizes: list[int], repeats: int) -> list[TransportTiming]:
    """Time all `WAYS` in turn, on processes of one thread each."""
    with Pool(ranks, setup=tune_process) as pool:
        return pool.run(_measure, ranks, sizes, repeats, timeout=seconds_at_most(ranks, sizes, repeats))[0]


def seconds_at_most(ranks: int, sizes: list[int], repeats: int) -> float:
    """What all that takes if nothing hangs: of one all-reduce a millisecond and 10 ns a byte, ten times what they take
    by gloo, for each rank, since all may share a core."""
    count = len(WAYS) * (repeats + 1) * (IN_A_ROW + 1)
    return 600.0 + count * ranks * sum(1e-3 + 1e-8 * size for size in sizes)


def _measure(sizes: list[int], repeats: int) -> list[TransportTiming]:
    group = Mesh(Layout(tp=dist.get_world_size()), dist.get_rank()).group("tp")
    if group is None or group.shared is None:
        raise RuntimeError("these processes share no memory: shoal takes gloo here too")
    reductions = dict.fromkeys(WAYS[:2], lambda x: all_reduce(x, group)) | {"gloo": dist.all_reduce}
    timings = []
    for size in sizes:
        numel = max(1, size // 4)
        tensors = {way: torch.zeros(numel) for way in WAYS}
        tensors["common memory"] = allocate(numel, torch.float32, torch.device("cpu"), group)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(repeats + 1):
            for way, reduce in reductions.items():
                x = tensors[way]
                dist.barrier()
                reduce(x)  # all ranks begin together
                start = time.perf_counter()
                for _ in range(IN_A_ROW):
                    reduce(x)
                if repeat > 0:  # the first warms up
                    seconds[way].append((time.perf_counter() - start) / IN_A_ROW)
        medians = {way: median(each) for way, each in seconds.items()}
        timings.append(TransportTiming(dist.get_world_size(), numel * 4, medians))
    return timings


def table(timings: Sequence[TransportTiming]) -> Table:
    """A row for each number of ranks and size."""
    view = Table(title="all-reduce between CPU ranks of one host")
    for column in ("ranks", "KiB", *(f"{way} us" for way in WAYS), "gloo / shared", "gloo / common"):
        view.add_column(column, justify="right")
    for timing in timings:
        times = [f"{timing.seconds[way] * 1e6:,.0f}" for way in WAYS]
        gains = [f"{timing.gain(way):.1f}" for way in WAYS[:2]]
        view.add_row(str(timing.ranks), f"{timing.size // 1024:,}", *times, *gains)
    return view
