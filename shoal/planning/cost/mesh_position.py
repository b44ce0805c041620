"""Position of one rank in a layout's mesh: what formulas of its traffic need, without torch."""

from __future__ import annotations

from typing import Protocol

from shoal.planning.cost.time.communication import axis_extent
from shoal.spec.layout import Layout


class MeshPosition(Protocol):
    """Part of `shoal.engine.collectives.mesh.Mesh` that knows where a rank is."""

    def index(self, axis: str) -> int:
        """Return the rank's index along an axis or merged axis."""

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis, a merged axis, or a part of one."""


class FirstOfStage:
    """Position of the first rank of a pipeline rank, for meshes of any size.

    >>> place = FirstOfStage(Layout(dp=2048, zero=1, tp=8, tp_x=2, pp=4), pp_rank=3)
    >>> [place.size(axis) for axis in ("shard", "tp_y", "tp/4", "world", "pp:0,3", "pp:0,1")]
    [2048, 4, 4, 65536, 2, 1]
    >>> place.index("pp"), place.index("tp")
    (3, 0)
    """

    def __init__(self, layout: Layout, pp_rank: int = 0):
        self.layout, self.pp_rank = layout, pp_rank

    def index(self, axis: str) -> int:
        """Return the rank's index along an axis: its pipeline rank, or 0."""
        return self.pp_rank if axis == "pp" else 0

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; see `shoal.engine.collectives.mesh.Mesh.ranks` for the names."""
        layout = self.layout
        if axis.startswith("pp:"):
            members = [int(place) for place in axis[3:].split(",")]
            return len(members) if self.pp_rank in members else 1
        if "/" in axis:
            return int(axis.partition("/")[2])
        parts = {"tp_x": layout.tp_x, "tp_y": layout.tp_y, "ulysses": layout.ulysses, "ring": layout.cp_ring}
        return parts[axis] if axis in parts else axis_extent(layout, axis)[0]
