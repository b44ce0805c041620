"""Assignment of layers to pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from shoal.base.errors import UsageError
from shoal.base.units import show_seconds
from shoal.pipeline.program import Program
from shoal.spec.catalog import ModelShape


def stage_layers(layers: int, stages: int, head: float = 0.0) -> list[range]:
    """Split layers into consecutive ranges, one per stage, minimising the work of the slowest stage.

    The last stage also has the head and gets fewer layers in exchange (as in Llama 3: Dubey et al. 2024, section
    3.3.2). Left-over layers go to the later of the other stages, which keep fewer micro-batches alive.

    Args:
        head: work of the head, in layers.

    >>> stage_layers(7, 4)
    [range(0, 2), range(2, 4), range(4, 6), range(6, 7)]
    >>> stage_layers(8, 2, head=2.7)
    [range(0, 5), range(5, 8)]
    """
    others = stages - 1
    if not others:
        return [range(layers)]

    def cost(last: int) -> tuple[float, float, int]:
        """Return the slowest stage's work, the last stage's lag beyond one layer, and its number of layers."""
        slowest_other = -(-(layers - last) // others)
        return max(slowest_other, last + head), max(0, slowest_other - 1 - last - head), last

    last = min(range(1, layers - others + 1), key=cost)
    even, more = divmod(layers - last, others)
    sizes = [even] * (others - more) + [even + 1] * more + [last]
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def assign_layers(shape: ModelShape, program: Program) -> list[range]:
    """Return the layers of each part of a model: as set by the layout, or balanced with the head counted."""
    return read_layers(program) or balance_layers(shape, program.depth)


def read_layers(program: Program) -> list[range]:
    """Return the layers of each part of a model as set by the layout; none if it sets none."""
    ends = list(accumulate(program.layers))
    return [range(end - size, end) for end, size in zip(ends, program.layers, strict=True)]


def split_work(work: Sequence[float], stages: int) -> list[range]:
    """Split consecutive modules into ranges, one per stage and none empty, minimising the work of the slowest stage.

    Dynamic programming over the modules before each cut (Narayanan et al. 2019, "PipeDream", section 3.1, without
    replicated stages). Among equals, the squares of the stages' work decide.

    >>> split_work([1, 1, 1, 1, 4], 2)
    [range(0, 4), range(4, 5)]
    """
    ends = [0.0, *accumulate(work)]
    # Of the first modules, by their number: the slowest stage, the squares, and the ranges.
    best = {stop: (ends[stop], ends[stop] ** 2, [range(stop)]) for stop in range(1, len(ends))}
    for stage in range(1, stages):
        best = {
            stop: min(
                ((max(slowest, ends[stop] - ends[cut]), squares + (ends[stop] - ends[cut]) ** 2,
                  [*ranges, range(cut, stop)]) for cut, (slowest, squares, ranges) in best.items() if cut < stop),
                key=lambda each: each[:2],
            )
            for stop in range(stage + 1, len(ends))
        }  # fmt: skip
    return best[len(work)][2]


def balance_layers(shape: ModelShape, stages: int) -> list[range]:
    """Return balanced layers for each part of a model."""
    return stage_layers(shape.layers, stages, measure_head(shape))


def measure_head(shape: ModelShape) -> float:
    """Return the work of the head, and of multi-token prediction, in layers."""
    layer, more = shape.mean_layer_matrices(), shape.mtp_depth
    return ((1 + more) * shape.vocab * shape.hidden + 2 * more * shape.hidden**2) / layer + more


@dataclass(frozen=True)
class PipeDreamPartition:
    """Stages of consecutive layers with replicas, as PipeDream trains them.

    Attributes:
        stages: the layers of each stage, and its number of replicas.
        seconds: between two micro-batches that leave the pipeline, once it is full.
        data_parallel: the same with all ranks as replicas of one stage.
    """

    stages: tuple[tuple[range, int], ...]
    seconds: float
    data_parallel: float

    @property
    def in_flight(self) -> int:
        """Micro-batches that a replica of the first stage starts with: the ranks over its replicas, rounded up."""
        return -(-sum(replicas for _, replicas in self.stages) // self.stages[0][1])

    def lines(self, names: Sequence[str] = ()) -> Iterator[str]:
        """Yield the partition as text, with names of the layers."""
        for layers, replicas in self.stages:
            first, last = (names[i] if names else f"layer {i}" for i in (layers.start, layers.stop - 1))
            yield f"{replicas} x {first}" + (f" to {last}" if len(layers) > 1 else "")
        yield (f"{show_seconds(self.seconds)} per micro-batch, with data parallelism alone "
               f"{show_seconds(self.data_parallel)}; {self.in_flight} in flight per replica of the first stage")


def pipedream_partition(
    seconds: Sequence[float], weights: Sequence[float], activations: Sequence[float],
    levels: Sequence[tuple[int, float]],
) -> PipeDreamPartition:
    """Split layers into stages with replicas so that the slowest is fastest (Narayanan et al. 2019, section 3.1).

    Replicas take micro-batches in turn and sum their gradients. Let A(i, j, m) be the time of the slowest stage of
    layers i to j on m ranks, w their weights and B the bandwidth. One stage takes

        T(i, j, m) = max(A of one rank, 2 (m-1) w / B) / m,

    and A(i, j, m) is the least of T(i, j, m) and, over cuts s and replicas m' of the last stage,
    max(A(i, s, m-m'), 2 a_s / B, T(s+1, j, m')), where the activations a_s go forth and their gradients back. With
    several levels, such as accelerators of a node and nodes, an inner optimum takes the place of one rank.

    Args:
        seconds: of each layer, forward and backward of one micro-batch.
        weights: bytes of each layer.
        activations: bytes of the output of each layer for one micro-batch.
        levels: ranks and bandwidth [bytes/s] of each level, the innermost first.

    Raises:
        UsageError: the lists have different lengths, or there are no ranks.

    >>> found = pipedream_partition([4, 1, 1], [0, 0, 0], [1, 1, 1], [(3, 1e9)])
    >>> found.stages, found.seconds
    (((range(0, 3), 3),), 2.0)
    >>> print(*pipedream_partition([4, 2], [0, 9e9], [1, 1], [(3, 1e9)]).lines(), sep="\\n")
    2 x layer 0
    1 x layer 1
    2 s per micro-batch, with data parallelism alone 12 s; 2 in flight per replica of the first stage
    """
    n = len(seconds)
    if not n or not len(weights) == len(activations) == n:
        raise UsageError(f"pipedream_partition: {n} times, {len(weights)} sizes of weights and {len(activations)} of "
                         "activations.\n  Give one of each for every layer.")
    if wrong := [value for value in (*seconds, *weights, *activations) if not 0 <= value < inf]:
        raise UsageError(f"pipedream_partition: {wrong[0]} is no time or size.\n  Give numbers from 0.")
    if not levels or any(ranks < 1 or bandwidth <= 0 for ranks, bandwidth in levels):
        raise UsageError(f"pipedream_partition: levels = {list(levels)!r}.\n  Give the ranks, from 1, and the "
                         "bandwidth of each, such as [(8, 400e9), (4, 50e9)].")
    spans = [(i, j) for j in range(n) for i in range(j, -1, -1)]
    ends = [0.0, *accumulate(weights)]
    best: dict[tuple[int, int], tuple[float, tuple[tuple[range, int], ...]]] = {
        (i, j): (sum(seconds[i : j + 1]), ((range(i, j + 1), 1),)) for i, j in spans
    }
    alone = best[0, n - 1][0]
    for ranks, bandwidth in levels:
        one = {
            (i, j, m): (max(best[i, j][0], 2 * (m - 1) * (ends[j + 1] - ends[i]) / bandwidth) / m,
                        tuple((layers, m * replicas) for layers, replicas in best[i, j][1]))
            for i, j in spans for m in range(1, ranks + 1)
        }  # fmt: skip
        found = dict(one)
        for i, j in spans:
            for m in range(2, ranks + 1):
                found[i, j, m] = min(
                    [one[i, j, m]] + [
                        (max(found[i, s, m - last][0], 2 * activations[s] / bandwidth, one[s + 1, j, last][0]),
                         found[i, s, m - last][1] + one[s + 1, j, last][1])
                        for s in range(i, j) for last in range(1, m)
                    ], key=lambda each: (each[0], len(each[1])),
                )  # fmt: skip
        best = {(i, j): found[i, j, ranks] for i, j in spans}
        alone = max(alone, 2 * (ranks - 1) * ends[n] / bandwidth) / ranks
    period, stages = best[0, n - 1]
    return PipeDreamPartition(stages, period, alone)
