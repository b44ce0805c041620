"""The search: nothing is cheaper than what it finds; prices are those of the collectives on the network."""

import math
from itertools import pairwise
from itertools import product as pairs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.sharding.named_axes import NamedMesh, Sharding
from shoal.labs.autoshard.notation.network import Links
from shoal.labs.autoshard.notation.notation import parse
from shoal.labs.autoshard.notation.product import ShardedProduct
from shoal.labs.autoshard.notation.search import RouteSearch, find_forward
from shoal.labs.collectives.price import price
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.labs.collectives.topology import Wire, fully_connected, islands, torus
from shoal.planning.auto.moves import STEP
from tests.labs.autoshard.notation.drawn import SIZE, WIRE, planner, shardings

SIZES = dict.fromkeys("IJKDBF", SIZE)
small = st.sampled_from([NamedMesh("x", (2,)), NamedMesh("x", (4,)), NamedMesh("xy", (2, 2)), NamedMesh("xy", (4, 2))])


def distances(plan: RouteSearch, start: Sharding) -> dict[Sharding, float]:
    """Bellman and Ford's way: relax every move until nothing gets cheaper."""
    known, changed = {start: 0.0}, True
    while changed:
        changed = False
        for state in list(known):
            for move in plan.moves(state):
                cost = known[state] + move.seconds
                if cost < known.get(move.after, math.inf) - 1e-15:
                    known[move.after], changed = cost, True
    return known


@settings(max_examples=25)
@given(data=st.data(), mesh=small, links=st.booleans())
def test_nothing_is_cheaper_than_the_first_route(data, mesh, links):
    product = ShardedProduct("IJ", "JK", "IK")
    a, b, wanted = (data.draw(shardings(dims, mesh)) for dims in (product.left, product.right, product.out))
    plan = planner(mesh, SIZES, links=links, peak=1e12)
    found = plan.routes(product, plan.reach({a: 0.0}), plan.reach({b: 0.0}), wanted)
    seconds = [route.compute + route.communication for _, route in found]
    assert all(one <= other + 1e-9 for one, other in pairwise(seconds))
    best = math.inf
    ways = 0
    onward = {}
    for (x, to_x), (y, to_y) in pairs(distances(plan, a).items(), distances(plan, b).items()):
        local = product.local(x, y)
        if local is None:
            continue
        if local not in onward:
            onward[local] = distances(plan, local).get(wanted, math.inf)
        ways += onward[local] < math.inf
        compute = product.flops(x, y, SIZES, mesh) / plan.peak_flops
        best = min(best, to_x + to_y + compute + onward[local])
    assert seconds[0] == pytest.approx(best, abs=20 * STEP)
    assert len({route.multiplied for _, route in found}) == ways
    after = {(route.local, route.after) for _, route in found}
    for local, _ in after:
        for move in plan.moves(local):
            assert move.after != wanted or (local, (move,)) in after, "what one collective does is listed"


@settings(max_examples=8)
@given(data=st.data(), mesh=st.sampled_from([NamedMesh("x", (4,)), NamedMesh("xy", (2, 2))]))
def test_no_way_through_a_chain_is_cheaper(data, mesh):
    """Beside every way that the result between two products can lie when it is handed on."""
    arrays = [data.draw(shardings(dims, mesh, unreduced=False)) for dims in ("BD", "DF", "FD", "BD")]
    text = "In{} * Win{} * Wout{} -> Out{}".format(*arrays)
    expression, sizes = parse(text, mesh, {}, SIZE)
    plan = planner(mesh, sizes, peak=1e12)
    cost, routes = find_forward(expression, plan)[0]
    assert cost == pytest.approx(sum(route.compute + route.communication for route in routes), abs=30 * STEP)
    first, second = ShardedProduct("BD", "DF", "BF"), ShardedProduct("BF", "FD", "BD")
    a, b, c = (plan.reach({sharding: 0.0}) for sharding in arrays[:3])
    between = set(plan.reach({routes[0].out: 0.0}))
    best = math.inf
    for state in between:
        through = plan.routes(first, a, b, state)[0][0]
        best = min(best, through + plan.routes(second, plan.reach({state: 0.0}), c, arrays[3])[0][0])
    assert cost == pytest.approx(best, abs=30 * STEP)


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_a_mesh_of_one_axis_costs_what_the_collective_does(collective):
    mesh, size = NamedMesh("x", (8,)), 1e6
    topology = torus((8,), WIRE, 1e-12)
    prices = [
        price(describe(collective, name, 8), topology).seconds(size)
        for name in TEXTBOOK[collective] if name != "hierarchical"
    ]  # fmt: skip
    seconds, name = Links(mesh, topology).price(collective, "x", size)
    assert seconds == pytest.approx(min(prices))
    assert price(describe(collective, name, 8), topology).seconds(size) == seconds


def test_groups_that_share_a_link_share_its_bandwidth():
    """Two nodes of 4 with one NIC: along the axis between nodes, 4 groups of 2 cross it at once."""
    fast, nic = Wire(0.0, 1e12), Wire(0.0, 1e9)
    mesh = NamedMesh("xy", (2, 4))
    shared = Links(mesh, islands(8, 4, fast, nic, nics=1))
    own = Links(mesh, islands(8, 4, fast, nic, nics=4))
    across, alone = (net.price("all-gather", "x", 2e6)[0] for net in (shared, own))
    assert alone == pytest.approx(1e6 / 1e9)
    assert across == pytest.approx(4 * alone)
    assert shared.price("all-gather", "y", 2e6) == own.price("all-gather", "y", 2e6)


def test_axes_of_a_torus_do_not_disturb_each_other():
    mesh = NamedMesh("xy", (4, 4))
    net = Links(mesh, torus((4, 4), WIRE))
    one = Links(NamedMesh("x", (4,)), torus((4,), WIRE))
    for axis in "xy":
        assert net.price("all-gather", axis, 1e6)[0] == pytest.approx(one.price("all-gather", "x", 1e6)[0])


def test_what_no_move_reaches_is_refused():
    mesh = NamedMesh("x", (2,))
    plan = planner(mesh, SIZES)
    with pytest.raises(UsageError, match=r"\[I\] cannot become \[I\]\{Ux\}: no collective leaves an array unreduced"):
        plan.reshard(Sharding((("I", ""),)), Sharding((("I", ""),), "x"))
    with pytest.raises(UsageError, match="no route leads to"):  # J of 3 cannot be sharded, so nothing can be a sum
        plan = planner(mesh, {"I": 3, "J": 3, "K": 3})
        whole = [plan.reach({Sharding(((x, ""), (y, ""))): 0.0}) for x, y in ("IJ", "JK")]
        plan.routes(ShardedProduct("IJ", "JK", "IK"), *whole, Sharding((("I", ""), ("K", "")), "x"))


def test_a_topology_is_of_so_many_devices_as_can_be_looked_at():
    mesh = NamedMesh("xy", (16, 8))
    with pytest.raises(UsageError, match="at most 64"):
        Links(mesh, fully_connected(128, WIRE))
