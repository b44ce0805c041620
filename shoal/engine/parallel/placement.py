"""Placement of a parameter on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.base.boxes import Box, flat_range

ENDS = "ends"
"""Entry of ``sum_over``: the first and last stages of the model, which share a tied embedding."""


@dataclass(frozen=True)
class ParamPlacement:
    """Part of a parameter that this rank holds after tensor and pipeline parallelism.

    Attributes:
        name: name in the full model.
        whole: global shape.
        box: the part held by this rank.
        local: allocated shape; padding, if any, follows the box along dim 0.
        sum_over: mesh axes besides dp over which this rank's gradient is a partial sum, or `ENDS`.
        copies: number of ranks along tp and pp that hold this box.
        stages: number of pipeline stages that hold the parameter.
        primary: whether this rank saves and counts the box, among its holders.
        replicas: mesh axis of the replicas: "replicas", or "edp" for experts.
    """

    name: str
    whole: tuple[int, ...]
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

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """Yield the global boxes of elements ``start:stop`` of the flat local tensor, without padding.

        Yields:
            (offset from ``start``, box), as in `shoal.base.boxes.flat_range`.
        """
        for offset, box in flat_range(self.box.shape, start, min(stop, self.box.numel)):
            yield offset, box.within(self.box)
