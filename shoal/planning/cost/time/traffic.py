"""Bytes that one rank sends for one pass of a micro-batch through a stage, by axis of the mesh and kind of collective.

As `shoal.engine.collectives.group.Group.count` counts them: with n ranks (n-1)/n of what a gather or a scatter makes
or takes whole, twice that for an all-reduce. What a whole step sends follows from its program
(`shoal.planning.cost.counts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.planning.cost.context import kv_heads, tokens_here
from shoal.planning.cost.experts import routed_rows
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.optional_parts import experts_of
from shoal.planning.cost.parameters import StagePart

COUNT = 8  # bytes of a number of rows


class Sent(dict[tuple[str, str], float]):
    """Bytes by (axis, kind): none of what is not there."""

    def __missing__(self, key: tuple[str, str]) -> float:
        return 0

    def add(self, more: Mapping[tuple[str, str], float]) -> None:
        """Send these bytes, too."""
        for key, size in more.items():
            self[key] += size


class Share(NamedTuple):
    """The tokens of a pass, counted in one sequence.

    Attributes:
        tokens: of this rank, in what passes: the whole of its part, or of a slice.
        seen: of this rank, in this slice and those before it, whose keys it has.
        place: of all ranks at its place of the ring, in what passes.
        blocks: tokens whose keys each place of the ring has, this rank's place first and then as they come by.
        place_seen: of all ranks at its place, in this slice and those before.
    """

    tokens: int
    seen: int
    place: int
    blocks: tuple[int, ...]
    place_seen: int


def gathered(size: float, ranks: int) -> float:
    """Of an all-gather or a reduce-scatter whose whole has ``size`` bytes."""
    return size * (ranks - 1) / ranks


def all_reduced(size: float, ranks: int) -> float:
    """Of an all-reduce of ``size`` bytes."""
    return 2 * gathered(size, ranks)


def tensor_parallel(run: MicroBatch, part: StagePart, tokens: int, *, by_parts: bool) -> tuple[Sent, Sent]:
    """A forward's and a backward's over tp: two regions in each layer, the look-up, the output matrix and the loss.

    On a grid regions are entered and left along its y, and there is more along x (`_along_x`). In one dimension a rank
    sends 4 h (t - 1) / t numbers for a token and layer, on a grid with x ~ sqrt(t) less the more ranks there are:

    >>> from shoal.spec.catalog import model_shape
    >>> from shoal.spec.layout import Layout
    >>> shape = model_shape("llama-3-8b")
    >>> def numbers(tp: int, x: int) -> float:  # for a token, times h, norms left out
    ...     run = MicroBatch(shape, Layout(tp=tp, tp_x=x), 1, 1)
    ...     sent, _ = tensor_parallel(run, StagePart(range(1), False, False), 1, by_parts=False)
    ...     return (sum(sent.values()) - sent["tp_x", "all-reduce"]) / shape.hidden
    >>> [round(numbers(tp, 1), 2) for tp in (4, 8, 16, 32)]
    [3.0, 3.5, 3.75, 3.88]
    >>> [round(min(numbers(tp, x) for x in (2, 4) if x < tp), 2) for tp in (4, 8, 16, 32)]
    [4.25, 3.12, 2.59, 2.23]

    Args:
        tokens: of one sequence.
        by_parts: products and collectives are made together (`shoal.engine.parallel.overlap`): parts go round as
        messages.
    """
    forward, backward = Sent(), Sent()
    t, y, n = run.layout.tp, run.layout.tp_y, run.layout.micro_batch * tokens
    if t == 1:
        return forward, backward
    axis, whole = "tp" if run.layout.tp_x == 1 else "tp_y", run.itemsize * n * run.hidden_here
    sparse = sum(map(run.shape.sparse, part.layers)) if run.shape.experts else 0
    without = 0 if sparse and experts_of(run.shape).shared else sparse  # layers that do not end with a region
    regions, full = 2 * len(part.layers) - without, run.layout.recompute == "full"
    # What is computed again ends with a layer's last product, unless the sum over the ranks is part of that, or what
    # comes of it is weighted.
    again = (regions, regions if by_parts or _skip(run, part) else len(part.layers)) if full else (0, 0)
    if run.layout.sequence_parallel:
        gather, scatter = ("send", "send") if by_parts else ("all-gather", "reduce-scatter")
        size = gathered(whole, y)
        for sent, into, out in ((forward, gather, scatter), (backward, scatter, gather)):
            sent[axis, into] += size * (regions + part.last)
            sent[axis, out] += size * regions
        forward[axis, "reduce-scatter"] += size * part.first
        backward[axis, "all-gather"] += size * part.first
        backward[axis, gather] += size * again[0]
        backward[axis, scatter] += size * again[1]
    else:
        size = all_reduced(whole, y)
        forward[axis, "all-reduce"] += size * (regions + part.first)
        backward[axis, "all-reduce"] += size * (regions + part.last + again[1])
    if part.last:  # each rank's log-sum-exp and the logit of the target
        forward["tp", "all-gather"] += 2 * run.exact * n * (t - 1)
    if run.layout.tp_x > 1:
        _along_x(run, part, n, forward, backward)
    return forward, backward


def _along_x(run: MicroBatch, part: StagePart, n: int, forward: Sent, backward: Sent) -> None:
    """Add what goes along x of a grid (`shoal.engine.parallel.tensor_2d`): sums of a block's first products are
    scattered, what its last ones take is gathered; norms sum one number a token, or two; the hidden state is whole at
    the model's ends.

    Args:
        n: tokens of all sequences.
    """
    shape, layout, layers = run.shape, run.layout, len(part.layers)
    x, llama, each = layout.tp_x, shape.family == "llama", run.itemsize * n * (layout.tp_x - 1)
    q, keys = shape.heads * shape.head_dim, max(shape.kv_heads, layout.tp) * shape.head_dim
    into = each * (q + 2 * keys + (1 + llama) * shape.ffn) // layout.tp * layers
    out = each * (q + shape.ffn) // layout.tp * layers
    ends = each * run.hidden_here
    norm = all_reduced(run.exact * n // layout.token_multiple * (2 - llama), x)
    for sent, scatter, gather in (
        (forward, "reduce-scatter", "all-gather"), (backward, "all-gather", "reduce-scatter"),
    ):  # fmt: skip
        sent["tp_x", scatter] += into + ends * part.first
        sent["tp_x", gather] += out + ends * part.last
        sent["tp_x", "all-reduce"] += norm * (2 * layers + part.last)
    if layout.recompute == "full":
        backward["tp_x", "reduce-scatter"] += into
        backward["tp_x", "all-gather"] += out
        backward["tp_x", "all-reduce"] += norm * 2 * layers


def _skip(run: MicroBatch, part: StagePart) -> bool:
    """Whether only some tokens pass through the layers of a part, which are of one kind."""
    return any(map(run.shape.skips, part.layers))


def context_parallel(run: MicroBatch, layers: int, share: Share) -> tuple[Sent, Sent]:
    """A forward's and a backward's round the ring, and in exchange of heads for tokens."""
    forward, backward = Sent(), Sent()
    layout, d = run.layout, run.shape.head_dim
    if layout.cp == 1:
        return forward, backward
    b, u, e = layout.micro_batch, layout.ulysses, run.itemsize
    heads, keys = run.shape.heads // layout.tp, 2 * kv_heads(run.shape, layout)
    block = b * keys // u * d  # numbers of each token's keys and values, for the heads that a rank attends
    ring = e * block * sum(share.blocks[:-1])  # all but the block that the next place has by itself
    into = out = back_in = back_out = 0.0
    if u > 1:
        q = b * heads // u * d
        into = e * (u - 1) * (q * share.tokens + block * share.seen)
        out = e * q * (share.place - share.tokens)
        back_in = e * (q * (share.place - share.tokens) + block * (share.place_seen - share.seen))
        back_out = e * (u - 1) * q * share.tokens
    again = run.layout.recompute
    for sent, round_ring, exchanged in (
        (forward, ring, into + out),
        (backward, ring + run.exact * block * sum(share.blocks[1:]), back_in + back_out),
        (backward, ring * (again != "none"), {"none": 0, "selective": into, "full": into + out}[again]),
    ):
        sent["ring", "send"] += layers * round_ring
        sent["ulysses", "all-to-all"] += layers * exchanged
    return forward, backward


def expert_parallel(run: MicroBatch, part: StagePart, tokens: int) -> tuple[Sent, Sent]:
    """A forward's and a backward's of layers with experts: scores of whole sequences, rows to their experts and back.

    With even routing and nothing dropped, as `shoal.planning.cost.experts` has it.

    Args:
        tokens: of one sequence.
    """
    layout, shape = run.layout, run.shape
    forward, backward = Sent(), Sent()
    layers = sum(map(shape.sparse, part.layers)) if shape.experts else 0
    if not layers:
        return forward, backward
    experts, rows, t, etp = experts_of(shape), routed_rows(shape, layout, run.s), layout.tp, layout.expert_tensor
    row = run.itemsize * shape.hidden
    own = layout.micro_batch * -(-tokens // t)
    score = experts.count * (2 if experts.gate == "noisy-top-k" else 1) * run.exact  # of a token
    whole = 0 if layout.sequence_parallel else (t - 1) * own * row
    choosing = Sent({
        ("tp", "all-gather"): (t - 1) * own * score,
        ("cp", "all-gather"): (layout.cp - 1) * layout.micro_batch * tokens_here(layout, run.s) * score,
        ("ep", "all-gather"): (layout.ep - 1) * COUNT * experts.count,
        ("etp", "all-gather"): (etp - 1) * COUNT * experts.count,
    })  # fmt: skip
    moving = Sent({("ep", "all-to-all"): 2 * rows.away * row, ("etp", "all-to-all"): 2 * (etp - 1) * rows.sent * row})
    result = Sent({("tp", "all-gather"): whole})
    passes = [(forward, choosing), (forward, moving), (forward, result), (backward, moving), (backward, result)]
    if layout.recompute == "full":
        passes += [(backward, choosing), (backward, moving)]
        if experts.shared or _skip(run, part):  # what comes last is the shared ones' product, or weighted
            passes.append((backward, result))
    for sent, added in passes:
        for key, size in added.items():
            sent[key] += layers * size
    return forward, backward


def evenly_taken(k: int, s: int) -> list[int]:
    """The places of k of s tokens that a dry run has pass through a layer.

    >>> evenly_taken(3, 8)
    [0, 2, 5]
    """
    return [i * s // k for i in range(k)]


def depths(run: MicroBatch, layers: int, moved: int, ranks: int, fullest: int) -> tuple[Sent, Sent]:
    """A forward's and a backward's of layers that only some tokens pass through, where ranks share sequences: scores,
    and chosen tokens on their way to where they are computed and back.

    Args:
        moved: chosen tokens of one sequence that this rank computes or has, but not both.
        ranks: that share sequences.
        fullest: the most tokens of one sequence that any of them has.
    """
    axis, b = "sequence" if run.layout.token_multiple > 1 else "cp", run.layout.micro_batch
    once = Sent({
        (axis, "all-gather"): layers * (ranks - 1) * b * fullest * run.exact,
        (axis, "all-to-all"): layers * b * moved * run.itemsize * run.shape.hidden,
    })  # fmt: skip
    backward = Sent({(axis, "all-to-all"): once[axis, "all-to-all"]})
    if run.layout.recompute == "full":
        backward.add(once)
    return once, backward
