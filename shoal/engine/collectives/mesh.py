"""Device mesh: the process groups of a run, along the axes of its one grid of ranks.

No group is global: the mesh is passed to the code that needs it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from copy import copy

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.engine.collectives.group import (
    Group,
    ThrottledLink,
    create_backend,
    create_shared,
    local_progress,
    publish_host,
    world,
)
from shoal.engine.collectives.pending import DryTransport, Transport
from shoal.engine.collectives.position import MeshPosition
from shoal.engine.collectives.staged import StagedTransport
from shoal.spec.layout import Layout


class Mesh(MeshPosition):
    """Ranks of a layout, and their process groups, seen from one rank.

    Groups are created on first use, by all members at the same point of their programs. A group of one rank is None,
    and collectives over None do nothing.

    >>> mesh = Mesh(Layout(dp=2, tp=2), rank=2)
    >>> mesh.index("dp"), mesh.index("tp"), mesh.ranks("tp"), mesh.ranks("dp")
    (1, 0, [2, 3], [0, 2])

    Args:
        transport: "auto" uses shared memory between CPU ranks of one host; "backend" always uses the process group's
            backend; "staged" exchanges the device's tensors through host memory, which lets ranks share a CUDA device
            (`shoal.engine.device.choose_transport`).
    """

    def __init__(
        self, layout: Layout, rank: int, device: torch.device | str = "cpu", transport: str = "auto",
        link: ThrottledLink | None = None,
    ):
        super().__init__(layout, rank)
        self.device = torch.device(device)
        self.transport, self.link = transport, link
        # Where exchanged tensors are.
        self._exchanged_on = torch.device("cpu") if transport == "staged" else self.device
        if dist.is_initialized() and transport in ("auto", "staged"):
            publish_host(self._exchanged_on)
        if transport == "staged" and rank == 0:
            warnings.warn("ranks exchange tensors through host memory: for checking, not for speed", stacklevel=2)
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._named: dict[tuple[str, str, tuple[int, ...]], Group] = {}  # the same, with separate counts per axis

    def with_layout(self, layout: Layout) -> Mesh:
        """Return a mesh with the same ranks and groups for a layout of the same shape."""
        mesh = copy(self)
        mesh.layout = layout
        return mesh

    @property
    def is_dry_run(self) -> bool:
        """Whether the other ranks do not exist (`DryMesh`)."""
        return self.transport == "dry"

    def replica(self) -> Mesh:
        """Return the mesh of this rank's replica: same pipeline and tensor axes, one unsharded replica."""
        replicate, shard = self.coordinate["dp_replicate"], self.coordinate["dp_shard"]
        mesh = copy(self)
        mesh.layout = self.layout.model_copy(update={"dp": 1, "zero": 0, "zero_shard": None})
        mesh.grid = self.grid[:, replicate, None, shard, None]
        del mesh.coordinate  # cached for the full grid
        return mesh

    def group(self, axis: str, purpose: str = "") -> Group | None:
        """Return the group along ``axis``, or None if it has one rank.

        Args:
            purpose: creates a separate group over the same ranks, so that unrelated traffic is not ordered with it.
        """
        ranks = tuple(self.ranks(axis))
        # torch names a group by its ranks and the number of groups in the process, so all members must have created
        # equally many. A rank at none of the positions of "pp:a,b" therefore creates a group of itself.
        outside = len(ranks) == 1 and "," in axis
        if len(ranks) == 1 and not outside:
            return None
        key = (purpose, ranks)
        if key not in self._groups:
            if not purpose and len(ranks) == dist.get_world_size():
                backend = world()
            else:
                backend = create_backend(ranks)
            self._groups[key] = Group(ranks, backend.rank(), backend, self._connect(backend))
        if outside:
            return None
        name = (axis, *key)
        if name not in self._named:
            group = self._groups[key]
            self._named[name] = Group(ranks, group.rank(), group.backend, group.shared, self.link)
        return self._named[name]

    def _connect(self, backend: dist.ProcessGroup) -> Transport | None:
        """Return the transport of a group, or None if its tensors use the backend. Collective."""
        if backend.size() == 1 or self.transport == "backend":
            return None
        shared = None
        if (progress := local_progress(self._exchanged_on)) is not None:
            with torch.device("cpu"):  # the caller may use the meta device while building a model
                shared = create_shared(backend, progress)
        if self.transport == "auto":
            return shared
        ranks = dist.get_process_group_ranks(backend)
        return StagedTransport(Group(ranks, backend.rank(), backend, shared))

    def required_group(self, axis: str, purpose: str = "") -> Group:
        """Return the group along an axis with more than one rank; see `group`."""
        group = self.group(axis, purpose)
        assert group is not None, axis
        return group

    def sent(self) -> Counter[tuple[str, str]]:
        """Return the bytes sent by this rank, by axis and kind of collective; see `Group.count`."""
        total: Counter[tuple[str, str]] = Counter()
        for (axis, _, _), group in self._named.items():
            total.update({(axis, kind): size for kind, size in group.sent.items()})
        return total

    def calls(self) -> Counter[tuple[str, str, int]]:
        """Return the number of collectives started by this rank, by axis, kind and bytes; see `Group.calls`."""
        total: Counter[tuple[str, str, int]] = Counter()
        for (axis, _, _), group in self._named.items():
            total.update({(axis, kind, size): number for (kind, size), number in group.calls.items()})
        return total

    def real_index_tensors(self) -> AbstractContextManager[object]:
        """Return a context whose tensors have values even in a dry run (`DryMesh`).

        Use it for indices that determine the amount of communication.
        """
        return nullcontext()


class DryMesh(Mesh):
    """Mesh of one rank in a world of any size; counts communication but performs none.

    >>> mesh = DryMesh(Layout(dp=12500, tp=8), rank=77)
    >>> mesh.group("dp").size(), mesh.group("tp").rank()
    (12500, 5)
    """

    def __init__(self, layout: Layout, rank: int, *, by_gloo: bool = False, device: str = "cpu"):
        super().__init__(layout, rank, device, transport="dry")
        self.by_gloo = by_gloo

    def group(self, axis: str, purpose: str = "") -> Group | None:
        ranks = tuple(self.ranks(axis))
        if len(ranks) == 1:
            return None
        name = (axis, purpose, ranks)
        if name not in self._named:
            shared = DryTransport(ranks, by_gloo=self.by_gloo)
            self._named[name] = Group(ranks, ranks.index(self.rank), shared=shared)
        return self._named[name]

    def real_index_tensors(self) -> AbstractContextManager[object]:
        # On fake CUDA, a dispatch mode knows the values (`tests.fake_cuda.values`).
        return unset_fake_temporarily() if self.device.type == "cpu" else nullcontext()
