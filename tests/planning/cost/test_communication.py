"""The closed forms are what pricing the same algorithm message by message finds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.labs.collectives.description import Collective
from shoal.labs.collectives.price import lower_bound, price
from shoal.labs.collectives.textbook import describe
from shoal.labs.collectives.topology import Wire, islands, ring
from shoal.planning.cost.time.communication import axis_extent, ring_group
from shoal.spec.catalog.clusters import cluster
from shoal.spec.layout import Layout


def priced(name: str, nodes: int, per_node: int, algorithm: str = "ring", size: float = 64e6) -> float:
    """An algorithm's time, on one rank of each node or on a node's."""
    found = cluster(f"{max(2, nodes)}x8xH100")
    inside = Wire(found.inside.latency, found.inside.bandwidth)
    nic = Wire(found.nic.latency, found.nic.bandwidth)
    topology = islands(nodes * per_node, per_node, inside, nic)
    return price(describe(name, algorithm, nodes * per_node), topology).seconds(size)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 8))
def test_a_ring_inside_a_node_is_the_priced_one(ranks: int) -> None:
    ring = ring_group(cluster("8xH100"), ranks)
    assert ring.all_gather(64e6) == pytest.approx(priced("all-gather", 1, ranks))
    assert ring.all_reduce(64e6) <= priced("all-reduce", 1, ranks) * (1 + 1e-9)
    assert ring.all_reduce(1e12) == pytest.approx(2 * ring.all_gather(1e12), rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_through_memory_any_collective_has_the_latency_of_an_all_reduce(ranks: int) -> None:
    machine = cluster("8xH100")
    rings, memory = ring_group(machine, ranks), ring_group(replace(machine, at_once=2), ranks)
    latency = rings.all_reduce(0.0)
    for size in (0.0, 64e6):
        assert memory.all_reduce(size) == rings.all_reduce(size)
        assert memory.all_gather(size, 3) == pytest.approx(3 * latency + (rings.all_reduce(size) - latency) / 2)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 16))
def test_a_ring_of_one_rank_in_each_node_is_the_priced_one(nodes: int) -> None:
    ring = ring_group(cluster(f"{nodes}x8xH100"), nodes, stride=8)
    assert ring.all_gather(64e6) == pytest.approx(priced("all-gather", nodes, 1))
    assert ring.reduce_scatter(64e6) == pytest.approx(priced("reduce-scatter", nodes, 1))


def test_a_ring_over_nodes_leaves_each_by_all_its_adapters() -> None:
    """8 adapters of 50 GB/s are 400 GB/s a node, less than a rank's 450 GB/s inside."""
    assert ring_group(cluster("4x8xH100"), 32).bandwidth == 400e9
    assert ring_group(cluster("4x8xH100"), 16, stride=2).bandwidth == 200e9
    assert ring_group(cluster("4x8xH100-IB800"), 32).bandwidth == 450e9
    thin = [ring_group(replace(cluster("8x8xH100"), thin=0.5), ranks) for ranks in (16, 64)]
    assert [ring.bandwidth for ring in thin] == pytest.approx([400e9, 200e9]), "a half where the nodes are four times"
    assert thin[0].hop == thin[1].hop == 50e9, "but not of a message to the next"


@pytest.mark.parametrize(("nodes", "here"), [(1, 8), (2, 1), (4, 1), (2, 4), (2, 8), (4, 8), (8, 8), (5, 8)])
def test_an_all_to_all_leaves_a_node_by_each_ranks_own_adapter(nodes: int, here: int) -> None:
    """Message by message what stays inside is not at the same time as what leaves; of 64 GB latencies are nothing."""
    group = ring_group(cluster(f"{max(2, nodes)}x8xH100"), nodes * here, stride=8 // here)
    size, ranks = 64e9, nodes * here
    found = group.all_to_all(size * (ranks - 1) / ranks)
    exact = priced("all-to-all", nodes, here, "pairwise", size)
    apart = size * (here - 1) / ranks / 450e9 if nodes > 1 else 0.0
    assert found <= exact * (1 + 1e-9)
    uneven = 1.25 if ranks == 40 else 1.0  # no pairs: in some rounds a few ranks stay inside, and wait for the others
    assert found * uneven + apart >= exact * (1 - 1e-3)


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_an_all_to_all_on_a_ring_takes_a_quarter_of_an_all_gather(ranks: int) -> None:
    """jax-ml/scaling-book, sharding: V/(4 W) against V/W. Rounds of pairs use the links of one direction at a time."""
    machine = cluster({4: "v5p-128", 8: "v5p-1024", 16: "v6e-256"}[ranks])
    assert machine.torus[-1] == ranks
    group, size = ring_group(machine, ranks), 64e9
    found = group.all_to_all(size * (ranks - 1) / ranks)
    assert group.all_gather(ranks * size) / found == pytest.approx(4 * (ranks - 1) / ranks, rel=1e-3)
    wire = Wire(machine.inside.latency, machine.inside.bandwidth)
    exact = price(describe("all-to-all", "pairwise", ranks), ring(ranks, wire)).seconds(size)
    assert exact / 2.001 <= found <= exact


def test_a_message_to_the_next_rank_takes_one_link() -> None:
    machine = cluster("2x8xH100")
    assert ring_group(machine, 8).send(64e6) == pytest.approx(64e6 / 450e9, rel=0.03)
    for ranks, stride in ((16, 1), (4, 4), (2, 8)):
        assert ring_group(machine, ranks, stride).send(64e6) == pytest.approx(64e6 / 50e9, rel=0.03)
    assert ring_group(cluster("v5p-8192"), 16).send(64e6) == pytest.approx(64e6 / 90e9, rel=0.03)


@pytest.mark.parametrize(
    ("name", "torus", "axis"),
    [("v5e-64", (8, 8), 45e9), ("v5e-256", (16, 16), 90e9), ("v5p-16", (2, 2, 2), 90e9), ("v5p-32", (2, 2, 4), 90e9),
     ("v5p-64", (2, 4, 4), 90e9), ("v5p-128", (4, 4, 4), 180e9), ("v4-128", (4, 4, 4), 90e9)],
)  # fmt: skip
def test_an_axis_is_a_ring_only_where_its_ends_are_connected(name: str, torus: tuple, axis: float) -> None:
    """A full 16 of v5e and v6e (jax-ml/scaling-book, tpus); of v4 and v5p a multiple of 4 in a slice of a cube at least
    (Google Cloud, TPU v5p); else a line."""
    machine = cluster(name)
    assert machine.torus == torus
    assert ring_group(machine, torus[-1]).bandwidth == axis


@given(
    st.sampled_from(["64x8xH100", "8xA100", "v5p-1024", "v6e-256"]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1, 2, 8]),
    st.floats(1, 1e10),
)
def test_no_collective_beats_what_must_be_sent(name: str, ranks: int, stride: int, size: float) -> None:
    ring = ring_group(cluster(name), ranks, stride)
    volume = float(lower_bound(Collective.ALL_GATHER, ranks).volume)
    assert ring.all_gather(size) >= volume * size / ring.bandwidth
    assert ring.all_reduce(size) >= 2 * volume * size / ring.bandwidth


def test_axes_lie_as_the_mesh_has_them() -> None:
    layout = Layout(dp=8, zero=1, zero_shard=4, tp=8, pp=8)
    assert [axis_extent(layout, axis) for axis in ("tp", "dp_shard", "dp_replicate", "dp", "pp")] == [
        (8, 1), (4, 8), (2, 32), (8, 8), (8, 64),
    ]


def test_a_torus_adds_its_axes() -> None:
    """v5p: 90 GB/s a link and direction; an axis 180, all three 540 GB/s."""
    machine = cluster("v5p-8192")  # 16 x 16 x 16
    assert machine.torus == (16, 16, 16)
    assert [ring_group(machine, n).bandwidth for n in (8, 16, 256, 4096)] == [90e9, 180e9, 360e9, 540e9]
    assert ring_group(machine, 16, stride=256).bandwidth == 180e9


def test_slices_meet_on_the_data_centre_network() -> None:
    """2 x 4,096 chips, each with 50 Gb/s out: a group that spans both leaves over all of its chips' adapters."""
    machine = cluster("2xv5p-8192")
    assert ring_group(machine, 4096) == ring_group(cluster("v5p-8192"), 4096), "one slice"
    assert ring_group(machine, 8192).bandwidth == 540e9, "4,096 adapters are faster than the torus"
    assert ring_group(machine, 32, stride=256).bandwidth == 16 * 6.25e9
    across = ring_group(machine, 2, stride=4096)
    assert (across.bandwidth, across.hop, across.exchange) == (6.25e9,) * 3
    assert across.all_reduce(1e9) == pytest.approx(1e9 / 6.25e9, rel=1e-3)
