"""Prices of collectives: textbook numbers, contention counted by hand, and no price below the lower bound."""

from fractions import Fraction
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.labs.collectives.description import Collective
from shoal.labs.collectives.price import Price, bus_bandwidth, fastest, lower_bound, price, price_round, traffic
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.labs.collectives.topology import Topology, Wire, fat_tree, fully_connected, islands, ring, torus

NAMES = [(collective, name) for collective, algorithms in TEXTBOOK.items() for name in algorithms]
ALPHA, BETA, GAMMA = 5e-6, 1 / 50e9, 1e-12
WIRE = Wire(ALPHA, 50e9)
FAST = Wire(2e-6, 450e9)


def test_a_broadcast_of_5_mb_to_7_peers_at_1_mb_a_second_takes_35_s_flat_and_15_s_by_a_tree():
    network = fully_connected(8, Wire(0.0, 1e6))
    assert price(describe("broadcast", "flat", 8), network).seconds(5e6) == pytest.approx(35)
    assert price(describe("broadcast", "tree", 8), network).seconds(5e6) == pytest.approx(15)


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_without_contention_the_price_is_the_textbooks(collective, name):
    for n in (2, 5, 8):
        d = describe(collective, name, n)
        time = price(d, fully_connected(n, WIRE, GAMMA))
        assert time.latency == pytest.approx(len(d.rounds) * ALPHA)
        assert time.per_byte == pytest.approx(float(d.volume) * BETA + float(d.reduced) * GAMMA)


@st.composite
def networks(draw) -> Topology:
    """Any network of 2 to 16 ranks."""
    kind = draw(st.sampled_from(("full", "ring", "2d", "3d", "tree", "islands")))
    if kind in ("2d", "3d"):
        dims = int(kind[0])
        shape = draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims).filter(lambda s: 1 < prod(s) <= 16))
        return torus(tuple(shape), WIRE, GAMMA)
    n = draw(st.integers(2, 16))
    size = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    if kind == "tree":
        return fat_tree(n, size, WIRE, draw(st.sampled_from((1.0, 2.0, 4.5))), GAMMA)
    if kind == "islands":
        nics = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        return islands(n, size, FAST, WIRE, nics, GAMMA)
    return (fully_connected if kind == "full" else ring)(n, WIRE, GAMMA)


@given(networks(), st.sampled_from(NAMES), st.sampled_from((0.0, 1e3, 1e6, 1e9)))
def test_nothing_is_cheaper_than_the_lower_bound(network, name, size):
    d = describe(*name, network.ranks, per_node=network.per_node)
    bound = lower_bound(d.collective, network.ranks)
    assert (len(d.rounds), d.volume, d.reduced) >= (bound.rounds, 0, 0)
    assert d.volume >= bound.volume and d.reduced >= bound.reduced
    assert price(d, network).seconds(size) >= bound.seconds(size, network) * (1 - 1e-9)


@given(networks(), st.data())
def test_routes_are_chains_of_links_and_the_shortest_there_are(network, data):
    source = data.draw(st.integers(0, network.ranks - 1))
    target = data.draw(st.integers(0, network.ranks - 1).filter(lambda rank: rank != source))
    route = network.route(source, target)
    assert all(edge in network.wires for edge in route)
    assert all(first[1] == second[0] for first, second in pairwise(route))
    nearest, seen = {f"rank {source}"}, 0
    if route[0][0] == f"rank {source}" and route[-1][1] == f"rank {target}":  # else it leaves by a network adapter
        while f"rank {target}" not in nearest:
            nearest |= {end for start, end in network.wires if start in nearest}
            seen += 1
        assert len(route) == seen


def test_bounds_that_are_reached():
    """The ring moves the least that can be, the tree needs the fewest rounds (Chan et al. 2007, table 1)."""
    for n in (2, 3, 8, 13):
        network = fully_connected(n, WIRE)
        bound = lower_bound(Collective.ALL_REDUCE, n)
        assert describe("all-reduce", "ring", n).volume == bound.volume == Fraction(2 * (n - 1), n)
        assert len(describe("broadcast", "tree", n).rounds) == lower_bound(Collective.BROADCAST, n).rounds
        assert price(describe("all-gather", "bruck", n), network).latency == pytest.approx(
            lower_bound(Collective.ALL_GATHER, n).rounds * ALPHA
        )


# ---- contention, by hand --------------------------------------------------------------------------------------------


def test_messages_over_one_link_share_it():
    line = ring(8, WIRE)
    shift = describe("all-to-all", "pairwise", 8).rounds[3]  # everyone to the rank 4 away, all the rising way round
    assert {(m.target - m.source) % 8 for m in shift} == {4}
    assert price_round(shift, Fraction(1), line).per_byte == pytest.approx(4 * BETA)
    assert price_round(shift, Fraction(1), line).latency == pytest.approx(4 * ALPHA)
    assert price_round(shift, Fraction(1), fully_connected(8, WIRE)).per_byte == pytest.approx(BETA)


def test_neighbours_of_a_ring_do_not_share():
    d = describe("all-reduce", "ring", 8)
    assert price(d, ring(8, WIRE)) == price(d, fully_connected(8, WIRE))
    assert set(traffic(d.messages, d.share, ring(8, WIRE)).values()) == {Fraction(7, 4)}


def test_an_oversubscribed_trunk_is_shared():
    d = describe("all-reduce", "recursive-doubling", 8).rounds  # distances 1, 2, 4
    full, thin = fat_tree(8, 4, WIRE), fat_tree(8, 4, WIRE, 4.0)
    for inside in d[:2]:
        assert price_round(inside, Fraction(1), thin) == price_round(inside, Fraction(1), full)
    assert price_round(d[2], Fraction(1), full).per_byte == pytest.approx(BETA)
    assert price_round(d[2], Fraction(1), thin).per_byte == pytest.approx(4 * BETA)


def test_nics_are_shared_and_hierarchy_spares_them():
    network = islands(16, 8, FAST, WIRE, nics=1)
    ring_, tiers = (describe("all-reduce", name, 16, per_node=8) for name in ("pairwise", "hierarchical"))
    out = ("node 0 nic 0", "network")
    # Of a node's 8 ranks, each exchanges 1/16 S with each of the 8 outside, twice.
    assert traffic(ring_.messages, ring_.share, network)[out] == 8
    # Two nodes as two ranks of a ring: 2 (2 - 1) / 2.
    assert traffic(tiers.messages, tiers.share, network)[out] == 1
    assert price(tiers, network).seconds(1e8) < price(ring_, network).seconds(1e8) / 4
    assert lower_bound(Collective.ALL_REDUCE, 16).seconds(1e8, network) == pytest.approx(1e8 * BETA)


def test_a_torus_goes_the_shorter_way_round():
    network = torus((4, 3), WIRE)
    assert network.route(0, 2) == (("rank 0", "rank 2"),)
    assert network.route(1, 11) == (("rank 1", "rank 2"), ("rank 2", "rank 11"))
    assert len(network.wires) == 12 * 4
    assert len(torus((2, 3), WIRE).wires) == 6 * 3  # a ring of two has one link each way


# ---- sizes ----------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(min_size=1), st.builds(Price, st.floats(1e-6, 1), st.floats(1e-12, 1e-6)), min_size=1))
def test_the_envelope_is_the_fastest_at_every_size(prices):
    envelope = fastest(prices)
    starts = [start for start, _ in envelope]
    assert starts[0] == 0 and starts == sorted(starts)
    for i, (start, name) in enumerate(envelope):
        stop = starts[i + 1] if i + 1 < len(envelope) else 2 * start + 1e9
        for size in (start, (start + stop) / 2, stop):
            assert prices[name].seconds(size) <= min(p.seconds(size) for p in prices.values()) * (1 + 1e-6)


def test_where_two_algorithms_cross_both_take_as_long():
    network = fully_connected(8, WIRE, GAMMA)
    prices = {name: price(describe("all-reduce", name, 8), network) for name in ("recursive-doubling", "ring")}
    (_, small), (size, large) = fastest(prices)
    assert (small, large) == ("recursive-doubling", "ring")
    # 3 (alpha + S beta + S gamma) = 14 alpha + 7/4 S beta + 7/8 S gamma
    assert size == pytest.approx(11 * ALPHA / (5 / 4 * BETA + 17 / 8 * GAMMA))
    assert prices[small].seconds(size) == pytest.approx(prices[large].seconds(size))


def test_bus_bandwidth_is_that_of_nccl_tests():
    """Per nccl-tests, doc/PERFORMANCE.md: an ideal all-reduce on links of 50 GB/s has a bus bandwidth of 50 GB/s."""
    for collective in Collective:
        seconds = float(lower_bound(collective, 8).volume) * 1e9 * BETA
        assert bus_bandwidth(collective, 8, 1e9, seconds) == pytest.approx(50e9)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fat_tree(8, 3, WIRE), "--per-node 3: does not divide 8; nearest allowed: 2 or 4"),
        (lambda: fat_tree(8, 4, WIRE, 0.5), "--oversubscription 0.5: must be at least 1"),
        (lambda: islands(8, 5, FAST, WIRE), "--per-node 5"),
        (lambda: islands(8, 4, FAST, WIRE, 3), "--nics 3"),
    ],
)
def test_networks_that_do_not_come_out_even(build, message):
    with pytest.raises(UsageError, match=message):
        build()
