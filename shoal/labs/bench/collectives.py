"""Collectives by every algorithm over point-to-point transfers, beside the backend's own, in turn on the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.cpu_tuning import tune_process
from shoal.labs.collectives.description import VECTORS, Collective, Description
from shoal.labs.collectives.price import bus_bandwidth
from shoal.labs.collectives.run import run_blocks, run_vector
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.launch.worker_pool import Pool

BACKEND = "backend"

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
            elif not torch.equal(result, wanted) and not (collective is Collective.REDUCE and dist.get_rank()):
                raise RuntimeError(f"{collective} by {name}: another result than the backend's")
    return seconds


def _input(numel: int) -> Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    return torch.arange(numel).add_(dist.get_rank()).remainder_(7).float()


Contender = tuple[Callable[[], object], Callable[[], Tensor]]
"""What is done before the clock starts, and what is timed."""


def _ours(description: Description, each: int) -> Contender:
    group = dist.group.WORLD
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

    def after(work: object, result: Tensor) -> Tensor:
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
