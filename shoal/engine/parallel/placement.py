"""What one rank's copy of a parameter is, of the whole parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.base.boxes import Box, flat_range

ENDS = "ends"
"""In ``sum_over``: the stages that begin and end the model, wherever they are, which share a tied embedding."""


@dataclass(frozen=True)
class ParamPlacement:
    """How tensor and pipeline parallelism left one parameter on this rank.

    Attributes:
        name: the parameter's name in the whole model.
        whole: its whole shape.
        box: the part of it that is here.
        local: the shape that is allocated; padding, if any, comes after the box along dim 0.
        sum_over: mesh axes over which this rank's gradient is a partial sum (besides dp), or `ENDS`.
        copies: how often this very box is held along tp and pp.
        stages: of the pipeline that hold the parameter.
        primary: whether this rank, of those, is the one that saves and counts it.
        replicas: mesh axis over which its replicas lie: "replicas", or "edp" for experts.
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
        """Elements allocated, padding included."""
        return math.prod(self.local)

    def boxes(self, start: int, stop: int) -> Iterator[tuple[int, Box]]:
        """The boxes of the whole parameter in elements ``start:stop`` of the flat local one, padding left out.

        Yields:
            (offset from ``start``, box) as `shoal.base.boxes.flat_range`.
        """
        for offset, box in flat_range(self.box.shape, start, min(stop, self.box.numel)):
            yield offset, box.within(self.box)
