"""Transient bytes during a pass: the peak beyond the activations saved by forwards.

Autograd frees a saved tensor when its gradient is computed, so the peak of a backward is at one of a few moments: in
the loss; in the feed-forward block of the last layer, whose gradients are the widest while everything below is still
saved; or at the very end, in the embedding. Each moment follows the engine: the gradients that are alive, less the
saved tensors already freed. Experts are wide as well, and their rows are communicated: an expert layer may peak in its
forward, in the experts, or after them, when the gradients of its other matrices are computed. In 16 bits a weight
gradient has its own memory before it is added (`shoal.engine.parallel.weight_grad`). Over tp it waits until the sum of
the input gradient has started (`GradSink.flush`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shoal.planning.cost.memory import activations, between_backward_halves
from shoal.planning.cost.memory.latent_attention import Widths
from shoal.planning.cost.memory.saved import find_format, gathers_again, into_block
from shoal.planning.cost.memory.transient import ALL, COMPLETE, MAKING, REST, SHARED, WAITING
from shoal.planning.cost.micro_batch import MicroBatch, once
from shoal.planning.cost.parameters import StagePart
from shoal.spec.layout import Layout

Where = Literal["loss", "head", "layer", "end"]
Half = Literal["full", "input", "weight", "forward"]
PASSES: tuple[Half, ...] = ("full", "input", "weight", "forward")
"""Kinds of passes: a full backward, both halves of a split one, and a forward at its end."""


class Moment(NamedTuple):
    """A time of a pass on a stage at which memory may peak."""

    # the loss (after which its unit is gathered if necessary), the output matrix, a layer, or the first unit
    where: Where
    bytes: int  # bytes alive beyond the activations saved when the pass began; negative if many of those are freed
    # time of this unit (`shoal.planning.cost.memory.transient`), which determines the unsharded tensors
    time: int = WAITING
    sparse: bool = False  # for a layer: it has experts
    done: int = 0  # for a layer: number of finished layers above it on the stage


def moments(run: MicroBatch, part: StagePart, kind: Half = "full") -> list[Moment]:
    """Return the possible peaks of a pass of one micro-batch, without other messages of its rank."""
    passing, e, n = run.hidden_bytes, run.itemsize, run.tokens
    rows, h, full = run.shape.vocabulary_rows(run.layout.tp), run.shape.hidden, kind == "full"
    come = 0 if part.last else passing  # a gradient, consumed by the first half
    table = e * rows * h if e < 4 else 0  # a gradient, before it is added
    places = [run.shape.sparse(layer) for layer in reversed(part.layers)]
    # Per kind, the layer with the most layers below; a half may leave more than was saved, so the first counts too.
    ends = {
        sparse: (places.index(sparse), len(places) - 1 - places[::-1].index(sparse))
        for sparse in dict.fromkeys(places)
    }  # fmt: skip
    layers = dict.fromkeys((sparse, done) for sparse, of_kind in ends.items() for done in of_kind[: 2 - full])
    if kind == "weight":  # all inputs exist, and stay until the end
        found = [Moment("layer", more, time, sparse, done) for sparse, done in layers
                 for more, time in in_block(run, sparse, kind, part.last)]  # fmt: skip
        head, end = _both("head", table * (not run.fused), 0), _both("end", table, 0)
        return found + head * part.last + end * part.first
    kept = activations.total(activations.head(run)) if part.last else 0
    if kind == "forward":  # at its end; and before it, minus the layer's output
        inside = {sparse: _forward(run, sparse) - (kept if part.last else passing) for sparse in ends}
        return [Moment("head", 0)] + [
            Moment("layer", inside[sparse] - above(run, part, done), WAITING, sparse, done)
            for sparse, done in layers if inside[sparse] > 0
        ]  # fmt: skip
    found, gone = [], 0
    if part.last:
        gone = kept - (0 if full else between_backward_halves.head(run))
        # At the output matrix's input gradient, when the probabilities are freed; its input is gathered again.
        again = e * n * h + passing if gathers_again(run) else 0
        making = come + (e - run.logit) * n * rows + e * n * h + _copied(run) + again
        # A matrix shared with another stage is reduced separately, as soon as its gradient is computed.
        complete = making if run.shape.shares_ends and not part.first else come + 2 * passing - gone
        # The loss works in place except for a cast of its gradient.
        found.append(Moment("loss", come + (e if e < run.logit else 0) * n * rows))
        found += _both("head", making + table * (not run.fused), complete) if full else [Moment("head", making)]
    for sparse, done in layers:
        gradient = come + (passing if part.last else 0) - gone - above(run, part, done, kind)
        found += [Moment("layer", gradient + more, time, sparse, done)
                  for more, time in in_block(run, sparse, kind, part.last)]  # fmt: skip
    if part.first:
        kept = activations.total(activations.stage(run, part.layers, first=True, last=part.last))
        kept -= 0 if full else between_backward_halves.between(run, part)
        masked = passing if run.layout.tp > 1 else 0
        making = come + passing + masked + table * full - kept
        found += _both("end", making, come + passing - kept) if full else [Moment("end", making)]
    return found


def _both(where: Where, making: int, complete: int) -> list[Moment]:
    return [Moment(where, making, MAKING), Moment(where, complete, COMPLETE)]


def above(run: MicroBatch, part: StagePart, done: int, kind: Half = "full") -> int:
    """Return the bytes freed by the last ``done`` layers of a stage.

    For the first half of a backward, bytes left for the second half are subtracted.
    """
    if not done or kind == "weight":
        return 0
    layers = part.layers[len(part.layers) - done :]
    left = between_backward_halves.between(run, StagePart(layers, first=False, last=False)) if kind == "input" else 0
    return activations.total(activations.several(run, layers)) - left


Block = list[tuple[int, int]]
"""Bytes and times (`shoal.planning.cost.memory.transient`)."""


@once
def in_block(run: MicroBatch, sparse: bool, kind: Half = "full", last: bool = False) -> Block:
    """Return the bytes in a layer at its times, including recomputation; mostly in its feed-forward block.

    Args:
        last: autograd alone holds the incoming gradient, and frees it with the block.
    """
    if not sparse:
        waiting, making = _in_dense(run, kind, run.shape.ffn)
        if kind == "weight":
            return [(making, MAKING), (0, COMPLETE)]
        again, gone = activations.recomputed(run, sparse), run.hidden_bytes * last
        if run.layout.cp > 1:
            making = max(making, _round_ring(run, sparse, kind) - gone)
        elif run.shape.latent is not None:
            making = max(making, _in_latent_core(run, sparse, kind) - gone)
        if kind == "input":
            return [(max(making + again, _entry(run, sparse) - gone), WAITING)]
        return [(waiting + again, WAITING), (making + again, MAKING), (_over(run, sparse), COMPLETE)]
    return _in_experts(run, kind, last)


def _copied(run: MicroBatch) -> int:
    """Return the bytes of reordering several full sequences by tp rank, for a gather or a reduce-scatter."""
    several = run.layout.sequence_parallel and run.layout.micro_batch > 1
    return run.itemsize * run.tokens * run.shape.hidden if several else 0


def _over(run: MicroBatch, sparse: bool) -> int:
    """Return the bytes at the end of a layer's backward."""
    return run.hidden_bytes - activations.total(activations.layer(run, sparse=sparse))


def _entry(run: MicroBatch, sparse: bool) -> int:
    """Return the bytes at attention's input in the first half of a layer's backward, with all that it leaves."""
    shape, layout, e, n = run.shape, run.layout, run.itemsize, run.tokens
    local, hidden = run.hidden_bytes, e * n * shape.hidden
    if shape.latent is not None:  # the gradient of latents, concatenated, and of the tokens between regions
        left = activations.total(between_backward_halves.layer(run, sparse)) + 2 * local
        left += e * run.tokens_between * Widths.build(run).latents
        return left - activations.total(activations.layer(run, sparse=sparse))
    # Gradients of q, k and v were concatenated for one product; with biases (gpt) the parts stay, too.
    joined = run.gated and layout.tp_y <= shape.kv_heads and layout.tp_x == 1
    apart = e * n * shape.head_dim * (shape.heads + 2 * shape.kv_heads) // layout.tp * joined
    summed = _copied(run) + local * layout.sequence_parallel  # over tp
    # The norm's input; and the residual gradient, if separate from the gradient of attention's output.
    beside = local + local * layout.sequence_parallel
    left = activations.total(between_backward_halves.layer(run, sparse)) + beside + hidden + max(apart, summed)
    return left - activations.total(activations.layer(run, sparse=sparse))


def _in_dense(run: MicroBatch, kind: Half, ffn: int) -> tuple[int, int]:
    """Return the bytes in a dense block of width ``ffn`` before its first weight gradient, and from then on."""
    shape, t, e, n = run.shape, run.layout.tp, run.itemsize, run.tokens
    wide, hidden = e * n * (ffn // t), e * n * shape.hidden
    gated = run.gated and not run.joins_gate  # silu(gate) is another saved tensor, and gradients are concatenated
    matrix = e * shape.hidden * (ffn // t) * run.copies_gradients
    into = matrix * (2 if run.gated else 1)
    names = into_block(run, "layers.0.mlp")
    regathers, again, into_order = gathers_again(run, names), 0, 0  # the block's input, as received and in order
    if regathers:
        eight = find_format(run, names)
        again, into_order = (eight.codes(n * shape.hidden), 0) if eight else (hidden, _copied(run))
    if kind == "weight":
        return 0, max(matrix, again + max(into_order, into))
    if kind == "input":  # the input of the last matrix stays
        matrix = into = 0
    local = e * run.tokens_between * shape.hidden
    stays = wide * (kind == "input")
    if t == 1:  # into the last matrix; through the activation; into the first ones
        first = hidden + into if gated else hidden + into - wide
        times = [wide + matrix, (2 * wide if run.gated else wide) + stays, first + stays]
        return 0, max(times)
    gathered = hidden if run.layout.sequence_parallel else 0  # the gathered gradient of the output
    arrived = gathered + (again if kind == "full" else 0)
    scattered = _copied(run) + local if gathered else 0
    # The last matrix comes first, and frees its factors.
    then = max(into_order, into) - (gathered + wide if regathers else 0)
    waiting = [
        gathered + _copied(run), gathered + wide, gathered + (3 if run.gated else 2) * wide,
        arrived + hidden + wide * gated,
        arrived + hidden - wide * gated + scattered + (wide * (1 + gated) if stays else 0),
    ]
    making = arrived + hidden - wide * gated + max(matrix, then) + min(scattered, local)
    if kind == "input":
        return max(waiting), max(waiting)
    # The gradient of a bias added after the sum is the first of all.
    return max(waiting), making if run.gated else max(*waiting, making)


def _in_latent_core(run: MicroBatch, sparse: bool, kind: Half) -> int:
    """Return the bytes in the backward of latent attention's core, when the later parts of the layer are freed.

    Counts the gradients of the output with its zeros, of queries, keys and values, and of the residual stream. The
    output's product has freed its input, unless a second half needs it.
    """
    e, n, of = run.itemsize, run.tokens, Widths.build(run)
    freed = activations.total(activations.after_attention(run, sparse)) + e * n * of.values
    left = activations.total(between_backward_halves.feed_forward(run, sparse)) if kind == "input" else 0
    left += e * n * (of.values + run.shape.hidden) if kind == "input" else 0
    return 4 * e * n * of.heads + run.hidden_bytes + left - freed


def _round_ring(run: MicroBatch, sparse: bool, kind: Half) -> int:
    """Return the bytes in the backward of ring attention, when the later parts of the layer are freed.

    Counts the gradients of the output and of the queries, and block gradients: for this place's block, for the block
    whose keys are present, and for previous blocks, being sent to the next place and received from the previous one
    (`shoal.engine.parallel.context.ring`).
    """
    layout, shape, e, n = run.layout, run.shape, run.itemsize, run.tokens
    q, kv = n * shape.query_dim * shape.heads // layout.tp, run.ring_elements // 2
    copies = 0 if q == kv else 2 * e * (q + kv)  # keys and values per query head; sums of their gradients
    seen = q // 2 if layout.cp_order == "zig-zag" else q  # queries of the first place that see the others' keys
    steps = [2 * e * kv * (layout.cp_ring > 1) + 3 * e * q]  # with its own block, while the next one arrives
    for step in range(1, min(layout.cp_ring, 3)):
        blocks, gradients = 1 + (step < layout.cp_ring - 1), 1 if step == 1 else 3
        steps.append(2 * kv * (e * blocks + run.exact * gradients) + e * (seen + 2 * q))
    # As received, and with heads before tokens; with several ranks as exchanged, after the original is freed.
    output = 2 * e * q if layout.ulysses == 1 else e * q * (kind == "input")
    found = run.hidden_bytes + output + run.exact * (q + 2 * kv) + max(steps) + copies
    if layout.recompute == "selective":  # the saved core tensors coexist with the recomputed ones
        found += e * (q + n * shape.query_dim * shape.kv_heads // min(layout.tp_y, shape.kv_heads) * 2)
    left = activations.total(between_backward_halves.feed_forward(run, sparse)) if kind == "input" else 0
    return found + left - activations.total(activations.after_attention(run, sparse))


class _RowBytes(NamedTuple):
    """Bytes of one tensor each, in an expert layer."""

    own: int  # [n, h] tokens that the rank routes
    # sent, computed: [m, h] rows that it sends to experts, and rows that its experts compute
    sent: int
    computed: int
    wide: int  # [m, f] intermediate activations of these
    gathered: int  # rows that come from other ranks of etp

    @staticmethod
    def build(run: MicroBatch) -> _RowBytes:
        shape, layout, rows = run.shape, run.layout, run.routed
        row, wide = run.itemsize * shape.hidden, run.itemsize * (shape.moe.ffn // layout.expert_tensor)
        return _RowBytes(
            rows.own * row, rows.sent * row, rows.computed * row, rows.computed * wide, rows.gathered * row
        )

    def exchanged(self, layout: Layout) -> int:
        """Return the maximum bytes while rows travel one way, over ep and then over etp.

        Counts received rows, over etp their pieces too, and the sent rows, which are still alive.
        """
        to_rank = 2 * self.sent if layout.ep > 1 else 0
        to_expert = self.sent + self.gathered + self.computed if layout.expert_tensor > 1 else 0
        return max(to_rank, to_expert, 2 * self.computed if to_rank or to_expert else 0)  # and reordered


def _forward(run: MicroBatch, sparse: bool) -> int:
    """Return the transient bytes in the forward of a layer; with full recomputation, including unsaved tensors."""
    local = run.hidden_bytes
    if run.layout.recompute != "full":
        return _routed(run) - _of_shared(run) if sparse else local + max(local, _summed(run))  # the output, and the sum
    if not sparse:
        return 2 * local + _through(run, run.shape.ffn)  # after attention, with its norm
    rows, gated = _RowBytes.build(run), run.gated
    inside = 2 * rows.computed + (2 if gated else 1) * rows.wide
    leaves = run.layout.ep * run.layout.expert_tensor > 1  # the rows of tokens are freed once they are sent
    routed = max(_routed(run), rows.exchanged(run.layout), inside + (0 if leaves else rows.sent))
    of = run.shape.moe
    return 2 * local + max(routed, local + _through(run, of.shared * of.ffn) if of.shared else 0)


def _through(run: MicroBatch, ffn: int) -> int:
    """Return the bytes in the forward of a feed-forward block of width ``ffn`` that saves nothing."""
    hidden, wide = (run.itemsize * run.tokens * width for width in (run.shape.hidden, ffn // run.layout.tp))
    gated, gathered = run.gated, run.layout.sequence_parallel
    first = hidden * gathered + wide * (1 + gated)  # its input and the first products
    between = (3 if run.fused and gated else 4 if gated else 2) * wide
    biased = run.layout.tp > 1 and not gated  # after the sum
    output = _summed(run) + run.hidden_bytes if gathered else hidden + run.hidden_bytes * biased
    return max(first, between, (3 if gated else 1) * wide + output)


def _summed(run: MicroBatch) -> int:
    """Return the bytes of a block's output before it is summed and split, if tp splits the sequence."""
    return run.itemsize * run.tokens * run.shape.hidden + _copied(run) if run.layout.sequence_parallel else 0


def _routed(run: MicroBatch) -> int:
    """Return the transient bytes in the forward of an expert layer, beyond all that autograd saves.

    The peak is when results return from the experts, whose rows on this rank are saved later, or when the tp ranks
    concatenate their tokens.
    """
    rows, layout = _RowBytes.build(run), run.layout
    weighted = rows.own + (0 if run.fused else rows.sent)
    back = rows.sent if layout.ep > 1 else 0
    if layout.expert_tensor > 1:
        back = max(back, 2 * rows.computed + rows.gathered - rows.sent)
    split = rows.own + 2 * run.itemsize * run.tokens * run.shape.hidden if _in_parts(run) else 0
    return max(weighted, back, split)


def _in_parts(run: MicroBatch) -> bool:
    """Return whether the tp ranks have the same tokens and route a part each."""
    return run.layout.tp > 1 and not run.layout.sequence_parallel


def _of_shared(run: MicroBatch) -> int:
    return activations.total(activations.shared(run))


def _in_experts(run: MicroBatch, kind: Half, last: bool) -> Block:
    """Return the bytes in an expert block, whose experts run sequentially; in backward, shared experts come first."""
    shape, layout, e, experts = run.shape, run.layout, run.itemsize, run.shape.moe
    own, sent, computed, wide, *_ = rows = _RowBytes.build(run)
    gated, shared = run.gated, experts.shared * experts.ffn
    silu = gated and not run.fused  # another saved tensor
    matrix = e * shape.hidden * (experts.ffn // layout.expert_tensor) if e < 4 else 0
    matrix *= experts.count // layout.ep if run.fused else 1  # one grouped product, or one after the other
    y, heads = layout.tp_y, shape.head_dim * (shape.heads // layout.tp_y)
    keys = shape.head_dim * (shape.kv_heads // min(y, shape.kv_heads))
    widths = heads + 2 * keys if shape.latent is None else Widths.build(run).latents
    joined = e * shape.hidden * widths * run.copies_gradients  # of attention's projections
    if kind == "weight":
        most = max(matrix, _in_dense(run, kind, shared)[1] if shared else 0)
        return [(most, MAKING), (0, COMPLETE), (joined, REST), (0, ALL)]
    again, halved = activations.recomputed(run, True), kind == "input"
    full = again if layout.recompute == "full" else 0
    # A shared block's backward comes first, and over tp has gathered its output gradient.
    summed = e * run.tokens * shape.hidden if shared and layout.sequence_parallel else 0
    found: Block = [(full + summed + _routed(run) - _of_shared(run), WAITING)] if full else []
    before = 0
    if shared:
        first, then = _in_dense(run, kind, shared)
        found += [(again + first, WAITING), (again + then, WAITING if halved else SHARED)]
        left = activations.total(between_backward_halves.block(run, shared)) if halved else 0
        before = e * run.tokens_between * shape.hidden + left - _of_shared(run)
    arriving = rows.exchanged(layout)
    back = max(arriving, 2 * computed + rows.gathered if layout.expert_tensor > 1 else 0)  # return of their gradients
    waiting = [(1 if run.fused else 2) * sent + own * _in_parts(run), arriving - sent]
    if halved:  # both factors of each weight gradient stay
        inside = [
            computed + wide, computed + (3 if gated else 2) * wide,
            3 * computed - wide * silu if gated else 2 * computed,
        ]  # fmt: skip
        waiting += [time - sent for time in inside]
        leaving = computed - wide * silu + back - sent  # when the experts' parameters are no longer needed
        rest = max(again + before + leaving, _entry(run, True) - run.hidden_bytes * last)
        return [*found, (again + before + max(waiting), WAITING), (rest, REST)]
    making = [computed + wide + matrix, 2 * wide if gated else wide, 2 * computed - (2 + silu) * wide + matrix if gated
              else computed - wide + matrix]  # fmt: skip
    complete = max(
        2 * computed - (2 + silu) * wide if gated else computed - wide,
        back - computed - (3 + silu if gated else 2) * wide,
    )
    block = activations.total(activations.experts(run))
    attention = e * run.tokens * (2 * heads + 2 * keys) + e * run.tokens_between * shape.hidden + joined
    rest = attention - block if shape.latent is None else _in_latent_core(run, True, kind)
    if layout.cp > 1:
        rest = max(rest, _round_ring(run, True, kind) - run.hidden_bytes * last)
    if shape.latent is None and gathers_again(run, ["layers.0.attention.q"]):
        # Gradients of q, k and v; the input as received and in order, and its gradient. The core has freed its tensors.
        entering = e * run.tokens * (heads + 2 * keys) + 2 * e * run.tokens * shape.hidden + _copied(run) + joined
        rest = max(rest, entering + run.hidden_bytes - block - activations.total(activations.core(run)))
    return [
        *found, (again + before + max(waiting), SHARED), (again + before - sent + max(making), MAKING),
        (again + before - sent + complete, COMPLETE), (again + rest, REST), (_over(run, True), ALL),
    ]
