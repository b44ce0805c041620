"""Bytes alive between the two halves of a split backward (`shoal.engine.parallel.weight_grad`).

The first half computes activation gradients and frees the saved tensors, except both factors of each weight gradient:
the input of every product, and the gradient of its output. The second half needs nothing else. With recomputation,
these factors exceed what the forward had saved.
"""

from __future__ import annotations

from shoal.planning.cost.memory import activations, latent_attention
from shoal.planning.cost.memory.saved import Saved, entered, into_block, multiplied
from shoal.planning.cost.micro_batch import MicroBatch, once
from shoal.planning.cost.parameters import StagePart


def between(run: MicroBatch, part: StagePart) -> int:
    """Return the bytes of one micro-batch on a stage."""
    total = 0
    for (sparse, skips, number), count in activations.kinds(run, part.layers).items():
        total += count * activations.total(layer(run.chosen if skips else run, sparse, number))
    if part.first:
        total += activations.total(activations.embedding(run)) + run.itemsize * run.tokens * run.shape.hidden
    return total + (head(run) if part.last else 0)


@once
def layer(run: MicroBatch, sparse: bool, number: int = 0) -> list[Saved]:
    """Return the tensors of one layer."""
    shape, y, x, h = run.shape, run.layout.tp_y, run.layout.tp_x, run.hidden_local
    if shape.latent is not None:
        return latent_attention.between_halves(run, number) + feed_forward(run, sparse, number)
    width = shape.heads * shape.head_dim // y
    keys = shape.kv_heads * shape.head_dim // min(y, shape.kv_heads)
    projections = [f"attention.{name}" for name in "qkv"]
    alone = y > shape.kv_heads  # key/value weights are then distributed differently from the queries'
    found = _product(run, "attention", number, projections, None, width + 2 * keys, joined=not alone and x == 1)
    found += _product(run, "attention output", number, ["attention.out"], width, h)
    return found + feed_forward(run, sparse, number)


def feed_forward(run: MicroBatch, sparse: bool, number: int = 0) -> list[Saved]:
    """Return the tensors of one layer's feed-forward block."""
    return _experts(run) if sparse else block(run, run.shape.ffn, number)


def block(run: MicroBatch, width: int, number: int = 0) -> list[Saved]:
    """Return the tensors of a feed-forward block of this width."""
    f, h, into = width // run.layout.tp_y, run.hidden_local, into_block(run, "mlp")
    found = _product(run, "mlp", number, into, None, f * len(into), joined=run.gated)
    return found + _product(run, "activation", number, ["mlp.down"], f, h)


def _product(
    run: MicroBatch, what: str, number: int, names: list[str], into: int | None, out: int, *, joined: bool = False
) -> list[Saved]:
    """Return the tensors of products with one input.

    Args:
        into, out: elements per token, in the input (None at the start of a block) and in all outputs.
        joined: output gradients are concatenated for one product; biases need each of them, unless fused operators take
            the results as one tensor, whose gradient is one too.
    """
    e, n = run.itemsize, run.tokens
    names = [f"layers.{number}.{name}" for name in names]
    kept = f"{what} input"
    found = entered(run, kept, names) if into is None else multiplied(run, kept, "", into, names)
    coded = sum(run.eight is not None and run.eight.takes(name) for name in names)
    one = run.fused and run.layout.cp == 1
    biased = run.shape.family == "gpt" and ((joined and not one) or coded)
    codes = 0 if run.eight is None else run.eight.codes(n * out * coded)
    found.append(Saved(f"gradients of {what}", "", (e * n * out * (len(names) - coded) + codes) // len(names)))
    return found + ([Saved(f"gradients of {what} for biases", "", e * n * out)] if biased else [])


def _experts(run: MicroBatch) -> list[Saved]:
    shape, layout, e = run.shape, run.layout, run.itemsize
    experts, rows = shape.moe, run.routed
    h, f, into = shape.hidden, experts.ffn // layout.expert_tensor, 1 if shape.family == "gpt" else 2
    found = [
        Saved("rows of experts", "[m, h]", e * rows.computed * h),
        Saved("gradients inside experts", "[m, f]", e * rows.computed * f * into),
        Saved("activations of experts", "[m, f]", e * rows.computed * f),
        Saved("gradients of experts", "[m, h]", e * rows.computed * h),
    ]
    return found + (block(run, experts.shared * experts.ffn) if experts.shared else [])


@once
def head(run: MicroBatch) -> int:
    """Return the bytes of the output matrix's input and of the logits' gradient."""
    return activations.head_input(run).bytes + run.itemsize * run.tokens * run.shape.vocabulary_rows(run.layout.tp)
