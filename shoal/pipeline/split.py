"""Which layers a pipeline stage holds, and how the rest of a model is taken out."""

from __future__ import annotations

from dataclasses import replace

from shoal.catalog import ModelShape
from shoal.models.transformer import Transformer
from shoal.parallel.split import Split


def stage_layers(layers: int, stages: int) -> list[range]:
    """Consecutive layers for each stage, as even as can be.

    Left-over layers go to the later stages, which keep fewer micro-batches alive, but to the last one (which also has
    the head) after all others.

    >>> stage_layers(7, 4)
    [range(0, 2), range(2, 4), range(4, 6), range(6, 7)]
    >>> stage_layers(6, 4)
    [range(0, 1), range(1, 3), range(3, 5), range(5, 6)]
    """
    sizes = [layers // stages] * stages
    for stage in [*range(stages - 2, -1, -1), stages - 1][: layers % stages]:
        sizes[stage] += 1
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def keep_stage(model: Transformer, stage: int, stages: int) -> None:
    """Take out of a model, in place, everything that another stage computes."""
    keep = stage_layers(len(model.layers), stages)[stage]
    for name in list(model.layers):
        if int(name) not in keep:
            del model.layers[name]
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = model.head = None


def share_tied(splits: dict[str, Split], shape: ModelShape, stage: int, stages: int) -> dict[str, Split]:
    """Mark a tied embedding that the first and the last stage both hold: one parameter, two partial gradients."""
    if not shape.tied or stages == 1:
        return splits
    local, name = ("embed.token.weight", "head.weight")[stage > 0], "embed.token.weight"
    if local not in splits:
        return splits
    split = splits[local]
    shared = replace(
        split, name=name, sum_over=(*split.sum_over, "ends"), copies=2 * split.copies,
        primary=split.primary and stage == 0,
    )
    return splits | {local: shared}
