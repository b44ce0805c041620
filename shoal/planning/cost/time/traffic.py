"""Bytes that one rank sends for one pass of a micro-batch through a stage, by mesh axis and kind of collective.

Counts like `shoal.engine.collectives.group.Group.count`: with n ranks, (n-1)/n of the full tensor of an all-gather or
reduce-scatter, and twice that for an all-reduce. The bytes of a full step follow from its program
(`shoal.planning.cost.counts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.planning.cost.memory.saved import find_format, gathers_again, into_block
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.parameters import StagePart

COUNT = 4  # bytes of a row count


class Sent(dict[tuple[str, str], float]):
    """Bytes by (axis, kind); zero for absent keys."""

    def __missing__(self, key: tuple[str, str]) -> float:
        return 0

    def add(self, more: Mapping[tuple[str, str], float]) -> None:
        for key, size in more.items():
            self[key] += size


class Share(NamedTuple):
    """The tokens of a pass, counted in one sequence."""

    tokens: int  # this rank's tokens in this pass: its full part, or a slice of it
    seen: int  # this rank's tokens in this slice and previous ones, whose keys it has
    place: int  # tokens of all ranks at its place of the ring in this pass
    # tokens whose keys each place of the ring has, this rank's place first, then in order of arrival
    blocks: tuple[int, ...]
    place_seen: int  # tokens of all ranks at its place, in this slice and previous ones


def gathered(size: float, ranks: int) -> float:
    """Return the bytes sent in an all-gather or a reduce-scatter with a full tensor of ``size`` bytes."""
    return size * (ranks - 1) / ranks


def all_reduced(size: float, ranks: int) -> float:
    """Return the bytes sent in an all-reduce of ``size`` bytes."""
    return 2 * gathered(size, ranks)


def tensor_parallel(run: MicroBatch, part: StagePart, tokens: int, *, by_parts: bool) -> tuple[Sent, Sent]:
    """Return the tp bytes of a forward and a backward: two regions per layer, the look-up, output matrix and loss.

    On a grid, regions communicate along y, with more traffic along x (`_along_x`). In one dimension a rank sends 4 h (t
    - 1) / t elements per token and layer; on a grid with x ~ sqrt(t), fewer with more ranks:

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
        tokens: tokens of one sequence.
        by_parts: products and collectives are overlapped (`shoal.engine.parallel.overlap`): parts travel around the
            ring as messages.
    """
    forward, backward = Sent(), Sent()
    t, y, n = run.layout.tp, run.layout.tp_y, run.layout.micro_batch * tokens
    if t == 1:
        return forward, backward
    axis, hidden = "tp" if run.layout.tp_x == 1 else "tp_y", run.itemsize * n * run.hidden_local
    sparse = sum(map(run.shape.sparse, part.layers)) if run.shape.experts else 0
    without = 0 if sparse and run.shape.moe.shared else sparse  # layers that do not end with a region
    regions, full = 2 * len(part.layers) - without, run.layout.recompute == "full"
    # Recomputation ends with a layer's last product, unless that product includes the sum over ranks, or its result is
    # weighted or normalised.
    complete = by_parts or _skip(run, part) or run.shape.post_norm
    again = (regions if complete else len(part.layers)) * full
    entries, latents = _entries(run, len(part.layers), regions)  # into regions: hidden states, and bytes of latents
    if run.layout.sequence_parallel:
        gather, scatter = ("send", "send") if by_parts else ("all-gather", "reduce-scatter")
        size, of_latents = gathered(hidden, y), gathered(run.itemsize * n * latents, y)
        once_more = int(size * entries_again(run, part))  # with a reduce-scatter, also where products are overlapped
        forward[axis, gather] += size * (entries + part.last)
        forward[axis, scatter] += size * regions
        backward[axis, gather] += size * regions
        backward[axis, scatter] += size * (entries + part.last) - once_more
        backward[axis, "reduce-scatter"] += once_more
        backward[axis, "all-gather"] += once_more
        forward[axis, "reduce-scatter"] += size * part.first
        forward[axis, "all-gather"] += of_latents
        backward[axis, "all-gather"] += size * part.first + of_latents * full
        backward[axis, "reduce-scatter"] += of_latents
        backward[axis, gather] += size * entries * full
        backward[axis, scatter] += size * again
    else:
        size, of_latents = all_reduced(hidden, y), all_reduced(run.itemsize * n * latents, y)
        forward[axis, "all-reduce"] += size * (regions + part.first)
        backward[axis, "all-reduce"] += size * (entries + part.last + again) + of_latents
    if run.shape.joint_qk_norm:  # one sum per token each
        sums = 2 * all_reduced(run.exact * n, t) * len(part.layers)
        forward["tp", "all-reduce"] += sums
        backward["tp", "all-reduce"] += sums * (2 if full else 1)
    if part.last:  # each rank's log-sum-exp and the target's logit
        forward["tp", "all-gather"] += 2 * run.exact * n * (t - 1)
    if run.layout.tp_x > 1:
        _along_x(run, part, n, forward, backward)
    return forward, backward


def _entries(run: MicroBatch, layers: int, regions: int) -> tuple[int, int]:
    """Return how often hidden states enter tensor-parallel regions, and the widths of all latents that do, summed."""
    latent = run.shape.latent
    if latent is None:
        return regions, 0
    width = latent.key_value_rank + latent.rotary_dim + (latent.query_rank or 0)
    return regions - (layers if latent.query_rank else 0), layers * width


def entries_again(run: MicroBatch, part: StagePart) -> float:
    """Return how often backward gathers hidden states again that enter tensor-parallel regions: codes in part."""
    shape, found = run.shape, float(part.last and gathers_again(run))
    for number in part.layers:
        entries = []
        if shape.latent is None or shape.latent.query_rank is None:
            letters = "qkv" if shape.latent is None else "q"
            entries.append([f"layers.{number}.attention.{letter}" for letter in letters])
        if not shape.sparse(number) or shape.moe.shared:
            entries.append(into_block(run, f"layers.{number}.mlp{'.shared' * shape.sparse(number)}"))
        for names in entries:
            eight = find_format(run, names)
            found += gathers_again(run, names) * (eight.codes(2) / (2 * run.itemsize) if eight else 1.0)
    return found


def _along_x(run: MicroBatch, part: StagePart, n: int, forward: Sent, backward: Sent) -> None:
    """Add the bytes along x of a grid (`shoal.engine.parallel.tensor_2d`).

    A block's first products are reduce-scattered, and the inputs of its last ones are gathered. Norms sum one or two
    values per token. The hidden state is unsharded at the model's ends. ``n`` is the tokens of all sequences.
    """
    shape, layout, layers = run.shape, run.layout, len(part.layers)
    x, llama, each = layout.tp_x, shape.family == "llama", run.itemsize * n * (layout.tp_x - 1)
    q, keys = shape.heads * shape.head_dim, max(shape.kv_heads, layout.tp) * shape.head_dim
    into = each * (q + 2 * keys + (1 + llama) * shape.ffn) // layout.tp * layers
    out = each * (q + shape.ffn) // layout.tp * layers
    ends = each * run.hidden_local
    norm = all_reduced(run.exact * n // layout.sequence_shards * (2 - llama), x)
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
    """Return whether the layers of a part, which are of one kind, are mixture-of-depths layers."""
    return any(map(run.shape.skips, part.layers))


def even_share(run: MicroBatch) -> Share:
    """Return the tokens of a pass if every context-parallel rank has as many as the fullest."""
    place = run.s_local * run.layout.ulysses
    return Share(run.s_local, run.s_local, place, (place,) * run.layout.cp_ring, place)


def context_parallel(run: MicroBatch, layers: int, share: Share) -> tuple[Sent, Sent]:
    """Return the bytes of a forward and a backward around the ring, and in all-to-alls of heads for tokens.

    With T tokens at each of R places of the ring, U ranks per place, k key/value heads and a heads of width d on a
    rank, that is (Liu et al. 2023, section 3.2; Jacobs et al. 2023, section 3.2)

        ring       forward     R - 1 blocks of keys and values                 2 b (T/U) max(k, U) d each
                   backward    the same again, and one gradient per block      these in float32 at least
        exchange   forward     (U - 1)/U of queries, keys, values and output   b T/U d (2 a + 2 max(k, U))
                   backward    the same

    so for a fixed sequence the ring's bytes hardly depend on the number of ranks, and the exchange's fall with it.
    Recomputation sends again; selective recomputation ends with the core, whose output is not exchanged again.
    """
    forward, backward = Sent(), Sent()
    layout, d = run.layout, run.shape.query_dim
    if layout.cp == 1:
        return forward, backward
    b, u, e = layout.micro_batch, layout.ulysses, run.itemsize
    heads, keys = run.shape.heads // layout.tp, 2 * run.kv_heads
    block = b * keys // u * d  # elements of each token's keys and values, for the heads that a rank attends
    ring = e * block * sum(share.blocks[:-1])  # all blocks except the one that the next place already has
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
    """Return the bytes of expert layers in a forward and a backward: scores of full sequences, and rows.

    Assumes even routing without dropped tokens, as in `MicroBatch.routed`. ``tokens`` is for one sequence.
    """
    layout, shape = run.layout, run.shape
    forward, backward = Sent(), Sent()
    layers = sum(map(shape.sparse, part.layers)) if shape.experts else 0
    if not layers:
        return forward, backward
    experts, rows, t, etp = shape.moe, run.routed, layout.tp, layout.expert_tensor
    row = run.itemsize * shape.hidden
    own = layout.micro_batch * -(-tokens // t)
    score = experts.count * (2 if experts.gate == "noisy-top-k" else 1) * run.exact  # per token
    gathered = 0 if layout.sequence_parallel else (t - 1) * own * row
    choosing = Sent({
        ("tp", "all-gather"): (t - 1) * own * score,
        ("cp", "all-gather"): (layout.cp - 1) * run.tokens * score,
        ("ep", "all-gather"): (layout.ep - 1) * COUNT * experts.count,
        ("etp", "all-gather"): (etp - 1) * COUNT * experts.count,
    })  # fmt: skip
    moving = Sent({("ep", "all-to-all"): 2 * rows.away * row, ("etp", "all-to-all"): 2 * (etp - 1) * rows.sent * row})
    result = Sent({("tp", "all-gather"): gathered})
    passes = [(forward, choosing), (forward, moving), (forward, result), (backward, moving), (backward, result)]
    if layout.recompute == "full":
        passes += [(backward, choosing), (backward, moving)]
        if experts.shared or _skip(run, part):  # the last operation is the shared experts' product, or weighted
            passes.append((backward, result))
    for sent, added in passes:
        for key, size in added.items():
            sent[key] += layers * size
    return forward, backward


def evenly_taken(k: int, s: int) -> list[int]:
    """Return the positions of k of s tokens that a dry run passes through a mixture-of-depths layer.

    >>> evenly_taken(3, 8)
    [0, 2, 5]
    """
    return [i * s // k for i in range(k)]


def depths(run: MicroBatch, layers: int, moved: int, ranks: int, fullest: int) -> tuple[Sent, Sent]:
    """Return the bytes of mixture-of-depths layers in a forward and a backward, if ranks share sequences.

    Counts scores, and chosen tokens sent to the ranks that compute them and back.

    Args:
        moved: chosen tokens of one sequence that this rank either computes or holds, but not both.
        ranks: ranks that share sequences.
        fullest: maximum tokens of one sequence on any of them.
    """
    axis, b = "sequence" if run.layout.sequence_shards > 1 else "cp", run.layout.micro_batch
    once = Sent({
        (axis, "all-gather"): layers * (ranks - 1) * b * fullest * run.exact,
        (axis, "all-to-all"): layers * b * moved * run.itemsize * run.shape.hidden,
    })  # fmt: skip
    backward = Sent({(axis, "all-to-all"): once[axis, "all-to-all"]})
    if run.layout.recompute == "full":
        backward.add(once)
    return once, backward
