"""Bytes that multi-head latent attention saves for its backward, and leaves between the halves of one.

Mirrors `shoal.engine.models.latent_attention`. Latents are computed from the tokens between tensor-parallel regions and
used for all tokens. Values have the width of queries in the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.planning.cost.memory.saved import Saved, blocks, entered, find_format, gathers_again, multiplied, scores
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.spec.layout import Recompute


class Widths(NamedTuple):
    """Elements per token on one rank."""

    queries: int  # latent of queries; 0 if they are computed from the hidden state
    narrow: int  # latent of keys and values with the shared rotated key
    rank: int  # this latent alone
    heads: int  # queries, keys, or values with zeros, of the rank's heads
    expanded: int  # keys without the rotated part, and values
    values: int  # values of the rank's heads

    @property
    def latents(self) -> int:
        """All that is computed from the hidden state by matrices that every rank has."""
        return self.queries + self.narrow

    @staticmethod
    def build(run: MicroBatch) -> Widths:
        shape, latent, heads = run.shape, run.shape.latent, run.shape.heads // run.layout.tp
        assert latent is not None
        return Widths(
            latent.query_rank or 0, latent.key_value_rank + latent.rotary_dim, latent.key_value_rank,
            heads * shape.query_dim, heads * (shape.head_dim + shape.value_dim), heads * shape.value_dim,
        )


def attention(run: MicroBatch, mode: Recompute, number: int) -> list[Saved]:
    """Return the saved tensors of one layer's attention."""
    e, n, of, layout = run.itemsize, run.tokens, Widths.build(run), run.layout
    name, alone = f"layers.{number}.attention", layout.cp == 1 and mode == "none"
    saved = _inputs(run, of, name) + _norm(run, of.queries, of.queries) + _norm(run, of.rank, of.narrow)
    saved += _into_heads(run, of, name)
    keys, window = n, run.window(number)
    if alone and run.stores_scores:  # each block copies the keys it attends to
        keys = layout.micro_batch * sum(seen for _, seen in blocks(run.s_local, window))
    saved += [Saved("q", "[b, a/t, s, d + r]", e * n * of.heads), Saved("k, v", "", 2 * e * keys * of.heads)]
    if alone and run.stores_scores:
        softmax = layout.micro_batch * run.shape.heads // layout.tp * scores(run.s, window)
        saved.append(Saved("softmax", "[b, a/t, s, s]", e * softmax))
    elif mode == "none":
        saved.append(Saved("log-sum-exp", "[b, a/t, s]", run.exact * n * run.shape.heads // layout.tp))
        saved.append(Saved("attention output with zeros", "[b, a/t, s, d + r]", e * n * of.heads))
        if layout.cp == 1 and (run.masked or window) and not run.by_lengths and not run.shape.by_blocks:
            of_mask = n if run.masked else run.s
            saved.append(Saved("mask as numbers", "[b, 1, s, s]", e * of_mask * run.s))
    return saved + multiplied(run, "attention output", "[b, s, a w/t]", of.values, [f"{name}.out"])


def _inputs(run: MicroBatch, of: Widths, name: str) -> list[Saved]:
    """Return the inputs of the products with the hidden state."""
    h, between = run.shape.hidden, run.tokens_between
    if of.queries:
        down = [f"{name}.q_down", f"{name}.kv_down"]
        return multiplied(run, "attention input", "[b, s, h]", h, down, tokens=between)
    q, kv = f"{name}.q", f"{name}.kv_down"
    if not run.layout.sequence_parallel or (gathers_again(run, [q]) and not find_format(run, [q, kv])):
        return multiplied(run, "attention input", "[b, s, h]", h, [q, kv], tokens=between)
    own = multiplied(run, "own attention input", "[b, s/t, h]", h, [kv], tokens=between)
    return own + entered(run, "attention input", [q])


def _norm(run: MicroBatch, width: int, around: int) -> list[Saved]:
    """Return the saved tensors of a latent's norm, whose input is a part of a tensor of width ``around``."""
    m = run.tokens_between
    if not width:
        return []
    if run.fused or run.itemsize >= 4:
        return [Saved("latent", "[b, s, c]", run.itemsize * m * around), Saved("latent 1/rms", "[b, s]", run.exact * m)]
    return [Saved("latent, normalised too, fp32", "[b, s, c]", 2 * 4 * m * width), Saved("latent 1/rms", "", 4 * m)]


def _into_heads(run: MicroBatch, of: Widths, name: str) -> list[Saved]:
    """Return the inputs of the products that make heads of latents; over tp parts of one gathered tensor."""
    up = [(of.queries, f"{name}.q_up")] if of.queries else []
    up.append((of.rank, f"{name}.kv_up"))
    if run.layout.tp == 1 or run.eight is not None:
        return [saved for width, layer in up for saved in multiplied(run, "latent of heads", "", width, [layer])]
    return [Saved("latents of all tokens", "[b, s, c]", run.itemsize * run.tokens * of.latents)]


def between_halves(run: MicroBatch, number: int) -> list[Saved]:
    """Return the factors of attention's weight gradients, which the first half of a backward leaves."""
    e, n, m, of = run.itemsize, run.tokens, run.tokens_between, Widths.build(run)
    name = f"layers.{number}.attention"
    found = _inputs(run, of, name) + _into_heads(run, of, name)
    found += multiplied(run, "attention output", "", of.values, [f"{name}.out"])
    gradients = {
        "latents": m * of.latents, "queries": n * of.heads, "keys and values": n * of.expanded,
        "attention output": n * run.shape.hidden,
    }  # fmt: skip
    sizes = {what: e * n if run.eight is None else run.eight.codes(n) for what, n in gradients.items()}
    return found + [Saved(f"gradients of {what}", "", size) for what, size in sizes.items()]
