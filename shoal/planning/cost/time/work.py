"""FLOPs of one rank per step: the matrix products of its stages as run by the engine.

`shoal.planning.cost.flops` has the FLOPs of the full model. A rank's FLOPs differ by padding (a vocabulary that tp does
not divide), replicated work (key/value heads, if tp exceeds their number) and recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shoal.planning.cost.memory.saved import blocks
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.parameters import StagePart


class Seen(NamedTuple):
    """The tokens of each sequence that a rank computes, and its attention scores."""

    tokens: tuple[int, ...]  # tokens of one sequence in each slice
    # for each slice, (queries, keys) of each rectangle of scores that a head computes in full
    scores: tuple[tuple[tuple[int, int], ...], ...]
    shared: int = 1  # ranks over which the heads are spread besides tp (`Layout.ulysses`)
    # ring attention, capped scores or sinks: recomputation covers all of it; unfused, it has three products in backward
    # besides the two that a kernel's backward recomputes
    around: bool = False


def seen_alone(run: MicroBatch, slices: Sequence[int] = (), window: int | None = None) -> Seen:
    """Return the tokens and scores if no other rank has a part of the sequences.

    Scores are counted in full, except blocks that are fully masked in unfused attention.

    Args:
        slices: tokens of each slice, if sequences come in slices that attend to the previous ones.
        window: of the layer; a kernel that reads it from a mask skips no score.
    """
    parts = tuple(slices) or (run.s,)
    starts = accumulate(parts, initial=0)
    scores = []
    for start, part in zip(starts, parts, strict=False):
        if run.kernel == "explicit" and not run.shape.by_blocks:
            scores.append(tuple(blocks(part, window, start)))
        else:
            t = start + part
            scores.append(((part, min(t, window) if window and run.by_lengths else t),))
    return Seen(parts, tuple(scores), around=run.shape.by_blocks)


def stage_flops(
    run: MicroBatch, part: StagePart, seen: Seen, chosen: Seen | None = None, local: Seen | None = None
) -> int:
    """Return the FLOPs of a stage's forward and backward of one micro-batch on one rank.

    A backward is two forwards. Recomputed attention stops when nothing more is needed: if unfused, before its last
    product.

    Args:
        chosen: like ``seen``, for the tokens that pass through mixture-of-depths layers.
        local: like ``seen``, for layers with a window.
    """
    shape = run.shape
    n = run.layout.micro_batch * sum(seen.tokens)
    total = 3 * 2 * n * shape.hidden * shape.vocabulary_rows(run.layout.tp) * part.last * (1 + shape.mtp_depth)
    for layer in range(shape.layers, shape.blocks) if part.last else ():  # multi-token prediction
        total += _layer(run, local if local and shape.reach(layer) else seen, shape.sparse(layer))
        total += 3 * 2 * (n // run.layout.sequence_shards) * 2 * shape.hidden**2
    passes = 3 if run.layout.recompute == "full" else 2
    for layer in part.layers:
        if not shape.skips(layer):
            total += _layer(run, local if local and shape.reach(layer) else seen, shape.sparse(layer))
            continue
        # The predictor's products; no gradient reaches its input, and matrix-vector products are not counted.
        up = 2 * (n // run.layout.sequence_shards) * shape.hidden * shape.mod.predictor
        total += _layer(run.chosen, chosen or seen_alone(run.chosen), shape.sparse(layer)) + passes * up
    return total


def _layer(run: MicroBatch, seen: Seen, sparse: bool) -> int:
    """Return the FLOPs of a layer's forward and backward with recomputation."""
    shape, t, y = run.shape, run.layout.tp, run.layout.tp_y
    b, n = run.layout.micro_batch, run.layout.micro_batch * sum(seen.tokens)
    q = shape.heads * shape.query_dim // t
    kv = shape.kv_heads * shape.head_dim // min(y, shape.kv_heads)  # tp_x ranks together
    projections = 2 * n * (shape.hidden * 2 * q + run.hidden_local * 2 * kv)
    if shape.latent is not None:
        projections = _latent_projections(run, n)
    product = 2 * b * q // seen.shared  # per score, with a key or with a value, in all heads
    core = 2 * product * sum(rows * keys for rectangles in seen.scores for rows, keys in rectangles)
    written = run.kernel == "explicit" or run.shape.softcap is not None
    core_again, core_backward = core, 5 * core // 2 if seen.around and written else 2 * core
    if written and not seen.around:
        core_again -= product * sum(rows * keys for rows, keys in (rectangles[-1] for rectangles in seen.scores))
    mlp = _experts(run) if sparse else _mlp(run, n, shape.ffn)
    again = {"none": 0, "selective": core_again, "full": projections + core + mlp}[run.layout.recompute]
    sums = _bias_sums(run) if sparse and shape.moe.biases else 0
    return 3 * (projections + mlp) + core + core_backward + again + sums


def _latent_projections(run: MicroBatch, tokens: int) -> int:
    """Return the FLOPs of latent attention's projections; latents are computed once per token, or on every rank."""
    shape, latent, t = run.shape, run.shape.latent, run.layout.tp
    assert latent is not None
    between = tokens // run.layout.sequence_shards
    down = latent.key_value_rank + latent.rotary_dim + (latent.query_rank or 0)
    queries = (latent.query_rank or shape.hidden) * shape.query_dim
    keys_values = latent.key_value_rank * (shape.head_dim + shape.value_dim)
    of_head = queries + keys_values + shape.value_dim * shape.hidden
    return 2 * (between * shape.hidden * down + tokens * shape.heads // t * of_head)


def _mlp(run: MicroBatch, tokens: int, width: int) -> int:
    matrices = 3 if run.shape.family == "llama" else 2
    return 2 * tokens * run.shape.hidden * matrices * (width // run.layout.tp)


def _bias_sums(run: MicroBatch) -> int:
    """Return the FLOPs of the gradients of the biases inside experts: products of their rows with 8 columns of ones.

    Where inputs are scaled (`scales_input`), the factors of the outer biases are choices, which have no gradient.
    """
    shape, experts = run.shape, run.shape.moe
    biases = 2 if shape.family == "llama" else 1
    inside = 2 * 8 * run.routed.computed * biases * (experts.ffn // run.layout.expert_tensor)
    return inside - experts.scales_input * 2 * run.routed.own * shape.hidden * experts.count


def _experts(run: MicroBatch) -> int:
    """Return the FLOPs of router, experts and shared experts, with balanced routing and no dropped tokens."""
    shape, experts, rows = run.shape, run.shape.moe, run.routed
    matrices = 3 if shape.family == "llama" else 2
    scored = 2 if experts.gate == "noisy-top-k" else 1
    router = 2 * rows.own * shape.hidden * experts.count * (scored + experts.biases)  # biases of experts: weights @ b
    inside = 2 * rows.computed * shape.hidden * matrices * (experts.ffn // run.layout.expert_tensor)
    return router + inside + _mlp(run, run.tokens, experts.shared * experts.ffn)
