"""The closed forms of time and memory behave as physics does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planning.cost.batched_runs import Runs
from shoal.planning.cost.memory.published_software import footprint
from shoal.planning.cost.shares import shard_parameters, split_layers, weights_on_rank
from shoal.planning.cost.time.kernels import Kernels
from shoal.planning.cost.time.step import explain_step, step
from shoal.spec.catalog.calibration import NETWORKS, calibration

LLAMA = {  # 8 B on 8 accelerators with 1 PFLOP/s
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256,
    "s": 8192, "b": 1, "microbatches": 8, "peak": 989e12, "hbm": 3.35e12, "memory": 80e9, "inside": 450e9, "nic": 50e9,
    "dp": 8, "zero": 1, "shard": 8,
}  # fmt: skip


def seconds(**change: float) -> float:
    return float(step(Runs.from_rows([LLAMA | change]), calibration()).seconds[0])


def test_a_layer_has_its_parameters() -> None:
    runs = Runs.from_rows([LLAMA])
    layer, ends = weights_on_rank(runs)
    assert 32 * layer[0] + ends[0] == pytest.approx(8.03e9, rel=0.001)


def test_utilisation_is_that_of_well_shaped_runs() -> None:
    flops = 6 * 8.03e9 * 8 * 8 * 8192 + 12 * 32 * 4096 * 8192 * 8 * 8 * 8192
    assert 0.3 < flops / (seconds() * 8 * 989e12) < 0.75


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["hbm", "peak", "inside", "nic"]),
    st.sampled_from(
        [{}, {"tp": 8, "dp": 1, "shard": 1, "zero": 0}, {"zero": 3}, {"pp": 4, "dp": 16, "shard": 16, "tp": 2}]
    ),
    st.sampled_from([0, 1, 2]),
)
def test_faster_hardware_is_never_slower(name: str, layout: dict, recompute: int) -> None:
    assert (
        seconds(**layout, recompute=recompute, **{name: 2 * LLAMA[name]})
        <= seconds(**layout, recompute=recompute) * 1.0001
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 16), st.integers(0, 2), st.sampled_from([1, 2, 4, 8]))
def test_more_to_do_takes_longer_and_needs_more(count: int, recompute: int, tp: int) -> None:
    given = LLAMA | {"microbatches": count, "recompute": recompute, "tp": tp}
    runs = Runs.from_rows([given, given | {"microbatches": count + 1}, given | {"b": 2}, given | {"layers": 40}])
    times, sizes = step(runs, calibration()).seconds, footprint(runs, calibration()).reserved
    assert (times[1:] > times[0]).all()
    assert sizes[1] >= sizes[0] and (sizes[2:] > sizes[0]).all()


def test_rows_of_experts_travel() -> None:
    """There and back, forward and backward; what leaves a node by one adapter each takes longer."""
    sparse = LLAMA | {"experts": 16, "per_token": 2, "routed": 1, "dense": 0}
    runs = Runs.from_rows([sparse | {"ep": ep} for ep in (1, 8)] + [sparse | {"ep": 16, "dp": 16, "shard": 16}])
    k = Kernels(runs, calibration())
    assert k.routing[0] == 0
    each = 2 * 8192 * 2 * 4096
    reached = runs.inside[1] * calibration().at("inside")
    assert k.routing[1] == pytest.approx(each * 7 / 8 / reached + float(k.group(runs.ep, 1).exchange_latency[1]))
    assert k.routing[2] > each / 2 / 50e9
    still = k.products + k.attention[0] + k.elements + 1 * k.exchange
    assert k.forward - still == pytest.approx(2 * k.routing)


def test_experts_that_ranks_split_need_the_rows_of_all_of_them() -> None:
    """8 ranks that split each expert gather 8 times as many rows; spread over ranks instead, rows only travel."""
    sparse = LLAMA | {"experts": 8, "per_token": 2, "routed": 1, "dense": 0, "tp": 8, "dp": 1, "sequence_parallel": 1}
    split, spread = Runs.from_rows([sparse | {"etp": 8}]), Runs.from_rows([sparse | {"ep": 8}])
    ways = [Kernels(runs, calibration()) for runs in (split, spread)]
    assert ways[0].routing > 2 * ways[1].routing
    assert weights_on_rank(split)[0] == pytest.approx(weights_on_rank(spread)[0])


def test_rows_leave_once_for_each_node_and_travel_beside_another_micro_batch() -> None:
    """DeepSeek-V3's rows: of 8 experts in 4 of 8 groups, a node each, half as many rows leave (section 3.2.2)."""
    sparse = LLAMA | {
        "experts": 256, "per_token": 8, "routed": 1, "dense": 0, "ffn": 2048, "groups": 8, "groups_per_token": 4,
        "ep": 64, "dp": 64,
    }  # fmt: skip
    plain, once, alone, beside = (
        Kernels(Runs.from_rows([sparse | change]), calibration())
        for change in ({}, *({"rows_once": 1, "overlap_experts": part, "overlap_rows": pair}
                             for part, pair in ((0, 0), (1, 0), (1, 1))))
    )
    latency = plain.group(np.array([64]), 1).exchange_latency
    attained = calibration().numbers["all_to_all"]
    assert once.routing - latency == pytest.approx((plain.routing - latency) * attained / 2)
    assert alone.backward == once.backward, "no other micro-batch is computed meanwhile"
    computing = once.forward + once.backward - 4 * once.routing
    assert beside.forward + beside.backward == pytest.approx(np.maximum(computing, 4 * once.routing), rel=1e-6)


def test_without_expert_parallelism_nothing_is_hidden() -> None:
    sparse = LLAMA | {"experts": 8, "per_token": 2, "routed": 1, "dense": 0, "tp": 4, "etp": 4, "dp": 2, "shard": 2}
    apart, beside = (Kernels(Runs.from_rows([sparse | change]), calibration())
                     for change in ({}, {"overlap_rows": 1, "overlap_experts": 1}))  # fmt: skip
    assert apart.routing > 0 and beside.backward == apart.backward


def test_rows_reach_a_rank_of_their_node_once() -> None:
    """A token's 8 experts are on 8 (1 - (7/8)^8) = 5.25 of 8 ranks, in the mean, and one row goes to each."""
    sparse = LLAMA | {"experts": 128, "per_token": 8, "routed": 1, "dense": 0, "ffn": 768, "ep": 8}
    each, once = (Kernels(Runs.from_rows([sparse | {"rows_once": once}]), calibration()) for once in (0, 1))
    latency = each.group(np.array([8]), 1).exchange_latency
    assert once.routing - latency == pytest.approx((each.routing - latency) * (1 - (7 / 8) ** 8))


def test_kernels_of_many_small_experts_are_launched_longer_than_they_compute() -> None:
    """In 8 bits each expert has three times the kernels; a CUDA graph of the step launches none."""
    sparse = LLAMA | {"experts": 128, "per_token": 8, "routed": 1, "dense": 0, "ffn": 768, "ep": 8, "expert_kernels": 2,
                      "quantised_peak": 2e15}
    few, many, eight, grouped = (
        Kernels(Runs.from_rows([sparse | change]), calibration())
        for change in ({"ep": 64}, {}, {"quantised": 1}, {"quantised": 1, "expert_kernels": 0})
    )
    assert few.experts_waits == (0, 0), "2 experts of a rank compute longer than the host launches"
    launch, backward = calibration().at("launch"), calibration().numbers["launch_backward"]
    launched = 16 * 6 / 45 * launch
    expected = launched - eight.experts_products, backward * launched - 2 * eight.experts_products
    assert [float(waits[0]) for waits in eight.experts_waits] == pytest.approx([float(each[0]) for each in expected])
    assert many.experts_waits[1] < eight.experts_waits[1]
    assert grouped.experts_waits == (0, 0)
    graphs = Kernels(Runs.from_rows([LLAMA | {"graphs": 1}]), calibration())
    assert graphs.launches_of_both == 0 < many.launches_of_both
    waiting = step(eight.runs, calibration()), step(grouped.runs, calibration())
    causes = explain_step(eight, waiting[0]), explain_step(grouped, waiting[1])
    assert float(eight.backward[0] - grouped.backward[0]) == pytest.approx(float(eight.experts_waits[1][0]))
    more = causes[0].pop("launches") - causes[1].pop("launches")
    assert more == pytest.approx(waiting[0].seconds - waiting[1].seconds), "what is waited for is the host's"
    assert all(causes[0][name] == pytest.approx(causes[1][name]) for name in causes[0])


def test_biases_of_experts_are_passes_where_each_expert_has_its_own() -> None:
    """By the kernels of Megatron-Core's TEGroupedMLP, with the widths of gpt-oss-120b."""
    sparse = LLAMA | {"hidden": 2880, "ffn": 2880, "experts": 128, "per_token": 4, "routed": 1, "dense": 0, "ep": 64,
                      "expert_kernels": 2}
    plain, biased, joined = (
        Kernels(Runs.from_rows([sparse | change]), calibration())
        for change in ({}, {"expert_biases": 1}, {"expert_biases": 1, "expert_kernels": 0})
    )
    moved = 2 * 8192 * 4 * (23 + 6) * 2880
    assert biased.elements - plain.elements == pytest.approx(moved / plain.hbm)
    assert joined.elements == plain.elements
    half = Kernels(Runs.from_rows([sparse | {"expert_biases": 1, "routed": 0.5, "dense": 0.5}]), calibration())
    without = Kernels(Runs.from_rows([sparse | {"routed": 0.5, "dense": 0.5}]), calibration())
    assert half.elements - without.elements == pytest.approx(moved / plain.hbm / 2), "of layers with a router"


def test_a_parallel_block_sums_once_in_a_layer() -> None:
    """Attention and the feed-forward block of a layer read the same norm (Wang and Komatsuzaki 2021, GPT-J)."""
    of = LLAMA | {"tp": 8, "dp": 1, "sequence_parallel": 1}
    apart, together = (Kernels(Runs.from_rows([of | {"parallel_block": one}]), calibration()) for one in (0, 1))
    assert apart.forward - together.forward == pytest.approx(apart.exchange)


def test_what_no_gradient_needs_is_not_computed_again() -> None:
    """XLA leaves out the last product of a layer and the sum of its result; torch computes the layer again."""
    all_of_it, needed, offloaded = (
        Kernels(Runs.from_rows([LLAMA | {"recompute": 2, "tp": 8} | change]), calibration())
        for change in ({}, {"drops_unused": 1}, {"offloads_heads": 1})
    )
    assert all_of_it.again == all_of_it.forward
    assert all_of_it.again - needed.again == pytest.approx(needed.last_product + needed.exchange)
    assert all_of_it.again - offloaded.again == pytest.approx(needed.heads_product)
    experts = {"recompute": 2, "drops_unused": 1, "experts": 8, "per_token": 2, "routed": 1, "dense": 0, "ep": 8}
    sparse = Kernels(Runs.from_rows([LLAMA | experts]), calibration())
    assert sparse.again == sparse.forward, "the rows of experts are weighted after their last product"


def test_recomputation_trades_time_for_memory() -> None:
    runs = Runs.from_rows([LLAMA | {"recompute": mode, "attention": 0} for mode in (0, 1, 2)])
    times, sizes = step(runs, calibration()).seconds, footprint(runs, calibration()).allocated
    assert (np.diff(times) > 0).all()
    assert (np.diff(sizes) < 0).all()


def test_operators_are_between_a_layer_and_its_attention() -> None:
    runs = Runs.from_rows([LLAMA | {"recompute": mode} for mode in (0, 3, 2)])
    times, sizes = step(runs, calibration()).seconds, footprint(runs, calibration()).allocated
    assert (np.diff(times) > 0).all()
    assert (np.diff(sizes) < 0).all()


def test_experts_are_sharded_over_the_ranks_that_have_the_same_ones() -> None:
    """Of 8 ranks with ep 2, 4 have the same experts: each has a quarter of their states, an eighth of all others."""
    sparse = LLAMA | {"experts": 8, "per_token": 2, "routed": 1, "dense": 0, "ep": 2}
    runs = Runs.from_rows([sparse, sparse | {"ep": 1}, LLAMA])
    _, layers, _ = split_layers(runs)
    layer, ends = weights_on_rank(runs)
    weights = layers * layer + ends
    matrices = 32 * 3 * 4096 * 14336
    share, dense = shard_parameters(runs, weights, layers), (weights[0] - 4 * matrices) / 8
    assert share[0] == pytest.approx(dense + 4 * matrices / 4)
    assert share[1] == pytest.approx(dense + 8 * matrices / 8)
    assert share[2] == pytest.approx(weights[2] / 8)


def test_hybrid_sharding_reduces_shards_between_its_groups() -> None:
    nodes = {"zero": 3, "dp": 64, "nic": 5e9}
    hybrid, everywhere, quick = seconds(**nodes, shard=8), seconds(**nodes, shard=64), {"nic": 50e9}
    assert hybrid < everywhere  # parameters stay inside the nodes
    assert seconds(**nodes | quick, shard=8) < hybrid


def test_the_bubble_is_the_papers() -> None:
    """(p - 1)/m of the work, over the stages of a rank (Narayanan et al. 2021, section 2.2), without messages."""
    plain = LLAMA | {"pp": 8, "dp": 1, "shard": 1, "zero": 0, "vocab": 1, "overlap_pipeline": 1}
    runs = Runs.from_rows([plain, plain | {"virtual": 2}, plain | {"warmup": 1 / 3}, plain | {"warmup": 0}])
    nothing = {"hop": np.float64(0), "hide_pipeline": np.float64(1), "accumulate": np.float64(0)}
    found = step(runs, calibration().with_values(nothing))
    hops = found.bubble[3]
    assert (found.bubble - hops) / found.busy == pytest.approx(7 / 8 * np.array([1, 1 / 2, 1 / 3, 0]), rel=0.01)


def test_a_host_that_does_not_wait_launches_in_the_bubble() -> None:
    small = {"hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1408, "vocab": 32000, "s": 256}
    pipeline = {"pp": 4, "dp": 2, "shard": 2, "tp": 1}
    ways = [LLAMA | pipeline | sizes | {"ahead": ahead} for sizes in (small, {}) for ahead in (0, 1)]
    runs = Runs.from_rows(ways)
    found, launched = step(runs, calibration()), Kernels(runs, calibration()).launches_of_both
    assert found.busy[1] > 8 * 8 * launched[1] and found.bubble[1] == 0 < found.bubble[0]
    assert found.bubble[2] == pytest.approx(found.bubble[3], rel=0.01)  # where computing takes much longer


def test_a_gather_and_a_scatter_are_two_launches_where_a_sum_is_one() -> None:
    runs = Runs.from_rows([LLAMA, LLAMA | {"tp": 2}, LLAMA | {"tp": 2, "sequence_parallel": 1}])
    alone, summed, gathered = Kernels(runs, calibration().measured({"launch_exchange": 0.05})).launches
    assert gathered - alone == pytest.approx(2 * (summed - alone)) and alone < summed < 1.1 * alone


def test_hosts_wait_for_the_slowest_and_carry_messages_over_tcp() -> None:
    rows = [LLAMA | {"tp": tp, "network": NETWORKS.index(name)} | sequence
            for tp in (1, 8, 16) for name in ("infiniband", "tcp") for sequence in ({}, {"sequence_parallel": 1})]
    k = Kernels(Runs.from_rows(rows), calibration())
    alone, inside, across = k.meeting.reshape(3, 2, 2)
    wait = calibration().numbers["wait"]
    assert alone.max() == 0 and inside == pytest.approx(np.array([[3, 6], [3, 6]]) * wait)
    assert across[0] == pytest.approx([4 * wait, 8 * wait])
    group = k.group(k.runs.tp, 1.0)
    assert across[1] == pytest.approx([group.sum_latency[10], 2 * group.gather_latency[11]])
    assert k.host == pytest.approx(k.launches + k.sums * k.meeting) and (k.layer[0] >= k.host).all()
    crowded = 1 + calibration().numbers["launch_backward"]
    assert k.launches_of_both == pytest.approx(crowded * k.launches + k.sums * k.meeting * (1 + k.exchanged_backward))


def test_a_backward_gathers_once_more_unless_nothing_waits_for_it() -> None:
    split = LLAMA | {"tp": 8, "sequence_parallel": 1}
    again, hidden = Kernels(Runs.from_rows([split, split | {"hides_gathers": 1}]), calibration()).exchanged_backward
    assert again == 1.5 and hidden == 1


def test_where_the_host_waits_for_each_kernel_launches_hide_nothing() -> None:
    pipeline = {"pp": 4, "dp": 2, "shard": 2, "microbatches": 64}
    runs = Runs.from_rows([LLAMA | pipeline, LLAMA | pipeline | {"blocking": 1}])
    k, found = Kernels(runs, calibration()), step(runs, calibration())
    more = 64 * (runs.layers / 4 * k.launches_of_both + calibration().numbers["micro_batch"])
    assert found.busy[1] - found.busy[0] == pytest.approx(more[1]), "beside it, computing takes longer"


def test_a_sum_is_one_kernel_of_twice_the_steps() -> None:
    """NCCL's all-reduce launches, and waits for the last rank, once; a gather and a scatter do so twice."""
    group, c = Kernels(Runs.from_rows([LLAMA]), calibration()).group(np.array([8.0]), 1.0), calibration().numbers
    assert 2 * group.gather_latency - group.sum_latency == pytest.approx(c["collective_launch"] + 3 * c["wait"])
    shared = Kernels(Runs.from_rows([LLAMA | {"through_memory": 1}]), calibration()).group(np.array([8.0]), 1.0)
    assert shared.sum_latency == pytest.approx(shared.gather_latency)


def test_parts_of_gathered_parameters_are_copied_one_by_one_for_each_rank() -> None:
    more = [seconds(sliced=6, **change) - seconds(**change) for change in ({}, {"dp": 4, "shard": 4}, {"zero": 0})]
    assert more == pytest.approx([6 * 32 * ranks * calibration().numbers["launch_copy"] for ranks in (8, 4, 0)])


def test_an_odd_vocabulary_slows_the_head() -> None:
    rows = [LLAMA | {"vocab": vocab, "tp": tp} for vocab, tp in ((50256, 1), (50257, 1), (50257, 2), (50304, 2))]
    even, odd, half, padded = Kernels(Runs.from_rows(rows), calibration()).head
    assert odd > 1.2 * even and half == pytest.approx(padded, rel=0.01)


def test_a_rank_with_the_first_and_the_last_stage_has_half_of_the_head() -> None:
    """DualPipe (DeepSeek-AI 2024, section 3.2.1), with modules that predict further tokens after the last layer."""
    pipeline = {"pp": 16, "dp": 8, "further": 2, "microbatches": 512}
    row = Runs.from_rows([LLAMA | pipeline])
    k, layer = Kernels(row, calibration()), 2.0  # layers of a stage
    plain, paired = (step(Runs.from_rows([LLAMA | pipeline | {"paired": p}]), calibration()).busy for p in (0, 1))
    ends, device = k.head + k.further, layer * (k.forward + k.backward)
    assert paired / plain == pytest.approx((device + ends / 2) / (device + ends), rel=0.05)


def test_many_runs_are_what_each_is_alone() -> None:
    rows = [LLAMA, LLAMA | {"tp": 2, "pp": 4, "dp": 4}, LLAMA | {"zero": 3, "attention": 0}]
    together = step(Runs.from_rows(rows), calibration()).seconds
    assert together == pytest.approx([seconds(**row) for row in rows], rel=1e-12)


def test_collectives_of_a_node_and_of_many() -> None:
    kernels = Kernels(Runs.from_rows([LLAMA, LLAMA]), calibration())
    inside, outside = kernels.group(np.array([8.0, 16.0]), 1.0).all_gather(np.array([1e9, 1e9]))
    assert outside > inside > 7 / 8 * 1e9 / 450e9
    assert kernels.group(np.array([1.0, 1.0]), 1.0).all_reduce(np.array([1e9, 1e9])).max() == 0


def test_ranks_use_the_axes_of_a_torus_that_they_fill() -> None:
    """16 of 8 x 8 x 8 chips fill more than one axis, and all of them three; 16 of 16 x 16 fill one."""
    torus = LLAMA | {"per_node": 512.0, "axes": 3.0}
    rows = [torus | {"axes": 1.0}, torus, LLAMA | {"per_node": 256.0, "axes": 2.0}]
    kernels = Kernels(Runs.from_rows(rows), calibration())
    line, cube, square = kernels.group(np.array([16.0, 16.0, 16.0]), 1.0).bandwidth
    assert 1 < cube / line < 2 and square == line
    assert kernels.group(np.array([512.0, 512.0, 1.0]), 1.0).bandwidth[1] == pytest.approx(3 * line)


def test_products_that_add_to_the_sum_of_gradients_leave_no_pass_over_it() -> None:
    rows = [LLAMA | {"zero": z, "microbatches": 8, "fused_accumulation": fused} for z in (1, 3) for fused in (0, 1)]
    busy, known = step(Runs.from_rows(rows), calibration()).busy, Kernels(Runs.from_rows(rows[:1]), calibration())
    layer, end = weights_on_rank(known.runs)
    moved = 8 * (2 + 4 + 4) * (known.runs.layers * layer + end)  # bytes: each gradient read, its sum read and written
    assert busy[0] - busy[1] == pytest.approx(moved[0] / known.hbm[0]) and busy[2] == busy[3], "shards are reduced"


def test_a_host_that_computes_itself_launches_in_turn_also_without_a_pipeline() -> None:
    rows = [LLAMA | {"pp": pp, "microbatches": 8, "through_memory": apart} for pp in (1, 4) for apart in (0, 1)]
    runs = Runs.from_rows(rows)
    k, busy = Kernels(runs, calibration()), step(runs, calibration()).busy
    more = 8 * (runs.layers / runs.pp * k.launches_of_both + calibration().numbers["micro_batch"])
    assert busy[[1, 3]] - busy[[0, 2]] == pytest.approx(more[[1, 3]], rel=0.02), "messages differ a little"
