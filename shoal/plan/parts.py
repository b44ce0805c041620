"""The part of a model that each pipeline stage keeps, as the cost formulas take it."""

from __future__ import annotations

from shoal.catalog import ModelShape
from shoal.cost.state import StagePart
from shoal.pipeline.program import Program
from shoal.pipeline.split import layers_of


def stage_parts(shape: ModelShape, program: Program) -> list[StagePart]:
    """Of every stage, in order."""
    layers = layers_of(shape, program)
    shared = shape.tied and program.depth > 1
    return [
        StagePart(layers[stage % program.depth], program.is_first(stage), program.is_last(stage), shared)
        for stage in range(program.stages)
    ]


def parts_of(shape: ModelShape, program: Program, pp_index: int) -> list[StagePart]:
    """Of the stages that one pipeline rank holds."""
    parts = stage_parts(shape, program)
    return [parts[stage] for stage in program.stages_of(pp_index)]
