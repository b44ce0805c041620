"""The part of a model that each pipeline stage keeps, as the cost formulas take it."""

from __future__ import annotations

from shoal.pipeline.partition import layers_of
from shoal.pipeline.program import Program
from shoal.planning.cost.parameters import StagePart
from shoal.spec.catalog import ModelShape


def stage_parts(shape: ModelShape, program: Program) -> list[StagePart]:
    """Of every stage, in order."""
    layers, depth = layers_of(shape, program), program.depth
    shared = shape.tied and depth > 1
    of_copy = [StagePart(layers[i], i == 0, i == depth - 1, shared) for i in range(depth)]
    return of_copy * program.copies


def parts_of(shape: ModelShape, program: Program, pp_index: int) -> list[StagePart]:
    """Of the stages that one pipeline rank holds."""
    parts = stage_parts(shape, program)
    return [parts[stage] for stage in program.stages_of(pp_index)]
