"""Bytes that a forward pass saves for its backward, tensor by tensor.

Shapes: b sequences, s tokens, h hidden, a heads of width d, k key/value heads, f inside the feed-forward block, v
vocabulary, t tensor-parallel ranks (a grid of x y; in one dimension x is 1 and y is t). With context parallelism s is
the fullest rank's part of a sequence. Each list entry is one tensor that autograd keeps on one rank. Tensors shared by
several operations are counted once; weights, which are resident anyway, are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal.planning.cost.memory import latent_attention
from shoal.planning.cost.memory.saved import (
    Saved,
    blocks,
    entered,
    gathers_again,
    into_block,
    multiplied,
    scores,
    total,
)
from shoal.planning.cost.micro_batch import MicroBatch, once
from shoal.spec.layout import Recompute


@once
def layer(
    run: MicroBatch, recompute: Recompute | None = None, *, sparse: bool = False, skips: bool = False, number: int = 0
) -> list[Saved]:
    """Return the saved tensors of one layer.

    Args:
        recompute: overrides the layout's value.
        sparse: the layer has experts.
        skips: only some tokens pass through the layer.
        number: layer number, needed if patterns select which layers' products are in 8 bits.
    """
    mode = recompute or run.layout.recompute
    if mode == "full":
        return [Saved("layer input", "[b, s, h/x]", run.hidden_bytes)]
    if skips:
        inside = layer(run.chosen, mode, sparse=sparse)
        return [*_router(run), *(saved._replace(what=f"{saved.what} of chosen tokens") for saved in inside)]
    before = [] if run.shape.post_norm == "only" else _norm(run)
    return [*before, *_qk_norms(run, number), *_attention(run, mode, number), *after_attention(run, sparse, number)]


def after_attention(run: MicroBatch, sparse: bool, number: int = 0) -> list[Saved]:
    """Return the saved tensors of a layer's norms after attention, and its feed-forward block."""
    norms = {None: 1, "also": 3, "only": 2}[run.shape.post_norm]
    return [*_norm(run) * norms, *(experts(run) if sparse else _mlp(run, number=number))]


def _router(run: MicroBatch) -> list[Saved]:
    """Return the saved tensors of a mixture-of-depths router and its scatter of k tokens, evenly spread over ranks."""
    shape, e, x, taken = run.shape, run.itemsize, run.exact, run.chosen
    n, m, h, width = run.tokens_between, taken.tokens_between, shape.hidden, shape.mod.predictor
    cast = "" if x == e else ", fp32"
    saved = [
        Saved(f"router input{cast}", "[b, s, h]", x * n * h),
        Saved("predictor", "[b, s, p]", 2 * x * n * width),
        Saved("predicted, chosen", "[b, s]", 2 * x * n),
        Saved("loss", "[]", x),
        Saved("places of chosen tokens", "[b, k]", 8 * m),
        Saved("weights of chosen tokens", "[b, k]", e * m),
        Saved("results, weighted", "[b, k, h]", 2 * e * m * h),
    ]
    if cast:
        saved.append(Saved("router and predictor, fp32", "[h], [p]", x * (h + width)))
    if shape.mod.weight == "sigmoid":
        saved.append(Saved("sigmoid of scores", "[b, s]", x * n))
    if shape.family == "llama":
        saved.append(Saved("cos, sin of chosen tokens", "[b, k, d/2]", 2 * e * taken.tokens * (shape.rotary_dim // 2)))
    if run.masked and run.layout.recompute != "none" and run.layout.cp == 1:
        saved.append(Saved("mask of chosen tokens", "[b, 1, k, k]", taken.tokens * taken.s))
    return saved


def _norm(run: MicroBatch) -> list[Saved]:
    n, h, e = run.tokens_between, run.hidden_local, run.itemsize
    if run.layout.tp_x > 1:  # in parts, with sums over ranks in between
        same = run.shape.family == "llama" and e >= 4
        return [
            Saved("norm input" if same else "centred, fp32", "[b, s, h/x]", run.exact * n * h),
            Saved("1/std", "[b, s]", run.exact * n),
            Saved("normalised", "[b, s, h/x]", e * n * h),
        ]
    if run.shape.family == "gpt":
        stat = run.exact if run.fused else e
        return [Saved("norm input", "[b, s, h]", e * n * h), Saved("norm mean, 1/std", "[b, s]", 2 * stat * n)]
    if run.fused or e >= 4:
        return [Saved("norm input", "[b, s, h]", e * n * h), Saved("norm 1/rms", "[b, s]", run.exact * n)]
    return [
        Saved("norm input, fp32", "[b, s, h]", 4 * n * h),
        Saved("norm 1/rms", "[b, s]", 4 * n),
        Saved("normalised, fp32", "[b, s, h]", 4 * n * h),
    ]


def _qk_norms(run: MicroBatch, number: int) -> list[Saved]:
    """Return the saved tensors of the norms of queries and keys, of each head or of all together."""
    shape, t, e, n, x = run.shape, run.layout.tp, run.itemsize, run.tokens, run.exact
    if not shape.norms_heads(number):
        return []
    heads = shape.heads // t + shape.kv_heads // min(t, shape.kv_heads)
    width, sums = heads * shape.head_dim, 2 if shape.joint_qk_norm else heads
    split = shape.joint_qk_norm and t > 1  # with sums over ranks in between
    saved = [Saved("norm input of q, k", "[b, s, (a + k) d/t]", (e if run.fused and not split else x) * n * width),
             Saved("norm 1/rms of q, k", "[b, s]", x * n * sums)]
    if split or not (run.fused or e >= 4):
        saved.append(Saved("normalised q, k", "[b, s, (a + k) d/t]", (e if split else x) * n * width))
    return saved


def _attention(run: MicroBatch, mode: Recompute, number: int) -> list[Saved]:
    if run.shape.latent is not None:
        return latent_attention.attention(run, mode, number)
    shape, t, e, n = run.shape, run.layout.tp, run.itemsize, run.tokens
    heads, q = shape.heads // t, shape.heads * shape.head_dim // t
    kv = shape.kv_heads * shape.head_dim // min(t, shape.kv_heads)
    projections = [f"layers.{number}.attention.{name}" for name in "qkv"]
    if run.layout.cp > 1 and mode == "none":
        return _ring(run, q, projections)
    s, window = run.s_local, run.window(number)
    parts = blocks(s, window) if mode == "none" and run.stores_scores else [(s, s)]
    keys = run.layout.micro_batch * sum(seen for _, seen in parts)  # each block copies the keys it attends to
    saved = [
        *entered(run, "attention input", projections),
        Saved("q", "[b, a/t, s, d]", e * n * q),
        Saved("k, v", "[b, k/t, s, d]", 2 * e * keys * kv),
    ]
    if mode == "none" and not run.stores_scores:
        saved.append(Saved("log-sum-exp", "[b, a/t, s]", run.exact * n * heads))
        if (run.masked or window) and not run.by_lengths and not shape.by_blocks:
            of_mask = n if run.masked else s
            saved.append(Saved("mask as numbers", "[b, 1, s, s]", e * of_mask * run.s))
    elif mode == "none":
        saved.append(Saved("softmax", "[b, a/t, s, s]", e * run.layout.micro_batch * heads * scores(run.s, window)))
    needed = mode == "none" and not run.stores_scores  # by the kernel's own backward
    if run.layout.tp_x == 1 or needed:
        out = [f"layers.{number}.attention.out"]
        saved += multiplied(run, "attention output", "[b, s, a d/t]", q, out, needed=needed)
    return [*saved, *_gathered(run, "attention output", "a d", q)]


def core(run: MicroBatch) -> list[Saved]:
    """Return the saved tensors of attention, except the norm's and its input."""
    return [saved for saved in _attention(run, "none", 0) if not saved.what.startswith("attention input")]


def _gathered(run: MicroBatch, what: str, letters: str, width: int) -> list[Saved]:
    """Return the saved inputs of a block's last product on a grid: parts of ``width`` elements per token along x."""
    x = run.layout.tp_x
    return [Saved(f"{what}, gathered", f"[b, s, {letters}/y]", run.itemsize * run.tokens * width * x)] if x > 1 else []


def _ring(run: MicroBatch, q: int, projections: Sequence[str]) -> list[Saved]:
    """Return the saved tensors of ring attention with q elements per token in the queries; no kernel saves scores."""
    e, n, d = run.itemsize, run.tokens, run.shape.head_dim
    saved = [
        *entered(run, "attention input", projections),
        Saved("q", "[b, a/t, s, d]", e * n * q),
        Saved("k, v", "[2, b, k/t, s, d]", e * run.ring_elements),
        Saved("log-sum-exp", "[b, a/t, s]", run.exact * n * q // d),
        Saved("attention output", "[b, s, a d/t]", e * n * q),
    ]
    if run.layout.tp_x > 1:
        return saved + _gathered(run, "attention output", "a d", q)
    # The other order of heads and tokens is a separate tensor.
    return [*saved, Saved("exchanged output", "[b, s, a d/t]", e * n * q)] if run.layout.ulysses > 1 else saved


def _mlp(run: MicroBatch, width: int | None = None, number: int = 0) -> list[Saved]:
    e, n, f, gpt = run.itemsize, run.tokens, (width or run.shape.ffn) // run.layout.tp, run.shape.family == "gpt"
    *inside, last = ("up", "gelu(up)") if gpt else ("gate", "up", "silu(gate)", "silu(gate) up")
    name = f"layers.{number}.mlp"
    if (run.fused and not gpt and run.shape.activation is None) or run.shape.activation == "clamped":
        inside.remove("silu(gate)")
    entering = entered(run, "mlp input", into_block(run, name))
    leaving = _gathered(run, last, "f", f) or multiplied(run, last, "[b, s, f/t]", f, [f"{name}.down"])
    return [*entering, *(Saved(what, "[b, s, f/t]", e * n * f) for what in inside), *leaving]


def shared(run: MicroBatch) -> list[Saved]:
    """Return the saved tensors of shared experts; their input may be the router's."""
    of = run.shape.moe
    saved = _mlp(run, of.shared * of.ffn) if of.shared else []
    return saved[1:] if _router_keeps_all(run) else saved


def _router_keeps_all(run: MicroBatch) -> bool:
    """Return whether a router's input, unless copied to fp32, is the tensor between the blocks or a part of it.

    A part of one sequence is a view of the full tensor; a part of several is a copy.
    """
    layout = run.layout
    part = gathers_again(run, ["mlp.up"]) if layout.sequence_parallel else layout.micro_batch == 1
    return run.exact == run.itemsize and (layout.tp == 1 or part)


@once
def experts(run: MicroBatch) -> list[Saved]:
    """Return the saved tensors of an expert block, with even routing and no dropped tokens.

    Scores are counted for the top-k gate with softmax; other gates differ by a few [b, s, E] tensors.
    """
    of, layout, e, x = run.shape.moe, run.layout, run.itemsize, run.exact
    rows = run.routed
    scores = layout.micro_batch * run.s * of.count  # full sequences, on every rank
    h, f = run.shape.hidden, of.ffn // layout.expert_tensor
    silu = () if run.fused or run.shape.activation == "clamped" else ("silu(gate)",)
    inside = ("up", "gelu(up)") if run.shape.family == "gpt" else ("gate", "up", *silu, "silu(gate) up")
    own = run.tokens_between if _router_keeps_all(run) else rows.own
    saved = [Saved("own tokens", "[b, s, h]", e * own * h)] if x == e else []
    if x != e:
        saved.append(Saved("router input, fp32", "[b, s, h]", x * rows.own * h))
        saved.append(Saved("router weight, fp32", "[E, h]", x * of.count * h))
    saved += [
        Saved("logits, scores, weights", "[b, s, E]", 3 * x * scores),
        Saved("chosen, wanted", "[b, s, E]", 2 * scores),
        Saved("sums over experts", "[b, s]", 2 * x * layout.micro_batch * run.s),
        Saved("part of choices", "[b, E]", x * layout.micro_batch * of.count),
        Saved("token, expert, place", "[m]", 3 * (4 if run.fused else 8) * rows.sent),
        Saved("weights of rows", "[n, E]", x * rows.own * of.count) if run.fused else
        Saved("weight of rows", "[m]", e * rows.sent),
        Saved("rows of experts", "[m, h]", e * rows.computed * h),
        *(Saved(f"{what} of experts", "[m, f]", e * rows.computed * f) for what in inside),
        Saved("results of experts", "[m, h]", e * rows.sent * h),
    ]
    if of.scales_input:
        saved.append(Saved("weights and choices", "[n, E]", e * rows.own * (of.count + 1)))
    if of.biases and not (run.fused and x == e):
        saved.append(Saved("weights of biases", "[n, E]", e * rows.own * of.count))
    if layout.ep * layout.expert_tensor > 1:
        saved.append(Saved("order and back", "[m]", 2 * 8 * rows.computed))
    return saved + shared(run)


@once
def context(run: MicroBatch) -> list[Saved]:
    """Return the saved tensors shared by all layers of a stage: rotary tables, and the mask if cores are recomputed."""
    shape, saved = run.shape, []
    if shape.family == "llama":
        saved.append(Saved("cos, sin", "[s, d/2]", 2 * run.itemsize * run.s_local * (shape.rotary_dim // 2)))
    if shape.local_rope_theta and None in {shape.reach(i) for i in range(shape.layers)}:
        saved *= 2
    if shape.temperature:
        saved.append(Saved("factors on queries", "[s]", run.itemsize * run.s_local))
    kept = run.layout.recompute != "none" or shape.by_blocks
    if not run.by_lengths and kept and run.layout.cp == 1:
        windows = {run.window(i) for i in range(shape.layers)}
        if run.masked:
            saved += [Saved("mask", "[b, 1, s, s]", run.tokens * run.s)] * len(windows)
        elif windows != {None}:
            saved.append(Saved("mask", "[1, 1, s, s]", run.s * run.s))
    return saved


@once
def embedding(run: MicroBatch) -> list[Saved]:
    saved = [Saved("ids", "[b, s]", 8 * run.tokens)]
    if run.layout.tp > 1:
        saved.append(Saved("ids of other ranks", "[b, s]", run.tokens))
    if run.shape.family == "gpt":
        saved.append(Saved("positions", "[s]", 8 * run.s_local))
    return saved


@once
def head(run: MicroBatch) -> list[Saved]:
    """Return the saved tensors of the final norm, the output matrix and the loss, and of multi-token prediction."""
    shape, found = run.shape, _head(run)
    if not shape.mtp_depth:
        return found
    found.append(Saved("inputs and targets of modules", "[D, 2, b, s]", 16 * shape.mtp_depth * run.tokens))
    both = Saved("inputs of a projection", "[b, s, 2 h]", 2 * run.itemsize * run.tokens_between * shape.hidden)
    own = gathers_again(run) or not run.layout.sequence_parallel
    same = own and (run.fused or run.itemsize >= 4)  # tensor as the input of the head
    for number in range(shape.layers, shape.blocks):
        inside = layer(run, sparse=shape.sparse(number), number=number)
        found += [*_norm(run)[same:], *_norm(run), both, *inside, *_head(run)]
    return found


def _head(run: MicroBatch) -> list[Saved]:
    """Return the saved tensors of a norm, the output matrix and a loss."""
    n, rows = run.tokens, run.shape.vocabulary_rows(run.layout.tp)
    return [
        *_norm(run),
        head_input(run),
        Saved("logits" if run.fused else "probabilities", "[b, s, v/t]", run.logit * n * rows),
        *([Saved("tanh of logits", "[b, s, v/t]", run.itemsize * n * rows)] if run.shape.logit_softcap else []),
        Saved("targets, and whether they are here", "[b, s]", 9 * n),
        Saved("this rank's share", "[b, s]", run.exact * n),
    ]


def head_input(run: MicroBatch) -> Saved:
    """Return the saved input of the output matrix: this rank's part if backward gathers it again."""
    tokens = run.tokens_between if gathers_again(run) else run.tokens
    return Saved("head input", "[b, s/y, h]", run.itemsize * tokens * run.shape.hidden)


def stage(run: MicroBatch, layers: Sequence[int], *, first: bool, last: bool) -> list[Saved]:
    """Return all tensors that one micro-batch keeps alive on a stage between its forward and its backward.

    In addition to autograd's tensors, this includes the stage's input and output, if they are separate tensors.
    """
    saved = context(run) + (embedding(run) if first else []) + several(run, layers) + (head(run) if last else [])
    hidden = run.hidden_bytes
    if not first and not any(tensor.what in ("norm input", "layer input", "router input") for tensor in saved):
        saved.append(Saved("stage input", "[b, s, h/x]", hidden))
    if not last:
        saved.append(Saved("stage output", "[b, s, h/x]", hidden))
    return saved


def several(run: MicroBatch, layers: Sequence[int]) -> list[Saved]:
    """Return the saved tensors of some layers, without those shared by a stage; equal layers share an entry."""
    return [
        Saved(what, shape, count * size)
        for (sparse, skips, number), count in kinds(run, layers).items()
        for what, shape, size in layer(run, sparse=sparse, skips=skips, number=number)
    ]


@once
def recomputed(run: MicroBatch, sparse: bool = False) -> int:
    """Return the recomputed bytes of one layer during its backward: the largest such layer, expert or dense."""
    if run.layout.recompute == "none":
        return 0
    equal = run.shape.experts is None and run.shape.depths is None and not run.distinguishes_layers

    def kept(kind: tuple[bool, bool, int], mode: Recompute) -> int:
        return total(layer(run, mode, sparse=kind[0], skips=kind[1], number=kind[2]))

    every = kinds(run, range(1) if equal else range(run.shape.layers))
    return max(kept(kind, "none") - kept(kind, run.layout.recompute) for kind in every if kind[0] == sparse)


def kinds(run: MicroBatch, layers: Sequence[int]) -> Counter[tuple[bool, bool, int]]:
    """Count layers by kind: (has experts, only some tokens pass through, layer number if relevant)."""
    shape = run.shape
    if shape.experts is None and shape.depths is None and not run.distinguishes_layers:
        return Counter({(False, False, 0): len(layers)} if layers else ())
    return Counter((run.shape.sparse(i), run.shape.skips(i), i if run.distinguishes_layers else 0) for i in layers)
