"""Bytes that come and go while a backward runs: what is alive at its worst time besides what forwards have kept.

Autograd frees what a forward kept as soon as its gradient is made, so a backward needs most at one of a few moments:
in the loss; in the feed-forward block of the last layer, whose gradients are the widest, while all below it is still
kept; or at the very end, in the embedding. Each is written down here as the engine makes it: the gradients that are
alive, less what was kept and is gone. In 16 bits a weight's gradient has memory of its own before it is added
(`shoal.parallel.weight`); over tp it waits until the sum of its input's gradient is on its way (`Postponed`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shoal.cost import activations, halves
from shoal.cost.activations import Pass
from shoal.cost.experts import routed_rows
from shoal.cost.parameters import StagePart

Where = Literal["head", "layer", "first", "end"]
Half = Literal["whole", "input", "weight"]
PASSES: tuple[Half, ...] = ("whole", "input", "weight")
"""A backward, and the halves of one that a schedule splits."""


class Moment(NamedTuple):
    """A time of a backward on a stage.

    Attributes:
        where: in the loss and the output matrix, in the last layer, in the first, or in the first unit.
        bytes: alive besides what was kept of the micro-batch when the pass began; negative where much of that is gone.
        reducing: whether this unit's whole gradients have memory yet.
    """

    where: Where
    bytes: int
    reducing: bool = True


def moments(
    run: Pass, part: StagePart, kind: Half = "whole", *, alone: bool, block: tuple[int, int] | None = None
) -> list[Moment]:
    """The times at which a backward of one micro-batch, or a half of it, may need most.

    Args:
        alone: the stage is all of the pipeline: no gradient comes from another, and none goes there.
        block: `in_block` of the stage, where that is known.
    """
    passing = run.itemsize * run.tokens_here * run.hidden_here
    # A gradient that has come, one that has gone, and a message that is yet to come.
    between = 0 if alone else ((not part.last) + (not part.first) + 1) * passing
    rows, h, whole = -(-run.shape.vocab // run.layout.tp), run.shape.hidden, kind == "whole"
    table = run.itemsize * rows * h if run.itemsize < 4 else 0  # a gradient before it is added
    waiting, making = block or in_block(run, part, kind)
    if kind == "weight":  # all that is needed is there, and stays until the end
        found = [Moment("layer", between + making), Moment("first", between + making)] if part.layers else []
        found += [Moment("head", between + table)] if part.last else []
        return found + ([Moment("end", between + table)] if part.first else [])
    found, gone = [Moment("head", 0, reducing=False)], 0  # the forward has just ended
    if part.last:
        gone = activations.total(activations.head(run)) - (0 if whole else halves.head(run))
        found += [Moment("head", between + _loss(run, rows), reducing=False),
                  Moment("head", between + _output(run, rows) + table * whole, reducing=whole)]  # fmt: skip
    if part.layers:
        gradient = between + (passing if part.last else 0) - gone  # of the layer's output: elsewhere it has come
        found += [Moment("layer", gradient + waiting, reducing=False), Moment("layer", gradient + making, whole)]
        if not whole:  # each layer may leave more than it had kept, so that the first has most behind it
            every = StagePart(part.layers, first=False, last=False)
            left = halves.between(run, every) - activations.of_layers(run, part.layers)
            above = left * (len(part.layers) - 1) // len(part.layers)
            found.append(Moment("first", gradient + waiting + above, reducing=False))
    if part.first:
        kept = activations.total(activations.stage(run, part.layers, first=True, last=part.last))
        kept -= 0 if whole else halves.between(run, part)
        masked = passing if run.layout.tp > 1 else 0
        found.append(Moment("end", between + passing + masked + table * whole - kept, whole))
    return found


def _loss(run: Pass, rows: int) -> int:
    """Two gradients of the logits besides the probabilities; over tp the loss works in place, but for a cast."""
    if run.layout.tp == 1:
        return 2 * run.exact * run.tokens * rows
    return (run.itemsize if run.itemsize < run.exact else 0) * run.tokens * rows


def _output(run: Pass, rows: int) -> int:
    """The output matrix's gradient of its input; the probabilities are gone."""
    e, n, h = run.itemsize, run.tokens, run.shape.hidden
    return (e - run.exact) * n * rows + e * n * h + (e * n * h if run.layout.sequence_parallel else 0)


def in_block(run: Pass, part: StagePart, kind: Half = "whole") -> tuple[int, int]:
    """Bytes in the feed-forward block of one of a stage's layers, the one that needs more, with what is computed again:
    before any gradient of a weight is made, and from then on."""
    blocks = {_in_experts if run.shape.sparse(layer) else _in_dense for layer in part.layers}
    both = [block(run, kind) for block in blocks] or [(0, 0)]
    return max(waiting for waiting, _ in both), max(making for _, making in both)


def _in_dense(run: Pass, kind: Half) -> tuple[int, int]:
    shape, t, e, n = run.shape, run.layout.tp, run.itemsize, run.tokens
    wide, hidden = e * n * (shape.ffn // t), e * n * shape.hidden
    gated = shape.family == "llama"
    matrix = e * shape.hidden * (shape.ffn // t) if e < 4 else 0
    into = matrix * (2 if gated else 1)
    if kind == "weight":
        return 0, max(matrix, into)
    if kind == "input":  # the input of the last matrix stays
        matrix = into = 0
    here = e * run.tokens_here * shape.hidden
    again, stays = activations.recomputed(run), wide * (kind == "input")
    if t == 1:  # into the last matrix; through what is between; into the first ones, side by side
        first = hidden + into if gated else hidden + into - wide
        times = [wide + matrix, (2 * wide if gated else wide) + stays, first + stays]
        return again, max(times) + again
    whole = hidden if run.layout.sequence_parallel else 0  # the gradient of the output, gathered
    scattered = hidden + here if whole else 0
    waiting = [
        2 * whole, whole + wide, whole + (3 if gated else 2) * wide, whole + hidden + wide * gated,
        whole + hidden - wide * gated + scattered + (wide * (1 + gated) if stays else 0),
    ]
    making = whole + hidden - wide * gated + max(matrix, into) + min(scattered, here)
    if kind == "input":
        return max(waiting) + again, max(waiting) + again
    # A bias that is added behind the sum has its gradient first of all.
    return max(waiting) + again, (making if gated else max(*waiting, making)) + again


def _in_experts(run: Pass, kind: Half) -> tuple[int, int]:
    """With experts, which are gone through one after the other; shared ones come before in backward."""
    shape, layout, e, rows = run.shape, run.layout, run.itemsize, routed_rows(run.shape, run.layout, run.s)
    wide, hidden = e * rows.here * (shape.experts.ffn // layout.expert_tensor), e * rows.here * shape.hidden
    results, gated = e * rows.sent * shape.hidden, shape.family == "llama"
    matrix = e * shape.hidden * (shape.experts.ffn // layout.expert_tensor) if e < 4 else 0
    if kind == "weight":
        return 0, matrix
    again, stays = activations.recomputed(run), (wide + hidden) * (kind == "input")
    matrix *= kind == "whole"
    moved = 2 * hidden if layout.ep * layout.expert_tensor > 1 else 0
    times = [moved + wide + matrix, (2 if gated else 1) * wide + stays - results * (kind == "whole")]
    return again + moved + hidden, max(moved + hidden, *times) + again
