"""An estimate hangs together, and refuses what cannot be."""

import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.optim.muon import is_hidden_matrix
from shoal.engine.optim.muon_distribution import assign_matrices
from shoal.engine.optim.orthogonal import orthogonal_flops
from shoal.planning.changes import find_changes
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart, list_units
from shoal.planning.describe import describe_run
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.sweep import network_intensity, sweep
from shoal.report.planning import estimate_page
from shoal.report.planning.estimate_lines import bound
from shoal.report.planning.estimate_page import operations
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.catalog.clusters import cluster
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from tests.testing.verify.runs import runs


def estimate(layout: Layout, machine: str = "64x8xH100", batch: int = 512, model: str = "llama-3-70b") -> Estimate:
    return Estimate(EstimatedRun(model_shape(model), layout, cluster(machine), 8192, batch))


LAYOUT = Layout(tp=8, pp=4, dp=16, zero=1, sequence_parallel=True)


def test_an_answer_takes_less_than_a_fifth_of_a_second() -> None:
    assert estimate(LAYOUT).step_seconds, "and now all is imported and read"
    begin = time.process_time()
    found = estimate(LAYOUT)
    assert found.step_seconds and found.breakdown and found.fullest
    assert time.process_time() - begin < 0.2


def test_the_times_add_up_to_the_step() -> None:
    found = estimate(LAYOUT)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    assert 0.3 < found.mfu == found.hfu < 0.8


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev"])
def test_paired_micro_batches_hide_each_others_rows(schedule: str) -> None:
    """Most of the exchanges of rows go; a pair takes no less than its computation."""
    layout = Layout(pp=4, dp=16, ep=16, zero=1, schedule=schedule)
    hiding, waiting = (
        estimate(layout.model_copy(update={"ep_overlap": one}), "8x8xH100", batch=1024, model="qwen3-30b-a3b")
        for one in ("auto", False)
    )
    for found in (hiding, waiting):
        assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    gained, moved = waiting.step_seconds - hiding.step_seconds, waiting.breakdown["expert parallelism"]
    assert 0.4 < gained / moved < 1 and hiding.breakdown["expert parallelism"] < moved / 2
    paired, times = hiding.paired, hiding.times
    assert paired is not None and waiting.paired is None
    other = np.array([next(s for s in hiding.program.rank_stages(rank) if s != stage)
                      for stage, rank in enumerate(hiding.program.stage_rank)])  # fmt: skip
    rows = 0.85 * np.array([stage.experts for stage in hiding.stages])
    both, travel = times[0] + (times[1] + times[2])[other], rows + rows[other]
    assert paired == pytest.approx(np.maximum(both - travel, travel)), "as long as the longer: computation or travel"


def test_of_an_exchange_only_what_travels_to_other_experts_is_hidden() -> None:
    layout = Layout(pp=2, dp=4, tp=4, ep=4, zero=1, schedule="dualpipe", sequence_parallel=True)
    split, whole, again = (
        estimate(layout.model_copy(update=change), "4x8xH100", batch=256, model="mixtral-8x7b").stages[0]
        for change in ({}, {"etp": 1, "ep": 8}, {"recompute": "full"})
    )
    assert whole.hidden == pytest.approx(0.85 * whole.experts)
    assert 0.1 < 1 - split.hidden / (0.85 * split.experts) < 0.6, "ranks with other parts of the same experts"
    assert again.hidden_backward == 2 * again.hidden == 2 * split.hidden, "once more in recomputation"


def test_an_interval_is_wider_where_more_can_be_off() -> None:
    one, many = estimate(Layout(tp=8), "8xH100", batch=8), estimate(LAYOUT)
    for found in (one, many):
        low, high = found.interval
        assert low < found.step_seconds < high
        assert 1.1 < high / low < 3
        low, high = found.memory_interval
        assert low < found.fullest.reserved < high and 1.1 < high / low < 2


def test_a_layer_is_slower_than_its_roofline() -> None:
    found = estimate(Layout(tp=8), "8xH100", batch=8)
    run, layer = found.run, found.layer()
    flops = 2 * run.shape.layer_matrices(0) / 8 * run.sequence_length
    assert layer.products > flops / found.peak
    assert layer.attention > 2 * run.shape.hidden / 8 * run.sequence_length**2 / found.peak


def test_a_host_ahead_of_its_accelerator_is_a_floor_under_the_step() -> None:
    """It launches in the bubble, too: more stages are no slower for it than their share of the layers."""
    shape, machine = model_shape("llama-3-8b"), cluster("8xH100")
    found = [Estimate(EstimatedRun(shape, Layout(pp=8, dp=1), machine, length, 64)) for length in (32, 8192)]
    few, many = found
    launches = few.layer().launches + few.layer().launches_backward
    assert 64 * 4 * launches < few.step_seconds < 1.5 * 64 * 4 * launches
    assert few.breakdown["launches"] > 0.1 * few.step_seconds and few.step_seconds > few.timeline.step_time
    assert many.breakdown["launches"] == 0 and many.step_seconds == many.timeline.step_time
    for one in found:
        assert sum(one.breakdown.values()) == pytest.approx(one.step_seconds)


def test_adding_gradients_up_reads_each_and_reads_and_writes_its_sum() -> None:
    """Products in bf16 add to it themselves: the rows of the embedding are left, and in 8 bits the layers' matrices."""
    found = estimate(LAYOUT)
    table = found.run.shape.vocab * found.run.shape.hidden / 8
    for run, products in ((found, False), (Estimate(replace(found.run, precision="fp8")), True)):
        for part, times in zip(run.parts, run.stages, strict=True):
            alone = part.first * table + products * (sum(run.stage_elements(part)) - (part.first + part.last) * table)
            moved = run.constants["accumulate"] * (2 + 4 + 4) * alone  # bfloat16, and sums in float32
            assert times.adding == pytest.approx(run.slower * moved / run.hbm, rel=1e-4)
            assert times.backward_weight == times.matrices + times.adding + times.tensor_weight


def test_weight_gradients_wait_for_inputs_that_are_gathered_again() -> None:
    """Two gathers of a layer, beside two gathers and two scatters; none of what was just recomputed. Codes are half."""
    found = estimate(LAYOUT)
    again = found.stages[1]
    assert 0 < again.tensor_weight == pytest.approx(again.tensor_backward / 2)
    codes = Estimate(replace(found.run, precision="fp8")).stages[1]
    assert codes.tensor_weight == pytest.approx(codes.tensor_backward / 4)
    assert estimate(LAYOUT.model_copy(update={"recompute": "full"})).stages[1].tensor_weight == 0


def test_a_host_that_computes_itself_adds_its_launches_to_every_pass() -> None:
    shape = model_shape("llama-3-8b").model_copy(update={"layers": 4, "vocab": 64})
    machine = cluster("2xH100")
    beside, itself = (
        Estimate(EstimatedRun(shape, Layout(pp=2, dp=1), replace(machine, at_once=cores), 512, 8))
        for cores in (None, 2)
    )
    times, layer = itself.stages[0], itself.layer()
    assert times.launches > 2 * layer.launches  # of its two layers, and what a micro-batch takes besides
    assert times.launches_backward == pytest.approx(2 * layer.launches_backward)
    assert times.forward == pytest.approx(beside.stages[0].forward + times.launches)
    assert times.launched == 0 < beside.stages[0].launched
    between = beside.calibration.at("fixed")  # what an accelerator waits for its host after a step
    assert itself.step_seconds > 1.2 * (beside.step_seconds - between), "the bubble is as much longer"
    shared = Estimate(replace(itself.run, cluster=replace(machine, at_once=1)))  # two ranks on one core have one peak
    assert shared.mfu * shared.step_seconds == pytest.approx(2 * itself.mfu * itself.step_seconds)


def test_through_memory_sequence_parallelism_meets_twice_for_each_sum() -> None:
    """A reduce-scatter and an all-gather each take as long as an all-reduce, but for their bytes."""
    shape, machine = model_shape("llama-3-8b"), cluster("4xH100")

    def exchange(*, cores: int | None, sequence_parallel: bool, sequences: int) -> float:
        layout = Layout(tp=4, sequence_parallel=sequence_parallel, micro_batch=sequences)
        return Estimate(EstimatedRun(shape, layout, replace(machine, at_once=cores), 64, 4)).layer().exchange

    latencies = []
    for sequences in (1, 4):
        sums, parts = (exchange(cores=2, sequence_parallel=way, sequences=sequences) for way in (False, True))
        assert sums < parts < 2 * sums
        latencies.append(parts - sums)
    assert latencies[0] == pytest.approx(latencies[1])
    beside = [exchange(cores=None, sequence_parallel=way, sequences=1) for way in (False, True)]
    assert beside[0] < beside[1] < 2 * beside[0], "of GPUs a gather and a scatter are two launches, a sum is one"


@pytest.mark.parametrize(("microbatches", "stages"), [(4, 2), (8, 4), (32, 8)])
def test_the_bubble_is_the_papers(microbatches: int, stages: int) -> None:
    """(K-1)/(M+K-1) of equal stages (GPipe, section 2.3); here a head of almost nothing, and no messages."""
    shape = model_shape("llama-3-8b").model_copy(update={"vocab": 8, "layers": 8 * stages})
    layout = Layout(pp=stages, schedule="gpipe")
    found = Estimate(EstimatedRun(shape, layout, cluster(f"{stages}xH100"), 8192, microbatches))
    # The last stage has a layer less or as many, and the head.
    assert found.timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=0.02)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs())
def test_any_layout_that_trains_can_be_estimated(config: RunConfig) -> None:
    layout, s = config.parallel, config.data.sequence_length
    shape = config.model.shape(vocab=1, sequence_length=s)
    machine = cluster(f"{layout.world_size}xGB200" if layout.world_size > 1 else "h100-sxm")
    found = Estimate(EstimatedRun(shape, layout, machine, s, config.train.global_batch, "bf16"))
    assert 0 < found.mfu <= found.hfu < 1
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds, rel=0.02)
    assert all(memory.allocated < memory.reserved for memory in found.memory)


@pytest.mark.parametrize(
    ("change", "faster"),
    [({"sequence_parallel": False}, False), ({"recompute": "full"}, False), ({"schedule": "zb-h1"}, True)],
)
def test_what_a_change_of_layout_does(change: dict, faster: bool) -> None:
    plain, changed = estimate(LAYOUT), estimate(LAYOUT.model_copy(update=change))
    assert (changed.step_seconds < plain.step_seconds) == faster


def test_memory_falls_with_recomputation_and_sharding() -> None:
    modes = [estimate(LAYOUT.model_copy(update={"recompute": mode})) for mode in ("none", "selective", "full")]
    kept = [found.fullest.activations for found in modes]
    assert kept == sorted(kept, reverse=True)
    stages = [estimate(LAYOUT.model_copy(update={"zero": zero})).fullest for zero in (0, 1, 2, 3)]
    state = [memory.parameters + memory.gradients + memory.optimizer for memory in stages]
    assert state == sorted(state, reverse=True)


@pytest.mark.parametrize("software", ["shoal", "maxtext"])
def test_a_gpu_sold_as_80_gb_has_80_gib_and_the_memory_of_a_tpu_is_exact(software: str) -> None:
    """Not only of GPUs whose driver's name is known."""
    for name in ("v5p-2", "h100-sxm", "h100-sxm-96gb-hbm2e"):
        machine = shoal.estimate(Layout(), model="tiny", cluster=name, software=software)
        most = machine.capacity / machine.run.cluster.memory_bytes
        assert most == 1 if name == "v5p-2" else 1.05 < most < 1.08


def test_sophias_passes_are_a_part_of_every_step() -> None:
    layout = Layout(dp=4, tp=2, zero=1)
    plain, g, h = (
        Estimate(
            EstimatedRun(model_shape("llama-3-8b"), layout, cluster("8xH100"), 4096, 8, "fp32", rule, hessian_every=5)
        )
        for rule in ("adamw", "sophia-g", "sophia-h")
    )
    np.testing.assert_allclose(g.times, plain.times * (1 + 1 / 5))
    np.testing.assert_allclose(h.times, plain.times * (1 + 2 / 5))
    np.testing.assert_allclose(h.finishing[:, 0], plain.finishing[:, 0] * (1 + 2 / 5))
    assert h.mfu == pytest.approx(plain.mfu * plain.step_seconds / h.step_seconds)
    shard = 2 * 4 * plain.run.shape.parameters() / 8  # two numbers, while a backward goes on
    assert h.fullest.allocated - g.fullest.allocated == pytest.approx(shard, rel=1e-3)


def test_muons_products_and_exchange_by_hand() -> None:
    """Two layers of four matrices [1024, 1024], with 5 (4 + 2) 2^30 FLOPs each, and three of [1024, 4096], with
    5 (16 + 2) 2^30."""
    shape = ModelShape(
        family="llama", layers=2, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=4096, vocab=8, max_sequence=512,
        tied=True,
    )  # fmt: skip
    flops, elements = 2 * (4 * 30 + 3 * 90) * 2**30, 2 * (4 + 3 * 4) * 2**20

    def update(ranks: int, faster: float) -> tuple[float, Estimate]:
        machine = cluster(f"{ranks}xH100" if ranks > 1 else "h100-sxm")
        peaks = {kind: faster * peak for kind, peak in machine.accelerator.peak_flops.items()}
        machine = replace(machine, accelerator=machine.accelerator.model_copy(update={"peak_flops": peaks}))
        found = Estimate(
            EstimatedRun(shape, Layout(dp=ranks, zero=int(ranks > 1)), machine, 512, ranks, "bf16", "muon")
        )
        return found.finishing[0, 1] - found.calibration.at("fixed"), found

    (alone, one), (shared, four) = update(1, 1), update(4, 1)
    (alone_moved, _), (shared_moved, _) = update(1, 1e9), update(4, 1e9)  # products of no time
    rate = flops / (alone - alone_moved)
    assert 0.3 < rate / one.peak < 1
    assert flops / 4 / (shared - shared_moved) == pytest.approx(rate), "equal shares"
    exchange = 2 * four.group("dp").all_gather(4 * elements)
    assert shared_moved - alone_moved / 4 == pytest.approx(exchange, rel=0.01)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 8, 64, 1000])
def test_the_busiest_owner_has_what_the_turns_give_it(ranks: int, wide: bool) -> None:
    shape = model_shape("llama-3.2-1b")
    said = state_bytes(shape, Layout(), FORMATS["bf16"], "muon", [StagePart(range(shape.layers))]).orthogonal
    hidden = {held.name: held.global_shape for unit in list_units(shape, Layout(), StagePart(range(shape.layers)))
              for held in unit if is_hidden_matrix(held.name, held.global_shape)}  # fmt: skip
    owners = zip(*assign_matrices(hidden, ranks, wide=wide), strict=True)
    each = [sum(orthogonal_flops(m.shape, wide=wide) for turn in owner for m in turn) for owner in owners]
    assert sum(each) == said.busiest(1, wide=wide)
    assert said.busiest(ranks, wide=wide) <= max(each) <= 4 / 3 * said.busiest(ranks, wide=wide)


def test_zero_3_waits_for_a_message_of_every_unit() -> None:
    """80 layers and both ends, each gathered twice and reduced once a micro-batch: over 64 nodes latencies alone take
    more than half a second."""
    found = estimate(Layout(dp=512, zero=3))
    ring, size = found.group("shard"), 2 * found.run.shape.parameters()
    once = ring.all_gather(0.0)
    gather, reduce = found.sharding(found.parts[0])
    assert gather == pytest.approx(82 * once + 511 / 512 * size / ring.bandwidth)
    assert reduce == pytest.approx(82 * once + 511 / 512 * 2 * size / ring.bandwidth)
    assert 3 * 82 * once > 0.5


@pytest.mark.parametrize(("layout", "machine", "first"), [
    (Layout(tp=8), "8xH100", "matrix products"),
    (Layout(dp=64, tp=8, zero=3), "64x8xH100-ETH10", "gathers and reductions"),
    (Layout(pp=8, dp=64), "64x8xH100", "bubble"),
    (Layout(pp=8, tp=8, dp=8), "64x8xH100-ETH10", "messages between stages"),
])  # fmt: skip
def test_what_takes_longest_is_said_to_bound_it(layout: Layout, machine: str, first: str) -> None:
    found = estimate(layout, machine, model="llama-3-8b")
    parts = sorted(found.breakdown.items(), key=lambda part: -part[1])
    assert parts[0][0] == first
    assert re.match(rf"Bound by {first}(, then by {parts[1][0]})?\.", bound(found))
    assert (found.breakdown["messages between stages"] > 0) == (layout.pp > 1)


def test_a_roofline_has_what_a_rank_multiplies() -> None:
    dense = operations(estimate(Layout(tp=8, dp=64)))
    assert dense["k"].flops == dense["q"].flops / 8, "8 key/value heads for 64"
    halves = operations(estimate(Layout(tp=8, cp=2, dp=32)))
    assert all(halves[name].flops == dense[name].flops / 2 for name in dense)
    run = estimate(Layout(tp=8, dp=64)).run
    narrow = operations(Estimate(replace(run, precision="fp8")))
    assert 1.5 < narrow["up"].intensity / dense["up"].intensity < 2 and narrow["head"] == dense["head"]
    experts = operations(estimate(Layout(dp=64, tp=8, ep=8), model="mixtral-8x7b"))
    assert "up" not in experts and experts["expert's up"].flops == 2 * 8192 * 2 * 4096 * 14336 / 8


def test_a_slower_network_never_helps() -> None:
    layout = Layout(dp=64, tp=8, zero=3)
    steps = [estimate(layout, f"64x8xH100-{name}").step_seconds for name in ("IB800", "IB400", "IB100", "ETH10")]
    assert steps == sorted(steps)


def test_replicas_fill_the_cluster() -> None:
    found = describe_run(Layout(tp=8, pp=4), model="llama-3-70b", cluster="64x8xH100")
    assert found.layout.dp == 16
    assert found.tokens == pytest.approx(4 * 2**20, rel=0.01)


@pytest.mark.parametrize(
    ("options", "layout", "says"),
    [
        ({"model": "lama-3-70b"}, {}, "did you mean 'llama-3-70b'"),
        ({"cluster": "8xH10O"}, {}, "did you mean 'H100'"),
        ({"cluster": "8xH100"}, {"tp": 3}, "pp 1 x dp 1 x tp 3|tp = 3"),
        ({"cluster": "8xH100"}, {"dp": 3}, "3 ranks, but 8 were given.\n  Fits 8: dp 8. Or use 3 ranks"),
        ({"cluster": "8xH100"}, {"pp": 64}, "cannot fill 64 stages"),
        ({"precision": "bf61"}, {}, "did you mean 'bf16'"),
        ({"optimizer": "adamm"}, {}, "did you mean 'adam"),
        ({"global_batch": 7}, {}, "not a multiple of dp 8"),
        ({"cluster": "8xV100", "precision": "fp8"}, {}, "no fp8 peak"),
        ({"cluster": "8xV100"}, {}, r"no bf16 peak of v100.*\n  Give --precision fp16 or fp32"),
        ({"cluster": "8xGB200", "precision": "fp32"}, {}, r"no fp32 peak of gb200.*\n  Give --precision bf16 or"),
        ({"cluster": "v5p-16", "precision": "fp64"}, {}, r"no fp64 peak of tpu-v5p, but of bf16"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, layout: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        describe_run(Layout(**layout), **options)


def test_the_page_has_no_part_that_is_rounding(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["estimate", "--parallel.zero", "3", "--out", str(page)]) == 0
    assert "gathers and reductions 7" in (html := page.read_text()) and "bubble" not in html


def test_the_roof_covers_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, list[tuple[float, float]]]] = []
    monkeypatch.setattr(estimate_page, "draw_lines", lambda axes, title, series, **_: drawn.append(series))
    estimate_page.draw_roofline({"residual": (0.01, 1e10)}, 1e15, 1e12, "roofline")
    roof, residual = drawn[0].values()
    assert roof[0] == residual[0]


def test_a_change_may_take_context_and_expert_ranks_away() -> None:
    dense = describe_run(Layout(cp=4, zero=3), model="llama-3-8b", cluster="4x8xH100", sequence_length=4096)
    sparse = describe_run(Layout(zero=3, dp=64), model="mixtral-8x7b", cluster="8x8xH100", sequence_length=4096)
    (context,) = (each for name, each in find_changes(Estimate(dense), 9) if name.startswith("cp 2, dp 16"))
    assert context.run.layout == dense.layout.model_copy(update={"cp": 2, "dp": 16})
    assert "ep 2" in dict(find_changes(Estimate(sparse), 9))


def test_a_sweep_is_of_estimates(tmp_path: Path) -> None:
    run = {"model": "llama-3-8b", "cluster": "2x8xH100", "global_batch": 32}
    name, found = sweep("tp=8,1,3", Layout(zero=3, sequence_parallel=True), **run)
    (one, first), (three, refused), (eight, last) = found
    assert (name, one, three, eight) == ("tp", 1, 3, 8) and "does not divide model.heads" in refused
    wanted = shoal.estimate(Layout(zero=3, sequence_parallel=True, tp=8), **run)
    assert (last.step_seconds, last.run.layout) == (wanted.step_seconds, wanted.run.layout)
    assert first.run.layout.dp == 16 and network_intensity(first) > network_intensity(last)
    _, (smaller, larger) = sweep("nodes=1,2", Layout(zero=3, dp=16), **run)
    assert [each.run.cluster.size for _, each in (smaller, larger)] == [8, 16]
    words = "estimate --model llama-3-8b --parallel.zero 3 --global-batch 32 --sweep sequence-length=1024,2048 --out"
    assert main([*words.split(), str(tmp_path / "sweep.svg")]) == 0
    assert "FLOPs per byte sent" in (tmp_path / "sweep.svg").read_text()


@pytest.mark.parametrize(
    ("name", "mib"),
    [("a100-sxm-80gb", 81920), ("h100-sxm", 81559), ("h200-sxm", 143771), ("b200-sxm", 183359), ("gb200", 189471),
     ("b300-sxm", 275040), ("gb300", 284208), ("rtx-3090", 24576), ("rtx-4090", 24564), ("rtx-5090", 32607),
     ("a10g", 23028), ("l4", 23034), ("l40s", 46068), ("h20", 97871)],
)  # fmt: skip
def test_a_process_can_use_what_nvidia_smi_lists(name: str, mib: int) -> None:
    found = Estimate(EstimatedRun(model_shape("tiny"), Layout(), cluster(name), 128, 1))
    assert found.capacity == pytest.approx(mib * 2**20, rel=0.01)


def test_a_run_without_a_pipeline_has_no_bubble() -> None:
    """Not even one of rounding, which a plan would list as 8.88e-07 ns."""
    run = shoal.estimate(Layout(zero=1, tp=2, sequence_parallel=True, micro_batch=2), cluster="8x8xH100", fill=True)
    assert run.breakdown["bubble"] == 0.0
