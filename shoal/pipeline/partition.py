"""Assignment of layers to pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

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
