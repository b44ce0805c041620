"""Bytes that a rank sends in a step: what Rajbhandari et al. 2020, section 7, say of each stage, counted."""

from collections import Counter

import pytest

from shoal.launch.worker_pool import Pool
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.traffic import Sent, tensor_parallel
from shoal.spec.catalog import model_shape
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from tests.engine.parallel.counting import engine_of, sent_in_a_step
from tests.testing.verify.runs import small_run

WIDE = {"layers": 3, "hidden": 40, "ffn": 56}


def run_of(ranks: int, microbatches: int, **parallel) -> RunConfig:
    parallel = {"dp": ranks, "micro_batch": 1, "bucket_mb": 0.004, **parallel}
    return small_run(parallel, WIDE, global_batch=microbatches * ranks)


def volume(config: RunConfig) -> tuple[Counter, list[int], int]:
    """Bytes sent in a step that is not the first, by (axis, kind); those of each bucket; and without its padding."""
    engine = engine_of(config)
    sent = sent_in_a_step(engine)
    buckets = engine.parameters.buckets
    size = engine.policy.compute.itemsize
    return sent, [bucket.full.numel() * size for bucket in buckets], sum(bucket.numel for bucket in buckets) * size


def of_parameters(sent: Counter) -> float:
    return sum(size for (axis, _), size in sent.items() if axis in ("shard", "replicate"))


@pytest.mark.parametrize(("zero", "ranks"), [(0, 2), (0, 3), (1, 4), (2, 3)])
def test_stages_0_to_2_send_twice_the_parameters(pool: Pool, zero: int, ranks: int) -> None:
    """2P(N-1)/N: an all-reduce, or its two halves. The rest of a step is its count of tokens, its loss and its norm."""
    for sent, buckets, size in pool.run(volume, ranks, run_of(ranks, 1, zero=zero)):
        whole = sum(buckets)
        assert of_parameters(sent) == pytest.approx(2 * whole * (ranks - 1) / ranks)
        assert size <= whole < size + len(buckets) * ranks * 64 * 4  # a shard is a multiple of 64 numbers
        assert sum(sent.values()) - of_parameters(sent) <= 2 * (8 + 3 * 8)


@pytest.mark.parametrize("ranks", [2, 3])
def test_stage_3_sends_three_times_the_parameters(pool: Pool, ranks: int) -> None:
    """3P(N-1)/N, but the last unit's once less: its backward follows its forward, so that it stays gathered."""
    for sent, buckets, _ in pool.run(volume, ranks, run_of(ranks, 1, zero=3)):
        share = (ranks - 1) / ranks
        assert of_parameters(sent) == (3 * sum(buckets) - buckets[-1]) * share
        assert sent["shard", "reduce-scatter"] == sum(buckets) * share


@pytest.mark.parametrize(("ranks", "ahead"), [(2, 0), (3, 1), (2, 3)])
def test_stage_3_sends_twice_the_parameters_if_they_stay_gathered(pool: Pool, ranks: int, ahead: int) -> None:
    config = run_of(ranks, 3, zero=3, reshard_after_forward=False, prefetch=ahead)
    for sent, buckets, _ in pool.run(volume, ranks, config):
        assert of_parameters(sent) == 3 * 2 * sum(buckets) * (ranks - 1) / ranks


@pytest.mark.parametrize("ahead", [0, 3])
def test_gathering_further_ahead_gathers_nothing_twice(pool: Pool, ahead: int) -> None:
    for sent, buckets, _ in pool.run(volume, 2, run_of(2, 1, zero=3, prefetch=ahead)):
        assert of_parameters(sent) == (3 * sum(buckets) - buckets[-1]) / 2


@pytest.mark.parametrize(("zero", "scatters", "gathers"), [(0, 1, 1), (1, 1, 1), (2, 3, 1), (3, 3, 6)])
def test_of_three_micro_batches_each_is_reduced_where_gradients_are_sharded(
    pool: Pool, zero: int, scatters: int, gathers: int
) -> None:
    """Stages 0 and 1 synchronise only in the last of them."""
    for sent, buckets, _ in pool.run(volume, 2, run_of(2, 3, zero=zero)):
        last = 3 * buckets[-1] if zero == 3 else 0
        assert of_parameters(sent) == ((scatters + gathers) * sum(buckets) - last) / 2


def test_hybrid_shards_send_less_between_the_groups(pool: Pool) -> None:
    """Inside a group of S what N = S ranks would; between R groups an all-reduce of one shard, 2(P/S)(R-1)/R."""
    for sent, buckets, _ in pool.run(volume, 4, run_of(4, 1, zero=2, zero_shard=2)):
        whole = sum(buckets)
        assert sent["shard", "reduce-scatter"] == sent["shard", "all-gather"] == whole / 2
        assert sent["replicate", "all-reduce"] == 2 * (whole / 2) / 2


def test_bf16_halves_what_is_gathered(pool: Pool) -> None:
    """Gradients are summed in float32, parameters are sent in bf16."""
    config = run_of(2, 1, zero=1)
    config = config.model_copy(update={"train": config.train.model_copy(update={"precision": "bf16"})})
    for sent, buckets, _ in pool.run(volume, 2, config):
        assert sent["shard", "all-gather"] == sum(buckets) / 2
        assert sent["shard", "reduce-scatter"] == sum(buckets)


LAYERS, TOKENS = 2, 12  # of the models below; in one micro-batch


def tensor_volume(config: RunConfig) -> Counter:
    """Bytes that tensor parallelism sends in a micro-batch, forward and backward, by kind."""
    sent = sent_in_a_step(engine_of(config))
    return Counter({kind: size for (axis, kind), size in sent.items() if axis == "tp"})


def tensor_run(ranks: int, **parallel) -> RunConfig:
    model = {"layers": LAYERS, "heads": 12, "kv_heads": 12, "head_dim": 4, "ffn": 24}
    config = small_run({"tp": ranks, "micro_batch": 1, **parallel}, model, global_batch=1)
    return config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": TOKENS})})


@pytest.mark.parametrize(("ranks", "overlap"), [(2, True), (3, False), (4, True)])
def test_a_layer_of_tensor_parallelism_sends_four_all_reduces(pool: Pool, ranks: int, overlap: bool) -> None:
    """Of [b, s, h], two forward and two backward, 2(n-1)/n of it each; one more for the embedding, one for the head."""
    config = tensor_run(ranks, tp_overlap=overlap)
    for sent in pool.run(tensor_volume, ranks, config):
        hidden = engine_size(config) * TOKENS
        assert sent["all-reduce"] == pytest.approx((4 * LAYERS + 2) * hidden * 2 * (ranks - 1) / ranks)
        assert set(sent) == {"all-reduce", "all-gather"}  # the latter of two numbers a token, by the loss
        assert sent["all-gather"] == 2 * TOKENS * 4 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_sends_what_the_collectives_do(pool: Pool, ranks: int) -> None:
    """With sequence parallelism a layer gathers twice and scatters twice in each direction, (n-1)/n of [b, s, h] each;
    around the ring these are messages of one part. Backward gathers the inputs of blocks, and of the head, again."""
    apart, ring = (tensor_run(ranks, sequence_parallel=True, tp_overlap=overlap) for overlap in (False, True))
    hidden = engine_size(apart) * TOKENS * (ranks - 1) / ranks
    norms = 2 * engine_size(apart) * (2 * LAYERS + 1) * (ranks - 1) / ranks  # their gradients are summed over tp
    again = (2 * LAYERS + 1) * hidden
    for sent in pool.run(tensor_volume, ranks, apart):
        assert sent["all-gather"] == pytest.approx((4 * LAYERS + 2) * hidden + again + 2 * TOKENS * 4 * (ranks - 1))
        assert sent["reduce-scatter"] == pytest.approx((4 * LAYERS + 2) * hidden)
        assert sent["all-reduce"] == pytest.approx(norms)
    for sent in pool.run(tensor_volume, ranks, ring):
        # All but the embedding's two, and the reduce-scatters of the inputs that are gathered again.
        assert sent["send"] == pytest.approx((8 * LAYERS + 2) * hidden - again)
        assert sent["all-gather"] == pytest.approx(hidden + again + 2 * TOKENS * 4 * (ranks - 1))
        assert sent["reduce-scatter"] == pytest.approx(hidden + again)
        assert sent["all-reduce"] == pytest.approx(norms)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_codes_of_inputs_are_gathered_again(pool: Pool, recompute: str) -> None:
    """A byte for each element of a block's input, for both blocks of a layer, and the head's input as it is; if a layer
    is recomputed, its inputs again as they are."""
    config = tensor_run(2, sequence_parallel=True, recompute=recompute)
    config = config.model_copy(update={"train": config.train.model_copy(update={"precision": "fp8"})})
    for sent in pool.run(tensor_volume, 2, config):
        hidden = config.model.hidden * TOKENS / 2
        states = 2 * hidden * (4 * LAYERS + 2 + (2 * LAYERS if recompute == "full" else 1))
        codes = 2 * LAYERS * hidden * (recompute == "none")
        assert sent["all-gather"] == pytest.approx(states + codes + 2 * TOKENS * 4)


def grid_volume(config: RunConfig) -> dict[str, Counter]:
    """As `tensor_volume`, by axis of the grid."""
    return by_axis(sent_in_a_step(engine_of(config)))


def by_axis(sent: Counter) -> dict[str, Counter]:
    found: dict[str, Counter] = {}
    for (axis, kind), size in sent.items():
        found.setdefault(axis, Counter())[kind] = size
    return found


@pytest.mark.parametrize(("family", "ranks", "x", "sequence_parallel"), [
    ("tiny", 4, 2, False), ("tiny-gpt", 4, 2, True), ("tiny", 8, 4, True),
])
def test_a_grid_sends_what_the_formula_says(
    pool: Pool, family: str, ranks: int, x: int, sequence_parallel: bool
) -> None:
    model = {"name": family, "layers": LAYERS, "heads": 8, "kv_heads": 4, "head_dim": 4, "ffn": 24}
    parallel = {"tp": ranks, "tp_x": x, "sequence_parallel": sequence_parallel, "micro_batch": 1}
    config = small_run(parallel, model, global_batch=1)
    config = config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": TOKENS})})
    shape = config.model.shape(vocab=259, sequence_length=TOKENS)
    said = tensor_volume_of(MicroBatch(shape, config.parallel, TOKENS, 4), StagePart(range(LAYERS)))
    for sent in pool.run(grid_volume, ranks, config):
        along = {(axis, kind): sent[axis][kind] for axis, kind in said if axis != "tp"}
        assert along == pytest.approx({key: said[key] for key in along})
        assert len(along) == (5 if sequence_parallel else 4)


def tensor_volume_of(run: MicroBatch, part: StagePart) -> Sent:
    """By formula, of a forward and a backward; the sums of norms' gradients, once a step, are not in it."""
    said = Sent()
    for way in tensor_parallel(run, part, run.s, by_parts=False):
        said.add(way)
    return said


def test_a_grid_sends_less_the_more_ranks_there_are() -> None:
    """As 1/sqrt(tp), where one dimension goes on sending as much."""
    shape, layer = model_shape("gpt3-175b"), StagePart(range(1), False, False)

    def volume(n: int, x: int) -> float:
        sent = tensor_volume_of(MicroBatch(shape, Layout(tp=n * n, tp_x=x), 1, 2), layer)
        return sum(sent.values()) - sent["tp_x", "all-reduce"]  # but for norms

    assert volume(4, 1) < volume(8, 1)
    assert volume(8, 8) / volume(4, 4) == pytest.approx(1 / 2, rel=0.2)
    assert volume(8, 8) < volume(8, 1) / 2


def test_replicas_of_a_grid_send_what_the_axes_would_alone(pool: Pool) -> None:
    config = tensor_run(4, dp=2, tp_x=2, zero=3)
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 2})})
    alone = pool.run(grid_volume, 4, tensor_run(4, tp_x=2))[0]
    for sent, buckets, _ in pool.run(volume, 8, config):
        along = by_axis(sent)
        assert {axis: along[axis] for axis in ("tp_x", "tp_y")} == {axis: alone[axis] for axis in ("tp_x", "tp_y")}
        assert of_parameters(sent) == (3 * sum(buckets) - buckets[-1]) / 2


@pytest.mark.parametrize(
    ("form", "kinds", "zero"),
    [
        ({}, ("all-reduce", "all-gather"), 1),
        ({}, ("all-reduce", "all-gather"), 3),
        ({"sequence_parallel": True, "tp_overlap": True}, ("send", "all-gather", "reduce-scatter"), 2),
    ],
    ids=["all-reduce, ZeRO-1", "all-reduce, ZeRO-3", "ring, ZeRO-2"],
)
def test_of_weights_split_two_ways_each_axis_sends_what_it_would_alone(
    pool: Pool, form: dict, kinds: tuple[str, ...], zero: int
) -> None:
    """Activations go along tp, the rank's half of the weights along the replicas."""
    config = tensor_run(2, dp=2, zero=zero, **form)
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 2})})
    alone = pool.run(tensor_volume, 2, tensor_run(2, **form))[0]
    for sent, buckets, _ in pool.run(volume, 4, config):
        assert {kind: sent["tp", kind] for kind in kinds} == {kind: alone[kind] for kind in kinds}
        last = buckets[-1] if zero == 3 else 0
        assert of_parameters(sent) == ((3 if zero == 3 else 2) * sum(buckets) - last) / 2


def engine_size(config: RunConfig) -> int:
    """Bytes of one token's hidden state, float32."""
    return 4 * config.model.hidden
