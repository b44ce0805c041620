"""Reduce a model to one pipeline stage, and mark the parameters that two stages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.placement import ENDS, ParamPlacement
from shoal.spec.catalog import ModelShape


def keep_stage(model: Transformer, stage: int, layers: Sequence[range]) -> None:
    """Remove from a model, in place, everything that other stages compute.

    Args:
        layers: layer range of every stage.
    """
    keep, stages = layers[stage], len(layers)
    for name in list(model.layers):
        if int(name) not in keep:
            del model.layers[name]
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = model.head = None


def share_tied(
    splits: dict[str, ParamPlacement], shape: ModelShape, stage: int, stages: int
) -> dict[str, ParamPlacement]:
    """Mark a tied embedding held by the first and the last stage: one parameter with two partial gradients."""
    if not shape.tied or stages == 1:
        return splits
    local, name = ("embed.token.weight", "head.weight")[stage > 0], "embed.token.weight"
    if local not in splits:
        return splits
    split = splits[local]
    shared = replace(
        split, name=name, sum_over=(*split.sum_over, ENDS), copies=2 * split.copies, stages=2 * split.stages,
        primary=split.primary and stage == 0,
    )
    return splits | {local: shared}


def share_copies(splits: dict[str, ParamPlacement], axis: str, copy: int) -> dict[str, ParamPlacement]:
    """Mark a stage's parameters as held by two model copies, each with the gradients of its micro-batches.

    Args:
        axis: mesh axis of the ranks that hold the copies of this stage.
        copy: index of this copy.
    """
    return {
        local: replace(
            split, sum_over=split.sum_over if ENDS in split.sum_over else (*split.sum_over, axis),
            copies=2 * split.copies, stages=2 * split.stages, primary=split.primary and copy == 0,
        )
        for local, split in splits.items()
    }
