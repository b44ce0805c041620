"""FLOPs that one rank does in a step: the matrix products of its stages, as the engine makes them.

The whole model's, by one definition, are in `shoal.cost.flops`; a rank's differ by what it pads (a vocabulary that tp
does not divide), what several ranks do alike (key/value heads, where tp exceeds their number), and what it computes
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shoal.cost.activations import Pass, blocks
from shoal.cost.parameters import StagePart


def layer_forward(run: Pass, slices: Sequence[int] = ()) -> tuple[int, int, int]:
    """One layer's forward of one micro-batch on one rank: projections in and out of attention, its core, the MLP.

    Scores are counted in full, but for blocks that only later tokens see, where attention is written out.

    Args:
        slices: tokens of each, where sequences come in slices that see those before them.
    """
    shape, t, y, n = run.shape, run.layout.tp, run.layout.tp_y, run.tokens
    q = shape.heads * shape.head_dim // t
    kv = shape.kv_heads * shape.head_dim // min(y, shape.kv_heads)  # of tp_x ranks together
    matrices = 3 if shape.family == "llama" else 2
    scores = sum(rows * seen for part in _scored(run, slices) for rows, seen in part)
    core = 4 * run.layout.micro_batch * scores * q
    projections = 2 * n * (shape.hidden * 2 * q + run.hidden_here * 2 * kv)
    return projections, core, 2 * n * shape.hidden * matrices * (shape.ffn // t)


def _scored(run: Pass, slices: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each slice, its blocks: (queries, keys)."""
    parts = list(slices) or [run.s]
    starts = accumulate(parts, initial=0)
    if run.kernel == "sdpa":
        return [[(part, start + part)] for start, part in zip(starts, parts, strict=False)]
    return [[(rows, start + seen) for rows, seen in blocks(part)] for start, part in zip(starts, parts, strict=False)]


def stage_flops(run: Pass, part: StagePart, slices: Sequence[int] = ()) -> int:
    """A stage's forward and backward of one micro-batch on one rank.

    A backward is two forwards. Attention that is computed again stops where nothing more is needed: if it is written
    out, before its last product.
    """
    shape, some = run.shape, sum(map(run.shape.skips, part.layers))
    head = 2 * run.tokens * shape.hidden * -(-shape.vocab // run.layout.tp) if part.last else 0
    layers = (len(part.layers) - some) * _layer(run, slices)
    if some:
        # Of the predictor, whose input learns nothing from it; what is a matrix times a vector is not counted.
        up = 2 * run.tokens_here * shape.hidden * shape.depths.predictor
        routing = (3 if run.layout.recompute == "full" else 2) * up
        layers += some * (_layer(run._replace(s=shape.depths.taken(run.s))) + routing)
    return layers + 3 * head


def _layer(run: Pass, slices: Sequence[int] = ()) -> int:
    """A layer's forward and backward, with what is computed again."""
    projections, core, mlp = layer_forward(run, slices)
    core_again = core
    if run.kernel == "explicit":
        width = run.layout.micro_batch * run.shape.heads * run.shape.head_dim // run.layout.tp
        core_again -= 2 * width * sum(rows * seen for rows, seen in (part[-1] for part in _scored(run, slices)))
    again = {"none": 0, "selective": core_again, "full": projections + core + mlp}[run.layout.recompute]
    return 3 * (projections + core + mlp) + again


def step_flops(
    run: Pass, parts: Sequence[StagePart], microbatches: Sequence[int], slices: Sequence[int] = ()
) -> int:
    """A rank's in a step.

    Args:
        parts: its stages.
        microbatches: that pass through each of them.
        slices: as of `layer_forward`.

    Raises:
        ValueError: with context parallelism, whose ranks compute what their order of chunks gives them, or experts,
            which compute what is routed to them.
    """
    if run.layout.cp > 1 or run.shape.experts:
        raise ValueError("there is no formula for one rank's FLOPs under context parallelism or with experts")
    return sum(count * stage_flops(run, part, slices) for part, count in zip(parts, microbatches, strict=True))
