"""Bytes that come and go while a backward runs: what is alive at its worst time besides what forwards have kept.

Autograd frees what a forward kept as soon as its gradient is made, so a backward needs most at one of a few moments:
in the loss; in the feed-forward block of the last layer, whose gradients are the widest, while all below it is still
kept; or at the very end, in the embedding. Each is written down here as the engine makes it: the gradients that are
alive, less what was kept and is gone. In 16 bits a weight's gradient has memory of its own before it is added
(`shoal.parallel.weight`); over tp it waits until the sum of its input's gradient is on its way (`Postponed`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shoal.cost import activations
from shoal.cost.activations import Pass
from shoal.cost.parameters import StagePart

Where = Literal["head", "layer", "end"]


class Moment(NamedTuple):
    """A time of a backward on a stage.

    Attributes:
        where: in the loss and the output matrix, in the last layer, or in the first unit.
        bytes: alive besides all that the forward kept of the micro-batch; negative where much of it is gone.
        reducing: whether this unit's whole gradients have memory yet.
    """

    where: Where
    bytes: int
    reducing: bool = True


def moments(run: Pass, part: StagePart, *, alone: bool, block: tuple[int, int] | None = None) -> list[Moment]:
    """The times at which a backward of one micro-batch may need most.

    Args:
        alone: the stage is all of the pipeline: no gradient comes from another, and none goes there.
        block: `in_block` of the run, where that is known.
    """
    found, gone = [Moment("head", 0, reducing=False)], 0  # the forward has just ended
    passing = run.itemsize * run.tokens_here * run.hidden_here
    # A gradient that has come, one that has gone, and a message that is yet to come.
    between = 0 if alone else ((not part.last) + (not part.first) + 1) * passing
    if part.last:
        rows = -(-run.shape.vocab // run.layout.tp)
        gone = activations.total(activations.head(run))
        found += [Moment("head", between + _loss(run, rows), reducing=False),
                  Moment("head", between + _output(run, rows))]  # fmt: skip
    if part.layers:
        waiting, making = block or in_block(run)
        gradient = between + (passing if part.last else 0) - gone  # of the layer's output: elsewhere it has come
        found += [Moment("layer", gradient + waiting, reducing=False), Moment("layer", gradient + making)]
    if part.first:
        whole = activations.stage(run, part.layers, first=True, last=part.last)
        rows = -(-run.shape.vocab // run.layout.tp)
        looked_up = run.itemsize * rows * run.shape.hidden if run.itemsize < 4 else 0
        masked = passing if run.layout.tp > 1 else 0
        found.append(Moment("end", between + passing + masked + looked_up - activations.total(whole)))
    return found


def _loss(run: Pass, rows: int) -> int:
    """Two gradients of the logits besides the probabilities; over tp the loss works in place, but for a cast."""
    if run.layout.tp == 1:
        return 2 * run.exact * run.tokens * rows
    return (run.itemsize if run.itemsize < run.exact else 0) * run.tokens * rows


def _output(run: Pass, rows: int) -> int:
    """The output matrix: its gradient, and that of its input; the probabilities are gone."""
    e, n, h = run.itemsize, run.tokens, run.shape.hidden
    weight = e * rows * h if e < 4 else 0
    return (e - run.exact) * n * rows + e * n * h + weight + (e * n * h if run.layout.sequence_parallel else 0)


def in_block(run: Pass) -> tuple[int, int]:
    """Bytes in the feed-forward block of one layer, with what is computed again: before any gradient of a weight is
    made, and from then on."""
    shape, t, e, n = run.shape, run.layout.tp, run.itemsize, run.tokens
    wide, hidden, narrow = e * n * (shape.ffn // t), e * n * shape.hidden, e < 4
    matrix = e * shape.hidden * (shape.ffn // t) if narrow else 0
    here = e * run.tokens_here * shape.hidden
    gated = shape.family == "llama"
    into, again = matrix * (2 if gated else 1), activations.recomputed(run)
    if t == 1:  # into the last matrix; through what is between; into the first ones, side by side
        times = [wide + matrix, 2 * wide if gated else wide, hidden + into if gated else hidden + into - wide]
        return again, max(times) + again
    whole = hidden if run.layout.sequence_parallel else 0  # the gradient of the output, gathered
    scattered = hidden + here if whole else 0
    waiting = [
        2 * whole, whole + wide, whole + (3 if gated else 2) * wide, whole + hidden + wide * gated,
        whole + hidden - wide * gated + scattered,
    ]
    making = whole + hidden - wide * gated + max(matrix, into) + min(scattered, here)
    # A bias that is added behind the sum has its gradient first of all.
    return max(waiting) + again, (making if gated else max(*waiting, making)) + again
