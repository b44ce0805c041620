"""What software keeps in memory besides what its model needs."""

import numpy as np
import pytest

from shoal.planning.cost.batched_runs import RECOMPUTE, Runs
from shoal.planning.cost.memory.published_software import FULL, footprint
from shoal.planning.cost.shares import split_layers, weights_on_rank
from shoal.planning.cost.time.step import step
from shoal.spec.catalog.calibration import Calibration, calibration
from tests.planning.cost.test_step import LLAMA

SPLIT = LLAMA | {"tp": 4, "dp": 2, "shard": 2, "sequence_parallel": 1, "overlap_tensor": 1}
WHOLE = 2 * 8192 * 4096  # bytes of [b, s, h]


ROOM = {"memory": 1e15}  # so that nothing is taken back


def allocated(**change: float) -> float:
    return float(footprint(Runs.from_rows([SPLIT | change]), calibration()).allocated[0])


def unread(constants: Calibration, **change: float) -> float:
    """Bytes that collectives on a stream of their own add to what is reserved."""
    runs = Runs.from_rows([SPLIT | change | {"reduced_apart": apart} for apart in (2, 0)])
    apart, none = footprint(runs, constants).reserved
    return float(apart - none)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_a_host_that_runs_ahead_holds_what_collectives_have_not_read(pp: int) -> None:
    """A device with nothing to wait for but its launches holds that of all but two micro-batches in flight."""
    layers, layout = 32 // pp, {"pp": pp, "vocab": 1, **ROOM}
    solid = calibration().with_values({
        "queue": np.float64(100), "fragmentation": np.zeros_like(calibration()["fragmentation"])
    })  # fmt: skip
    at_once = unread(solid, **layout, peak=1e30, hbm=1e30, inside=1e30)
    assert at_once == pytest.approx(2 * layers * max(pp - 2, 0) * WHOLE, abs=1)
    assert unread(solid, **layout, peak=1e9) == pytest.approx(2 * layers * pp * WHOLE, rel=0.01)
    full = solid.with_values({"queue": np.float64(3)})
    assert unread(full, **layout, peak=1e9) == pytest.approx(2 * 3 * WHOLE), "the queue of launches has an end"
    assert unread(solid, **layout, tp=1) == 0, "no collectives, nothing to read"


def test_a_host_gains_more_in_a_backward_than_in_a_forward() -> None:
    layout = {"vocab": 1, "s": 1280, **ROOM}
    one, two = (unread(calibration(), **layout, microbatches=m, dp=1, shard=1) for m in (1, 2))
    assert 1.9 * one < two, "four times as much, or all"


def test_what_is_unread_is_taken_back_where_memory_ends() -> None:
    row = SPLIT | {"reduced_apart": 2, "peak": 1e9, "b": 4, **ROOM}
    much = footprint(Runs.from_rows([row]), calibration())
    between = (much.needed[0] + much.process[0]) / 2 / float(calibration()["usable"])
    assert between > 80e9, "as much as others need beside the allocator"
    little = footprint(Runs.from_rows([row | {"memory": between}]), calibration())
    assert little.fits[0] and little.needed[0] == much.needed[0]
    assert little.process[0] == pytest.approx(little.capacity[0])


def test_holes_come_about_where_forwards_follow_backwards() -> None:
    few, many = ({"pp": 4, "dp": 4, "shard": 4, "microbatches": m, **ROOM} for m in (4, 5))
    first, steady = footprint(Runs.from_rows([SPLIT | few, SPLIT | many]), calibration()).reserved
    solid = calibration().with_values({"fragmentation": np.zeros_like(calibration()["fragmentation"])})
    none = footprint(Runs.from_rows([SPLIT | few, SPLIT | many]), solid).reserved
    assert first == none[0] == none[1] < steady


def test_buckets_are_kept_where_there_are_replicas() -> None:
    plain = LLAMA | {"zero": 0, "shard": 1, "bucket_copies": 2}
    changes = ({"dp": 1}, {"dp": 1, "bucket_copies": 0}, {}, {"bucket_copies": 0})
    runs = Runs.from_rows([plain | change for change in changes])
    alone, without, several, bare = footprint(runs, calibration()).allocated
    assert alone == without == bare
    assert several - bare == pytest.approx(2 * 8.03e9, rel=0.001)


def test_ties_go_to_the_first_stage_where_software_cuts_so() -> None:
    """Sixteen layers and a head that costs four: five for each of four stages, or one more where that is met."""
    model = LLAMA | {
        "layers": 16, "hidden": 2048, "kv_heads": 32, "head_dim": 64, "ffn": 8192, "vocab": 131072, "pp": 4,
        "balanced": 1,
    }  # fmt: skip
    first, _, last = split_layers(Runs.from_rows([model, model | {"ties_first": 1}]))
    assert (first == [5, 6]).all() and (last == [1, 0]).all()
    first, _, _ = split_layers(Runs.from_rows([model | {"pp": 8}, model | {"pp": 8, "ties_first": 1}]))
    assert np.ptp(first) == 0, "only ties are cut in another way"


@pytest.mark.parametrize(("kept", "tensors"), [(4, 0), (3, 1), (2, 2)])
def test_fused_blocks_keep_less(kept: int, tensors: int) -> None:
    assert allocated() - allocated(kept_ffn=kept) == pytest.approx(tensors * 32 * 2 * 8192 * 14336 / 4)


def test_inputs_of_products_are_kept_in_8_bits_where_they_are_multiplied_so() -> None:
    """Per layer and token: two norms and the block's product lose a byte, attention's result is kept twice."""
    narrow = {"quantised": 1, "quantised_peak": 2e15}
    less = allocated(**narrow) - allocated(**narrow, keeps_quantised=1)
    assert less == pytest.approx(32 * 8192 * (2 * 4096 + 14336 - 4096) / 4)
    assert allocated(keeps_quantised=1) == allocated()


def test_layers_in_the_memory_of_the_host_keep_nothing() -> None:
    half, none, all_of_them = (allocated(offloaded_layers=n) for n in (16, 32, 99))
    assert allocated() - half == pytest.approx(half - none) and half > none == all_of_them


def test_what_the_backward_makes_again_is_not_kept() -> None:
    """Outputs of two norms, which tensor-parallel ranks split; the input of a block's last product."""
    of_layers = 32 * 2 * 8192 / 4
    assert allocated() - allocated(recomputes_norms=1) == pytest.approx(of_layers * 2 * 4096)
    assert allocated() - allocated(recomputes_activation=1) == pytest.approx(of_layers * 14336)
    plain, norms, activation = (
        float(step(Runs.from_rows([SPLIT | change]), calibration()).seconds[0])
        for change in ({}, {"recomputes_norms": 1}, {"recomputes_activation": 1})
    )
    assert plain < norms and plain < activation


def test_of_products_with_weights_all_but_the_last_are_kept() -> None:
    """MaxText's `minimal`: a layer's input, queries, keys, values, attention's output, gate and up."""
    products = RECOMPUTE.index("products")
    in_a_layer = 4096 + (4096 + 2 * 1024) + 4096 + 2 * 14336
    one, two = (allocated(recompute=products, b=b, layers=64) - allocated(recompute=products, b=b) for b in (1, 2))
    assert two - one == pytest.approx(32 * 2 * 8192 * in_a_layer / 4)
    assert allocated(recompute=RECOMPUTE.index("full")) < allocated(recompute=products) < allocated(recompute=1)


def test_no_more_micro_batches_are_alive_than_there_are() -> None:
    """Interleaved stages start with more than pp micro-batches' worth, where a step has more."""
    row = LLAMA | {"pp": 4, "virtual": 2, **ROOM}
    runs = Runs.from_rows([row | {"microbatches": m} for m in (1, 2, 4, 8)])
    kept = footprint(runs, calibration()).ranks[0].activations
    assert kept / kept[0] == pytest.approx([1, 2, 4, 4 * (1 + 3 / 8)])


def test_an_optimizer_in_16_bits_has_less_for_each_parameter() -> None:
    runs = Runs.from_rows([SPLIT | {"optimizer_bytes": n} for n in (12, 4)])
    full, half = footprint(runs, calibration()).ranks[0].optimizer
    assert full == pytest.approx(3 * half)


def test_a_loss_that_writes_over_the_logits_needs_two_bytes_for_each() -> None:
    logits = 8192 * 128256 / 4
    assert allocated(fused_loss=1) - allocated(fused_loss=1, vocab=64128) == pytest.approx(
        allocated() - allocated(vocab=64128) - (calibration()["logit_bytes"][0] - 2) * logits / 2
    )


def test_a_full_allocator_returns_blocks_in_each_micro_batch() -> None:
    """Where collectives read tensors on a stream of their own; a little more memory, and it need not."""
    row = SPLIT | {"pp": 2, "microbatches": 16, "reduced_apart": 2}
    found = footprint(Runs.from_rows([row | ROOM]), calibration())
    held = max(float(rank.filled[0] + rank.unread[0]) for rank in found.ranks)
    limit = (held / FULL + float(found.beside[0])) * ROOM["memory"] / float(found.capacity[0])
    some = [row | {"memory": limit * part} for part in (0.99, 1.01)]
    others = [some[0] | other for other in ({"reduced_apart": 0}, {"is_gpu": 0}, {"memory": limit / 2})]
    full, *none = step(Runs.from_rows([*some, *others]), calibration()).allocator
    assert full == pytest.approx(16 * calibration().numbers["return_blocks"]) and none == [0, 0, 0, 0]


def test_full_memory_costs_no_time_without_a_pipeline_and_tensors_to_read() -> None:
    alone = LLAMA | {"dp": 8, "shard": 8, "zero": 1, "reduced_apart": 2}
    need = float(footprint(Runs.from_rows([alone | ROOM]), calibration()).needed[0])
    runs = Runs.from_rows([alone | {"memory": need * part} for part in (0.9, 0.95, 1.0, 1.05)])
    assert not step(runs, calibration()).allocator.any()



def test_holes_between_split_tensors_take_memory_only_where_tensors_are_split() -> None:
    """They are needed, and seen late in a run; a publication that counts what was reserved early does not show them."""
    split, one = (Runs.from_rows([SPLIT | ROOM | {"tp": tp, "split_holes": h} for h in (0.3, 0)]) for tp in (4, 1))
    found = footprint(split, calibration())
    rank = max(found.ranks, key=lambda each: float(each.filled[0]))
    holes = 0.3 * float(rank.activations[0] + rank.working[0])
    assert float(found.needed[0] - found.needed[1]) == pytest.approx(holes)
    assert float(found.process[0] - found.process[1]) == pytest.approx(holes)
    assert found.reserved[0] == found.reserved[1] and found.allocated[0] == found.allocated[1]
    assert np.ptp(footprint(one, calibration()).needed) == 0
    pod = footprint(Runs.from_rows([SPLIT | ROOM | {"is_gpu": 0, "split_holes": 0.3}]), calibration())
    assert pod.beside[0] == 0 and pod.needed[0] == max(rank.filled[0] for rank in pod.ranks), "XLA places tensors"


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_of_torchtitan_gather_once_a_step_and_keep_what_they_gathered(pp: int, virtual: int) -> None:
    """Every further micro-batch exchanges nothing; parameters (2 bytes) and gradients (4) are whole."""
    row = LLAMA | ROOM | {"pp": pp, "dp": 8, "shard": 8, "zero": 3, "virtual": virtual, "nic": 1e9, "per_node": 1}
    rows = [row | {"gathers_once": once, "microbatches": m} for once in (0, 1) for m in (16, 32)]
    runs = Runs.from_rows(rows)
    sharing = step(runs, calibration()).sharing
    assert sharing[3] == sharing[2] and sharing[1] > 1.9 * sharing[0] > 1.9 * 2 * sharing[2]
    # A slow network hides nothing: pp gathers of 2 bytes and a reduction of 4, where a micro-batch has two and one.
    assert sharing[2] / (sharing[0] / 16) == pytest.approx((2 * pp + 4) / 8, rel=0.15)
    again, once = (footprint(runs, calibration()).ranks[0].gathered[i] for i in (0, 2))
    layers, _, _ = split_layers(runs)
    layer, end = weights_on_rank(runs)
    weights = layers[0] * layer[0] + end[0]
    assert once == 6 * weights and again < 2 * weights


def test_without_a_pipeline_torchtitan_gathers_for_each_micro_batch() -> None:
    row = LLAMA | {"dp": 8, "shard": 8, "zero": 3, "nic": 1e9, "per_node": 1}
    runs = Runs.from_rows([row | {"gathers_once": once} for once in (0, 1)])
    first, second = step(runs, calibration()).seconds
    assert first == second
