"""Position of one rank in a layout's mesh: one grid of ranks, without torch. No other code computes ranks."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from shoal.spec.layout import AXES, EXPERT_AXES, Layout, mesh_axes


class MeshPosition:
    """Ranks of a layout as a grid over `AXES`, seen from one rank, for meshes of any size.

    >>> place = MeshPosition(Layout(dp=2048, zero=1, tp=8, tp_x=2, pp=4), rank=3 * 2048 * 8)
    >>> [place.size(axis) for axis in ("shard", "tp_y", "tp/4", "world", "pp:0,3", "pp:0,1")]
    [2048, 4, 4, 65536, 2, 1]
    >>> place.index("pp"), place.index("tp")
    (3, 0)
    """

    def __init__(self, layout: Layout, rank: int):
        self.layout = layout
        self.rank = rank
        # An array of numpy: to index a tensor takes longer, and dry runs would see an operation.
        self.grid = np.arange(layout.world_size).reshape(layout.shape)

    @cached_property
    def _expert_place(self) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the ranks as a grid over `EXPERT_AXES`, and this rank's position in it."""
        grid = self.grid.reshape(self.layout.expert_shape)
        return grid, tuple(np.argwhere(grid == self.rank)[0].tolist())

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """This rank's index along each of `AXES`."""
        place = np.argwhere(self.grid == self.rank)[0].tolist()
        return dict(zip(AXES, place, strict=True))

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis, a merged axis, or a part of one (see `ranks`)."""
        return len(self.ranks(axis))

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis or merged axis."""
        return self.ranks(axis).index(self.rank)

    def ranks(self, axis: str) -> list[int]:
        """Return the global ranks that differ from this one only in ``axis``, in order.

        Besides `AXES`, `EXPERT_AXES` and merged axes (`shoal.spec.layout.mesh_axes`), these parts of axes exist:

        "pp:a,b": pipeline positions a and b, such as the holders of a tied embedding; only this rank if at neither.
        Also "tp:a,b".
        "tp_x": the neighbours in tp that split the hidden state. "tp_y": the other axis of their grid.
        "tp/n": the n neighbours in tp that hold the same key/value head if tp exceeds their number. Also "tp_y/n".
        "ulysses": the neighbours in cp that exchange tokens for heads. "ring": the ranks of ring attention.
        """
        if axis[2:3] == ":":
            ranks = [self.ranks(axis[:2])[int(place)] for place in axis[3:].split(",")]
            return ranks if self.rank in ranks else [self.rank]
        if "/" in axis:
            full, n = axis.split("/")
            return self._neighbours(full, int(n))
        if axis in ("tp_x", "tp_y", "ulysses", "ring"):  # the axis as a 2D grid; tp_x and ulysses are inner
            full, inner = ("tp", self.layout.tp_x) if axis.startswith("tp") else ("cp", self.layout.ulysses)
            if axis in ("tp_x", "ulysses"):
                return self._neighbours(full, inner)
            ranks = self.ranks(full)
            return ranks[ranks.index(self.rank) % inner :: inner]
        axes = mesh_axes(self.layout, axis)
        if axes and axes[0] in EXPERT_AXES[1:]:
            grid, place = self._expert_place
            where = tuple(slice(None) if name in axes else i for name, i in zip(EXPERT_AXES, place, strict=True))
            return grid[where].flatten().tolist()
        where = tuple(slice(None) if name in axes else self.coordinate[name] for name in AXES)
        return self.grid[where].flatten().tolist()

    def _neighbours(self, axis: str, n: int) -> list[int]:
        """Return this rank's run of n neighbours along an axis."""
        ranks = self.ranks(axis)
        start = ranks.index(self.rank) // n * n
        return ranks[start : start + n]

    def describe(self) -> str:
        """Return this rank's coordinates for messages: ``rank 5 (pp 1, dp_shard 0, tp 1)``."""
        where = ", ".join(f"{axis} {i}" for axis, i in self.coordinate.items() if self.size(axis) > 1)
        return f"rank {self.rank}" + (f" ({where})" if where else "")
