"""Random shardings, and routes run on the pool beside the plain product."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from shoal.engine.sharding.named_axes import NamedMesh, Sharding
from shoal.labs.autoshard.notation.network import Links, Rings
from shoal.labs.autoshard.notation.run import RouteRank, difference, random_array, shard_array
from shoal.labs.autoshard.notation.search import Route, RouteSearch
from shoal.labs.collectives.topology import Wire, fully_connected

SIZE = 16  # of every dim: it comes out even over any axes of up to 8 devices
WIRE = Wire(1e-6, 1e9)

meshes = st.sampled_from([
    NamedMesh("x", (2,)), NamedMesh("x", (4,)), NamedMesh("x", (8,)), NamedMesh("xy", (2, 2)), NamedMesh("xy", (2, 4)),
    NamedMesh("yx", (4, 2)), NamedMesh("xyz", (2, 2, 2)),
])  # fmt: skip


@st.composite
def shardings(draw, letters, mesh, *, unreduced=True):
    """Any legal sharding of some dims."""
    cut = dict.fromkeys(letters, "")
    left = ""
    for axis in draw(st.permutations(mesh.axes)):
        place = draw(st.sampled_from([*letters, "", *(["U"] if unreduced else [])]))
        if place == "U":
            left += axis
        elif place:
            cut[place] += axis
    return Sharding(tuple(cut.items())).with_unreduced(left)


def planner(mesh, sizes, *, links=True, itemsize=8, peak=1e9):
    """Prices on a fully connected network, or on rings."""
    network = Links(mesh, fully_connected(mesh.ranks, WIRE)) if links else Rings(mesh, WIRE)
    return RouteSearch(mesh, sizes, itemsize, network, peak_flops=peak)


class Counted:
    """Counts the elements that this process sends from point to point."""

    def __init__(self):
        self.elements = 0

    def __enter__(self):
        self.right = dist.batch_isend_irecv

        def count(transfers):
            self.elements += sum(t.tensor.numel() for t in transfers if t.op is dist.isend)
            return self.right(transfers)

        dist.batch_isend_irecv = count
        return self

    def __exit__(self, *_):
        dist.batch_isend_irecv = self.right


def run_routes(routes: list[Route], mesh: NamedMesh, sizes) -> list[tuple[float, int]]:
    """Each route on this rank: its largest error, and the elements that it sent."""
    runner, rank, results = RouteRank(mesh), dist.get_rank(), []
    for route in routes:
        a, b = random_array(route.product.left, sizes, 1), random_array(route.product.right, sizes, 2)
        mine = shard_array(a, route.a, rank, sizes, mesh), shard_array(b, route.b, rank, sizes, mesh)
        with Counted() as counted:
            _, _, out = runner.run(route, *mine)
        plain = torch.einsum(route.product.einsum, a, b)
        results.append((difference(out, plain, route.out, runner, sizes), counted.elements))
    return results
