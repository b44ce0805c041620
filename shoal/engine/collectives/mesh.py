"""One grid of ranks, from which every group of the run is sliced.

Nothing else in shoal computes a rank by hand, and no group is a global: the mesh is passed to what needs it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cached_property

import torch
import torch.distributed as dist

from shoal.engine.collectives.group import Group, create_shared, local_progress, publish_host, world
from shoal.engine.collectives.shm.progress import Progress
from shoal.engine.collectives.throttle import ThrottledLink
from shoal.spec.layout import AXES, EXPERT_AXES, Layout, axes_of


class Mesh:
    """The ranks of a layout as a grid over `AXES`, seen from one rank.

    Groups are created on first use, and by all of a group's members at the same point of their programs. A group of one
    rank is None: collectives over None do nothing.

    >>> mesh = Mesh(Layout(dp=2, tp=2), rank=2)
    >>> mesh.index("dp"), mesh.index("tp"), mesh.ranks("tp"), mesh.ranks("dp")
    (1, 0, [2, 3], [0, 2])

    Args:
        transport: "auto" has CPU ranks of one host communicate through memory that they share; "backend" has them all
            use the process group's backend.
        link: the network that collectives seem to go through; None imitates none.
    """

    def __init__(
        self, layout: Layout, rank: int, device: torch.device | str = "cpu", transport: str = "auto",
        link: ThrottledLink | None = None,
    ):
        self.layout = layout
        self.rank = rank
        self.device = torch.device(device)
        self.transport, self.link = transport, link
        if dist.is_initialized() and transport == "auto":
            publish_host(self.device)
        self.grid = torch.arange(layout.world_size).view(layout.shape)
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._named: dict[tuple[str, str, tuple[int, ...]], Group] = {}  # the same, each axis with its own count

    @cached_property
    def _expert_place(self) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The same ranks as a grid over `EXPERT_AXES`, and this rank's place in it."""
        grid = self.grid.reshape(self.layout.expert_shape)
        return grid, tuple((grid == self.rank).nonzero()[0].tolist())

    @cached_property
    def coordinate(self) -> dict[str, int]:
        """This rank's place along each of `AXES`."""
        place = (self.grid == self.rank).nonzero()[0].tolist()
        return dict(zip(AXES, place, strict=True))

    def size(self, axis: str) -> int:
        """Number of ranks along an axis, a merged axis, or a part of one (see `ranks`)."""
        return len(self.ranks(axis))

    def index(self, axis: str) -> int:
        """This rank's place along an axis or merged axis."""
        return self.ranks(axis).index(self.rank)

    def ranks(self, axis: str) -> list[int]:
        """Global ranks that differ from this one in ``axis`` alone, in order.

        Besides `AXES` and `EXPERT_AXES`, there are several as one (`shoal.spec.layout.axes_of`), and these parts of
        axes: "pp:a,b", the places a and b of the pipeline (as those that share a tied embedding), this rank alone if
        it is at neither;
        "tp_x", the neighbours in tp that split the hidden state; "tp_y", the other axis of their grid;
        "tp/n", the n neighbours in tp that hold the same key/value head where tp exceeds their number, and "tp_y/n";
        "ulysses", the neighbours in cp that exchange tokens for heads; "ring", those that keys and values go round.
        """
        if axis.startswith("pp:"):
            ranks = [self.ranks("pp")[int(place)] for place in axis[3:].split(",")]
            return ranks if self.rank in ranks else [self.rank]
        if "/" in axis:
            whole, n = axis.split("/")
            return self._neighbours(whole, int(n))
        if axis in ("tp_x", "tp_y", "ulysses", "ring"):  # an axis as a grid, the first of each the inner one
            whole, inner = ("tp", self.layout.tp_x) if axis.startswith("tp") else ("cp", self.layout.ulysses)
            if axis in ("tp_x", "ulysses"):
                return self._neighbours(whole, inner)
            ranks = self.ranks(whole)
            return ranks[ranks.index(self.rank) % inner :: inner]
        axes = axes_of(self.layout, axis)
        if axes and axes[0] in EXPERT_AXES[1:]:
            grid, place = self._expert_place
            where = tuple(slice(None) if name in axes else i for name, i in zip(EXPERT_AXES, place, strict=True))
            return grid[where].flatten().tolist()
        where = tuple(slice(None) if name in axes else self.coordinate[name] for name in AXES)
        return self.grid[where].flatten().tolist()

    def _neighbours(self, axis: str, n: int) -> list[int]:
        """Those of this rank where an axis is cut into runs of n."""
        ranks = self.ranks(axis)
        start = ranks.index(self.rank) // n * n
        return ranks[start : start + n]

    def with_layout(self, layout: Layout) -> Mesh:
        """The same ranks and groups for a layout of the same shape."""
        mesh = copy(self)
        mesh.layout = layout
        return mesh

    def replica(self) -> Mesh:
        """This rank's replica alone: the same pipeline and tensor axes, and one replica that is not sharded."""
        replicate, shard = self.coordinate["dp_replicate"], self.coordinate["dp_shard"]
        mesh = copy(self)
        mesh.layout = self.layout.model_copy(update={"dp": 1, "zero": 0, "zero_shard": None})
        mesh.grid = self.grid[:, replicate, None, shard, None]
        del mesh.coordinate  # of the whole grid
        return mesh

    @property
    def _progress(self) -> Progress | None:
        """Of what is under way in shared memory; None where there is none."""
        return local_progress(self.device) if self.transport == "auto" else None

    def group(self, axis: str, purpose: str = "") -> Group | None:
        """The group along ``axis``, or None if it has one rank.

        Args:
            purpose: asks for a group of its own over the same ranks, so that unrelated traffic is not ordered with it.
        """
        ranks = tuple(self.ranks(axis))
        # torch names a group by its ranks and by how many its process has: all members must have made equally many.
        # So whoever is at none of the places of a "pp:a,b" makes one too, of itself alone.
        outside = len(ranks) == 1 and "," in axis
        if len(ranks) == 1 and not outside:
            return None
        key = (purpose, ranks)
        if key not in self._groups:
            if not purpose and len(ranks) == dist.get_world_size():
                backend = world()
            else:
                backend = dist.new_group(list(ranks), use_local_synchronization=True)
            shared = None
            if len(ranks) > 1 and self._progress is not None:
                with torch.device("cpu"):  # the caller may be building a model on the meta device
                    shared = create_shared(backend, self._progress)
            self._groups[key] = Group(backend, shared)
        if outside:
            return None
        group = self._groups[key]
        return self._named.setdefault((axis, *key), Group(group.backend, group.shared, self.link))

    def group_of_several(self, axis: str, purpose: str = "") -> Group:
        """The group along an axis that has more than one rank, as `group` gives it."""
        group = self.group(axis, purpose)
        assert group is not None, axis
        return group

    def sent(self) -> Counter[tuple[str, str]]:
        """Bytes that this rank has sent so far, by axis and kind of collective, as `Group.count` has them."""
        total: Counter[tuple[str, str]] = Counter()
        for (axis, _, _), group in self._named.items():
            total.update({(axis, kind): size for kind, size in group.sent.items()})
        return total

    def calls(self) -> Counter[tuple[str, str, int]]:
        """How many collectives this rank has started so far, by axis, kind and bytes, as `Group.calls` has them."""
        total: Counter[tuple[str, str, int]] = Counter()
        for (axis, _, _), group in self._named.items():
            total.update({(axis, kind, size): number for (kind, size), number in group.calls.items()})
        return total

    def real_index_tensors(self) -> AbstractContextManager[object]:
        """What is made in it has numbers, also where others have none (`shoal.engine.collectives.dry_groups`): indices
        that decide how much is sent."""
        return nullcontext()

    def describe(self) -> str:
        """This rank's coordinates, for messages: ``rank 5 (pp 1, dp_shard 0, tp 1)``."""
        where = ", ".join(f"{axis} {i}" for axis, i in self.coordinate.items() if self.size(axis) > 1)
        return f"rank {self.rank}" + (f" ({where})" if where else "")


