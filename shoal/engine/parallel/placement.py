"""Placement of a parameter on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoal.base.boxes import Box, flat_range
from shoal.engine.collectives.mesh import Mesh

ENDS = "ends"
"""Entry of ``sum_over``: the first and last stages of the model, which share a tied embedding."""


@dataclass(frozen=True)
class ParamPlacement:
    """Part of a parameter that this rank holds after tensor and pipeline parallelism.

    Attributes:
        local: allocated shape; padding, if any, follows the box along dim 0.
        sum_over: mesh axes besides dp over which this rank's gradient is a partial sum, or `ENDS`.
        copies: number of ranks along tp and pp that hold this box.
        primary: whether this rank saves and counts the box, among its holders.
        replicas: mesh axis of the replicas: "replicas", or "edp" for experts.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    local: tuple[int, ...]
    sum_over: tuple[str, ...] = ()
    copies: int = 1
    stages: int = 1
    primary: bool = True
    replicas: str = "replicas"

    @property
    def numel(self) -> int:
        """Number of allocated elements, including padding."""
        return math.prod(self.local)

    @property
    def treatment(self) -> tuple[tuple[str, ...], int, bool]:
        """Sort key that makes parameters with equal treatment adjacent: (`sum_over`, `copies`, whether a matrix)."""
        return self.sum_over, self.copies, len(self.global_shape) > 1

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """Yield (offset from ``start``, global box) for elements ``start:stop`` of the unpadded flat local tensor."""
        for offset, box in flat_range(self.box.shape, start, min(stop, self.box.numel)):
            yield offset, box.to_global(self.box)


def replicate(name: str, parameter: Tensor, mesh: Mesh, *, partial: bool) -> ParamPlacement:
    """Return the placement of a parameter that all tensor-parallel ranks hold; ``partial`` if their gradients differ.

    They differ where each rank sees its own part of the sequence.
    """
    shape = tuple(parameter.shape)
    return ParamPlacement(
        name, shape, Box.full(shape), shape,
        sum_over=("tp",) if partial else (), copies=mesh.size("tp"), primary=mesh.index("tp") == 0,
    )


def keep_box(
    module: nn.Module, name: str, part: str, box: Box, local: tuple[int, ...] | None = None, **fields: Any
) -> ParamPlacement:
    """Replace a parameter of a module by an uninitialised one that holds a box of it.

    Args:
        name, part: names of the module in the full model, and of the parameter in the module.
        local, fields: see `ParamPlacement`; ``local`` is by default the box's shape.
    """
    parameter = getattr(module, part)
    local = local or box.shape
    setattr(module, part, nn.Parameter(parameter.new_empty(local)))
    return ParamPlacement(f"{name}.{part}", tuple(parameter.shape), box, local, **fields)
