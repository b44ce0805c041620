"""Bytes that come and go while a pass runs: what is alive at its worst time besides what forwards have kept.

Autograd frees what a forward kept as soon as its gradient is made, so a backward needs most at one of a few moments:
in the loss; in the feed-forward block of the last layer, whose gradients are the widest, while all below it is still
kept; or at the very end, in the embedding. Each is written down here as the engine makes it: the gradients that are
alive, less what was kept and is gone. Experts are wide, too, and their rows travel: a layer with some may need most in
its forward, in the experts, or behind them, where the gradients of its other matrices are made. In 16 bits a weight's
gradient has memory of its own before it is added (`shoal.engine.parallel.weight_grad`); over tp it waits until the sum
of its input's gradient is on its way (`GradSink.flush`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shoal.planning.cost.context import kv_heads
from shoal.planning.cost.experts import routed_rows
from shoal.planning.cost.memory import activations, between_backward_halves
from shoal.planning.cost.memory.transient import ALL, COMPLETE, MAKING, REST, SHARED, WAITING
from shoal.planning.cost.micro_batch import MicroBatch, once
from shoal.planning.cost.optional_parts import experts_of
from shoal.planning.cost.parameters import StagePart
from shoal.spec.layout import Layout

Where = Literal["loss", "head", "layer", "end"]
Half = Literal["whole", "input", "weight", "forward"]
PASSES: tuple[Half, ...] = ("whole", "input", "weight", "forward")
"""A backward, the halves of one that a schedule splits, and a forward, as it ends."""


class Moment(NamedTuple):
    """A time of a pass on a stage.

    Attributes:
        where: in the loss, whose unit is gathered behind it if it is not there; in the output matrix, in a layer, or in
            the first unit.
        bytes: alive besides what was kept of the micro-batch when the pass began; negative where much of that is gone.
        time: of this unit (`shoal.planning.cost.memory.transient`), which says what is whole.
        sparse: of a layer: it has experts.
        done: of a layer: how many above it on the stage are over.
    """

    where: Where
    bytes: int
    time: int = WAITING
    sparse: bool = False
    done: int = 0


def moments(run: MicroBatch, part: StagePart, kind: Half = "whole") -> list[Moment]:
    """The times at which a pass of one micro-batch may need most, other messages of its rank left out."""
    passing = run.itemsize * run.tokens_here * run.hidden_here
    rows, h, whole = -(-run.shape.vocab // run.layout.tp), run.shape.hidden, kind == "whole"
    come = 0 if part.last else passing  # a gradient, which the first half uses up
    table = run.itemsize * rows * h if run.itemsize < 4 else 0  # a gradient before it is added
    places = [run.shape.sparse(layer) for layer in reversed(part.layers)]
    # The layer of each kind that most is below of; a half may leave more than was kept, so that the first counts, too.
    ends = {sparse: (places.index(sparse), len(places) - 1 - places[::-1].index(sparse)) for sparse in set(places)}
    layers = {(sparse, done) for sparse, of_kind in ends.items() for done in of_kind[: 2 - whole]}
    if kind == "weight":  # all that is needed is there, and stays until the end
        found = [Moment("layer", more, time, sparse, done) for sparse, done in layers
                 for more, time in in_block(run, sparse, kind, part.last)]  # fmt: skip
        head, end = _both("head", table, 0), _both("end", table, 0)
        return found + head * part.last + end * part.first
    kept = activations.total(activations.head(run)) if part.last else 0
    if kind == "forward":  # as it ends, and before, less what it makes behind a layer
        inside = {sparse: _forward(run, sparse) - (kept if part.last else passing) for sparse in ends}
        return [Moment("head", 0)] + [
            Moment("layer", inside[sparse] - above(run, part, done), WAITING, sparse, done)
            for sparse, done in layers if inside[sparse] > 0
        ]  # fmt: skip
    found, gone = [], 0
    if part.last:
        gone = kept - (0 if whole else between_backward_halves.head(run))
        making = come + _output(run, rows)
        # A matrix that another stage has as well is reduced by itself, as soon as its gradient is made.
        complete = making if run.shape.tied and not part.first else come + 2 * passing - gone
        found.append(Moment("loss", come + _loss(run, rows)))
        found += _both("head", making + table, complete) if whole else [Moment("head", making)]
    for sparse, done in layers:
        gradient = come + (passing if part.last else 0) - gone - above(run, part, done, kind)
        found += [Moment("layer", gradient + more, time, sparse, done)
                  for more, time in in_block(run, sparse, kind, part.last)]  # fmt: skip
    if part.first:
        kept = activations.total(activations.stage(run, part.layers, first=True, last=part.last))
        kept -= 0 if whole else between_backward_halves.between(run, part)
        masked = passing if run.layout.tp > 1 else 0
        making = come + passing + masked + table * whole - kept
        found += _both("end", making, come + passing - kept) if whole else [Moment("end", making)]
    return found


def _both(where: Where, making: int, complete: int) -> list[Moment]:
    return [Moment(where, making, MAKING), Moment(where, complete, COMPLETE)]


def above(run: MicroBatch, part: StagePart, done: int, kind: Half = "whole") -> int:
    """Bytes that the last so many layers of a stage had kept and have let go of; less what they leave to the second
    half of a backward, after the first."""
    if not done or kind == "weight":
        return 0
    layers = part.layers[len(part.layers) - done :]
    left = between_backward_halves.between(run, StagePart(layers, first=False, last=False)) if kind == "input" else 0
    return activations.of_layers(run, layers) - left


def _loss(run: MicroBatch, rows: int) -> int:
    """The loss works in place, but for a cast of its gradient."""
    return (run.itemsize if run.itemsize < run.exact else 0) * run.tokens * rows


def _output(run: MicroBatch, rows: int) -> int:
    """The output matrix's gradient of its input; the probabilities are gone."""
    e, n, h = run.itemsize, run.tokens, run.shape.hidden
    return (e - run.exact) * n * rows + e * n * h + _copied(run)


Block = list[tuple[int, int]]
"""Bytes and times (`shoal.planning.cost.memory.transient`)."""


@once
def in_block(run: MicroBatch, sparse: bool, kind: Half = "whole", last: bool = False) -> Block:
    """Bytes in a layer, at its times, with what is computed again: in its feed-forward block but for the last ones.

    Args:
        last: the gradient that enters it is autograd's alone, and so is gone with the block.
    """
    if not sparse:
        waiting, making = _in_dense(run, kind, run.shape.ffn)
        if kind == "weight":
            return [(making, MAKING), (0, COMPLETE)]
        again, gone = activations.recomputed(run, sparse), _here(run) * last
        if run.layout.cp > 1:
            making = max(making, _round_ring(run, sparse, kind) - gone)
        if kind == "input":
            return [(max(making + again, _entry(run, sparse) - gone), WAITING)]
        return [(waiting + again, WAITING), (making + again, MAKING), (_over(run, sparse), COMPLETE)]
    return _in_experts(run, kind, last)


def _here(run: MicroBatch) -> int:
    """One tensor between layers."""
    return run.itemsize * run.tokens_here * run.hidden_here


def _copied(run: MicroBatch) -> int:
    """Of a tensor of whole sequences that ranks of tp gather, or sum and cut: several are put in the order of ranks."""
    several = run.layout.sequence_parallel and run.layout.micro_batch > 1
    return run.itemsize * run.tokens * run.shape.hidden if several else 0


def _over(run: MicroBatch, sparse: bool) -> int:
    """At the end of a layer's backward."""
    return _here(run) - activations.total(activations.layer(run, sparse=sparse))


def _entry(run: MicroBatch, sparse: bool) -> int:
    """In the first half of a layer's backward, as it comes to attention's input: all that it leaves is there."""
    shape, layout, e, n = run.shape, run.layout, run.itemsize, run.tokens
    here, hidden = _here(run), e * n * shape.hidden
    # The gradients of queries, keys and values were put together for one product; for biases (gpt) they stay, too.
    joined = shape.family == "llama" and layout.tp_y <= shape.kv_heads and layout.tp_x == 1
    apart = e * n * shape.head_dim * (shape.heads + 2 * shape.kv_heads) // layout.tp * joined
    summed = _copied(run) + here * layout.sequence_parallel  # over tp
    # The norm's input; and the residual stream's gradient, where that of attention's output is another one.
    beside = here + here * layout.sequence_parallel
    left = between_backward_halves.layer(run, sparse) + beside + hidden + max(apart, summed)
    return left - activations.total(activations.layer(run, sparse=sparse))


def _in_dense(run: MicroBatch, kind: Half, ffn: int) -> tuple[int, int]:
    """In a dense block, before any gradient of a weight is made, and from then on.

    Args:
        ffn: its width.
    """
    shape, t, e, n = run.shape, run.layout.tp, run.itemsize, run.tokens
    wide, hidden = e * n * (ffn // t), e * n * shape.hidden
    gated = shape.family == "llama"
    matrix = e * shape.hidden * (ffn // t) if e < 4 else 0
    into = matrix * (2 if gated else 1)
    if kind == "weight":
        return 0, max(matrix, into)
    if kind == "input":  # the input of the last matrix stays
        matrix = into = 0
    here = e * run.tokens_here * shape.hidden
    stays = wide * (kind == "input")
    if t == 1:  # into the last matrix; through what is between; into the first ones, side by side
        first = hidden + into if gated else hidden + into - wide
        times = [wide + matrix, (2 * wide if gated else wide) + stays, first + stays]
        return 0, max(times)
    whole = hidden if run.layout.sequence_parallel else 0  # the gradient of the output, gathered
    scattered = _copied(run) + here if whole else 0
    waiting = [
        whole + _copied(run), whole + wide, whole + (3 if gated else 2) * wide, whole + hidden + wide * gated,
        whole + hidden - wide * gated + scattered + (wide * (1 + gated) if stays else 0),
    ]
    making = whole + hidden - wide * gated + max(matrix, into) + min(scattered, here)
    if kind == "input":
        return max(waiting), max(waiting)
    # A bias that is added behind the sum has its gradient first of all.
    return max(waiting), making if gated else max(*waiting, making)


def _round_ring(run: MicroBatch, sparse: bool, kind: Half) -> int:
    """In attention's backward round a ring, where all behind it in the layer is gone.

    The gradients of the output and of the queries are there, and those of blocks: of this place's, of the block whose
    keys are here, and of those before it, on their way to the next place and from the one before
    (`shoal.engine.parallel.context.ring`).
    """
    layout, shape, e, n = run.layout, run.shape, run.itemsize, run.tokens
    q, kv = n * shape.head_dim * shape.heads // layout.tp, n * shape.head_dim * kv_heads(shape, layout)
    copies = 0 if q == kv else 2 * e * (q + kv)  # of keys and values for each query head; their gradients' sums
    seen = q // 2 if layout.cp_order == "zig-zag" else q  # queries of the first place, behind the others' keys
    steps = [2 * e * kv * (layout.ring > 1) + 3 * e * q]  # with its own block, while the next one comes
    for step in range(1, min(layout.ring, 3)):
        blocks, gradients = 1 + (step < layout.ring - 1), 1 if step == 1 else 3
        steps.append(2 * kv * (e * blocks + run.exact * gradients) + e * (seen + 2 * q))
    # As it came, and with heads before tokens; over several ranks as these exchanged it, and what went is gone.
    output = 2 * e * q if layout.ulysses == 1 else e * q * (kind == "input")
    found = _here(run) + output + run.exact * (q + 2 * kv) + max(steps) + copies
    if layout.recompute == "selective":  # what was kept of the core is beside what it makes again
        found += e * (q + n * shape.head_dim * shape.kv_heads // min(layout.tp_y, shape.kv_heads) * 2)
    left = between_backward_halves.behind_attention(run, sparse) if kind == "input" else 0
    return found + left - activations.total(activations.behind_attention(run, sparse))


class _Rows(NamedTuple):
    """Bytes of one tensor each, in a layer with experts.

    Attributes:
        own: [n, h] of the tokens that the rank routes.
        sent, here: [m, h] of the rows that it has for experts, and of those that its experts compute.
        wide: [m, f] inside these.
        come, gathered: of the rows, those that come from other ranks of ep and of etp.
    """

    own: int
    sent: int
    here: int
    wide: int
    come: int
    gathered: int

    @staticmethod
    def of(run: MicroBatch) -> _Rows:
        """Of a pass."""
        shape, layout, rows = run.shape, run.layout, routed_rows(run.shape, run.layout, run.s)
        row, wide = run.itemsize * shape.hidden, run.itemsize * (experts_of(shape).ffn // layout.expert_tensor)
        return _Rows(
            rows.own * row, rows.sent * row, rows.here * row, rows.here * wide, int(rows.away * row),
            rows.gathered * row,
        )  # fmt: skip

    def exchanged(self, layout: Layout) -> int:
        """Most that is there as rows go one way, over ep and then over etp: in pieces, and put together; the rows that
        went are there, too."""
        to_rank = self.sent + self.come + self.sent if layout.ep > 1 else 0
        to_expert = self.sent + self.gathered + self.here if layout.expert_tensor > 1 else 0
        return max(to_rank, to_expert, 2 * self.here if to_rank or to_expert else 0)  # and in another order


def _forward(run: MicroBatch, sparse: bool) -> int:
    """In the forward of a layer, besides what it keeps; where that is its input alone, names hold the rest."""
    here = _here(run)
    if run.layout.recompute != "full":
        return _routed(run) - _of_shared(run) if sparse else here + max(here, _summed(run))  # what it adds, and the sum
    if not sparse:
        return 2 * here + _through(run, run.shape.ffn)  # behind attention, and its norm
    rows, gated = _Rows.of(run), run.shape.family == "llama"
    inside = 2 * rows.here + (2 if gated else 1) * rows.wide
    routed = max(_routed(run), rows.sent + max(rows.exchanged(run.layout), inside))
    of = experts_of(run.shape)
    return 2 * here + max(routed, here + _through(run, of.shared * of.ffn) if of.shared else 0)


def _through(run: MicroBatch, ffn: int) -> int:
    """Bytes in the forward of a feed-forward block of which nothing is kept.

    Args:
        ffn: its width.
    """
    hidden, wide = (run.itemsize * run.tokens * width for width in (run.shape.hidden, ffn // run.layout.tp))
    gated, gathered = run.shape.family == "llama", run.layout.sequence_parallel
    first = hidden * gathered + wide * (1 + gated)  # its input and the first products
    between = (4 if gated else 2) * wide
    biased = run.layout.tp > 1 and not gated  # after the sum
    output = _summed(run) + _here(run) if gathered else hidden + _here(run) * biased
    return max(first, between, (3 if gated else 1) * wide + output)


def _summed(run: MicroBatch) -> int:
    """Where tp has parts of the sequence, a block's output before it is summed and cut."""
    return run.itemsize * run.tokens * run.shape.hidden + _copied(run) if run.layout.sequence_parallel else 0


def _routed(run: MicroBatch) -> int:
    """In the forward of a layer with experts, besides all that autograd keeps: as results come back from the experts,
    where the rows that went are still there, and as the ranks of tp put their tokens together."""
    rows, layout = _Rows.of(run), run.layout
    weighted = rows.sent + rows.own
    back = 2 * rows.sent + rows.come if layout.ep > 1 else 0
    if layout.expert_tensor > 1:
        back = max(back, 2 * rows.here + rows.gathered)
    whole = rows.own + 2 * run.itemsize * run.tokens * run.shape.hidden if _in_parts(run) else 0
    return max(weighted, back, whole)


def _in_parts(run: MicroBatch) -> bool:
    """Whether the ranks of tp have the same tokens and route a part each."""
    return run.layout.tp > 1 and not run.layout.sequence_parallel


def _of_shared(run: MicroBatch) -> int:
    return activations.total(activations.shared(run))


def _in_experts(run: MicroBatch, kind: Half, last: bool) -> Block:
    """With experts, which are gone through one after the other; shared ones come before in backward."""
    shape, layout, e, experts = run.shape, run.layout, run.itemsize, experts_of(run.shape)
    own, sent, here, wide, *_ = rows = _Rows.of(run)
    gated, shared = shape.family == "llama", experts.shared * experts.ffn
    matrix = e * shape.hidden * (experts.ffn // layout.expert_tensor) if e < 4 else 0
    y, heads = layout.tp_y, shape.head_dim * (shape.heads // layout.tp_y)
    keys = shape.head_dim * (shape.kv_heads // min(y, shape.kv_heads))
    joined = e * shape.hidden * (heads + 2 * keys) if e < 4 else 0  # of attention's projections
    if kind == "weight":
        most = max(matrix, _in_dense(run, kind, shared)[1] if shared else 0)
        return [(most, MAKING), (0, COMPLETE), (joined, REST), (0, ALL)]
    again, halved = activations.recomputed(run, True), kind == "input"
    full = again if layout.recompute == "full" else 0
    # A shared block's backward comes first, and over tp has gathered the gradient of what comes out of it.
    summed = e * run.tokens * shape.hidden if shared and layout.sequence_parallel else 0
    found: Block = [(full + summed + _routed(run) - _of_shared(run), WAITING)] if full else []
    before = 0
    if shared:
        first, then = _in_dense(run, kind, shared)
        found += [(again + first, WAITING), (again + then, WAITING if halved else SHARED)]
        left = activations.total(between_backward_halves.block(run, shared)) if halved else 0
        before = e * run.tokens_here * shape.hidden + left - _of_shared(run)
    arriving = rows.exchanged(layout)
    back = max(arriving, 2 * here + rows.gathered if layout.expert_tensor > 1 else 0)  # their gradients' way back
    waiting = [2 * sent + own * _in_parts(run), arriving - sent]
    if halved:  # both factors of each weight's gradient stay
        inside = [here + wide, here + (3 if gated else 2) * wide, (3 * here - wide) if gated else 2 * here]
        waiting += [time - sent for time in inside]
        leaving = here - wide * gated + back - sent  # when the experts' parameters are needed no more
        rest = max(again + before + leaving, _entry(run, True) - _here(run) * last)
        return [*found, (again + before + max(waiting), WAITING), (rest, REST)]
    making = [here + wide + matrix, 2 * wide if gated else wide, 2 * here - 3 * wide + matrix if gated
              else here - wide + matrix]  # fmt: skip
    complete = max(2 * here - 3 * wide if gated else here - wide, back - here - (4 if gated else 2) * wide)
    block = activations.total(activations.experts(run))
    attention = e * run.tokens * (2 * heads + 2 * keys) + e * run.tokens_here * shape.hidden + joined
    rest = attention - block
    if layout.cp > 1:
        rest = max(rest, _round_ring(run, True, kind) - _here(run) * last)
    return [
        *found, (again + before + max(waiting), SHARED), (again + before - sent + max(making), MAKING),
        (again + before - sent + complete, COMPLETE), (again + rest, REST), (_over(run, True), ALL),
    ]
