"""Every rule of a layout: what passes computes the whole batch, what is refused says what would pass."""

import math
import re

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.catalog.experts import Depths, Experts
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.layout import AXES, Layout

TINY = model_shape("tiny")  # 4 layers, 8 heads, 4 kv heads, ffn 688


def check(layout=None, *, shape=TINY, global_batch=16, sequence_length=256, ranks=None, **fields):
    layout = layout or Layout(**fields)
    check_layout(layout, shape, global_batch=global_batch, sequence_length=sequence_length, ranks=ranks)


def refusal(**arguments):
    with pytest.raises(UsageError) as error:
        check(**arguments)
    return str(error.value)


def test_what_fits_passes():
    check(Layout(dp=2, zero=2, tp=2, sequence_parallel=True, pp=2, micro_batch=2), ranks=8)
    check()


def test_world_size_prints_the_equation_and_what_fits():
    message = refusal(pp=3, dp=2, tp=2, ranks=8)
    assert message == (
        "parallel: pp 3 x dp 2 x tp 2 = 12 ranks, but 8 were given.\n  Fits 8: pp 2. Or use 12 ranks."
    )
    assert "Fits 8: dp 4, or pp 2, or tp 4. Or use 4 ranks." in refusal(dp=2, tp=2, ranks=8)


def test_what_fits_a_world_size_also_fits_the_model_and_the_batch():
    assert "Fits 6: pp 3. Or use 2 ranks." in refusal(tp=2, ranks=6)  # dp 3 would not divide the batch
    message = refusal(dp=2, tp=2, global_batch=2, ranks=32)
    assert "Fits 32: pp 2 with tp 8, or pp 4 with tp 4. Or use 4 ranks." in message
    assert "No layout of 7 keeps all rules with this model, batch and length. Use 2 ranks." in refusal(tp=2, ranks=7)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"dp": 4, "ep": 2}, (1, 2, 1, 2, 1)),  # DDP shards no experts either
        ({"dp": 4, "ep": 2, "zero": 1}, (1, 1, 2, 2, 1)),
        ({"dp": 8, "zero": 2, "zero_shard": 2, "ep": 2}, (1, 4, 1, 2, 1)),
        ({"dp": 8, "zero": 2, "zero_shard": 4, "ep": 2}, (1, 2, 2, 2, 1)),
        ({"dp": 2, "tp": 2, "ep": 2, "pp": 3}, (3, 1, 1, 2, 2)),
        ({"dp": 2, "tp": 2, "cp": 2, "ep": 4, "etp": 1, "zero": 3}, (1, 1, 2, 4, 1)),
    ],
)
def test_experts_lie_over_a_stage_in_a_grid_of_their_own(fields, shape):
    assert Layout(**fields).expert_shape == shape
    assert math.prod(shape) == Layout(**fields).world_size


def test_latent_attention_takes_no_grid():
    message = refusal(shape=model_shape("deepseek-v3").model_copy(update={"experts": None}), tp=4, tp_x=2)
    assert "parallel.tp_x = 2 with model.latent: the norms of its latents need complete ones" in message


def test_zero_shard_needs_zero():
    message = refusal(dp=4, zero_shard=2)
    assert "parallel.zero_shard = 2 with parallel.zero = 0: it shards nothing" in message
    assert "Set parallel.zero to 1, 2 or 3" in message


def test_zero_shard_divides_dp():
    message = refusal(dp=8, zero=1, zero_shard=3)
    assert "parallel.zero_shard = 3 does not divide dp 8: dp = dp_replicate x zero_shard" in message
    assert "Nearest that do: 2 or 4." in message


def test_context_parallel_ranks_count() -> None:
    layout = Layout(dp=2, cp=4, ulysses=2, zero=1, tp=2)
    assert (layout.world_size, layout.cp_ring, layout.shards, layout.shape) == (16, 2, 8, (1, 1, 2, 4, 2))
    assert layout.equation() == "pp 1 x dp 2 x cp 4 x tp 2 = 16 ranks"
    assert layout.describe() == "dp 2 (ZeRO-1) x cp 4 (ring 2, zig-zag, ulysses 2) x tp 2"
    assert Layout(cp=2, ulysses=2, zero=3).describe() == "cp 2 (ulysses 2, ZeRO-3)"
    assert Layout(dp=2, cp=2).shards == 1, "without ZeRO nothing is sharded"


def test_ulysses_divides_cp_and_the_heads():
    assert "parallel.ulysses = 3 does not divide cp 4: cp = ring x ulysses" in refusal(cp=4, ulysses=3)
    assert "Fits cp 4: 1, 2, 4." in refusal(cp=4, ulysses=3)
    message = refusal(cp=16, ulysses=16)
    assert "parallel.ulysses = 16 does not fit the 8 heads and 4 key/value heads" in message
    assert "Fits cp 16: 1, 2, 4, 8." in message
    assert "of a tensor-parallel rank (tp 4)" in refusal(cp=4, ulysses=4, tp=4)
    assert "Fits cp 4: 1, 2." in refusal(cp=4, ulysses=4, tp=4)
    check(cp=8, ulysses=8, global_batch=1)  # two ranks have the same key/value head


def test_an_order_needs_a_ring():
    message = refusal(cp=2, ulysses=2, cp_order="striped")
    assert "parallel.cp_order = 'striped' with parallel.cp = 2: there is no ring" in message
    assert "parallel.cp_order = 'contiguous' with parallel.cp = 1" in refusal(cp_order="contiguous")


def test_every_context_parallel_rank_has_tokens():
    message = refusal(cp=8, sequence_length=15)
    assert "data.sequence_length = 15 is too short for cp 8: it needs 2 x cp = 16 tokens" in message
    assert "parallel.cp <= 7." in message
    assert "2 x cp x tp = 32 tokens" in refusal(cp=8, tp=2, sequence_parallel=True, sequence_length=30)
    check(cp=7, sequence_length=15)


def test_what_fits_a_world_size_may_change_cp():
    assert "Fits 4: cp 4, or dp 2, or pp 2, or tp 2." in refusal(cp=2, ranks=4)


def test_global_batch_is_a_multiple_of_one_pass():
    message = refusal(dp=3, micro_batch=2, global_batch=16)
    assert "train.global_batch = 16 is not a multiple of dp 3 x micro_batch 2 = 6" in message
    assert "global_batch = dp x micro_batch x microbatches" in message
    assert "Nearest global_batch that fits: 12 or 18." in message and "Or micro_batch" not in message
    assert "Nearest global_batch that fits: 16. Or micro_batch: 1 or 2." in refusal(dp=4, micro_batch=4, global_batch=8)
    assert "Nearest global_batch that fits: 32." in refusal(dp=4, micro_batch=8, global_batch=16)


def test_a_batch_that_may_not_change_names_the_nearest_dp():
    """A resumed run keeps its global batch, so that only another dp helps it."""
    assert "15 or 18. Or dp: 2 or 4." in refusal(dp=3, micro_batch=1, global_batch=16)
    assert "12 or 18. Or dp: 2 or 4." in refusal(dp=3, micro_batch=2, global_batch=16)
    assert "Or dp" not in refusal(dp=3, micro_batch=3, global_batch=16)
    assert "Or dp" not in refusal(dp=6, zero=1, zero_shard=3, micro_batch=1, global_batch=16)


def test_tp_divides_heads():
    message = refusal(tp=3)
    assert "parallel.tp = 3 does not divide model.heads = 8" in message
    assert "Nearest tp that fits the model: 2 or 4." in message


def test_tp_divides_ffn():
    message = refusal(tp=8, shape=TINY.model_copy(update={"ffn": 684}))
    assert "parallel.tp = 8 does not divide model.ffn = 684" in message
    assert "Nearest tp that fits the model: 4 or 2." in message


def test_tp_divides_kv_heads_or_is_a_multiple():
    shape = TINY.model_copy(update={"heads": 12, "kv_heads": 6, "ffn": 720})
    message = refusal(tp=4, shape=shape)
    assert "parallel.tp = 4 fits model.kv_heads = 6 neither way" in message
    assert "Nearest tp that fits the model: 3 or 2." in message
    check(tp=12, shape=shape)  # every kv head on two ranks


def test_vocabulary_need_not_divide():
    assert TINY.vocab % 2
    check(tp=2)


def test_sequence_parallel_needs_tp():
    message = refusal(sequence_parallel=True)
    assert "parallel.sequence_parallel = true with parallel.tp = 1" in message
    assert "Set parallel.tp to 2 or more" in message


def test_sequence_parallel_divides_the_sequence():
    message = refusal(tp=4, sequence_parallel=True, sequence_length=255)
    assert "data.sequence_length = 255 is not a multiple of tp 4" in message
    assert "Nearest lengths that are: 252 or 256." in message
    assert "Nearest lengths that are: 4." in refusal(tp=4, sequence_parallel=True, sequence_length=3)
    check(tp=4, sequence_length=255)


def test_a_grid_of_tensor_parallel_ranks():
    check(tp=4, tp_x=2)
    check(tp=4, tp_x=2, sequence_parallel=True, sequence_length=254)  # of which each rank takes half
    assert "parallel.tp_x = 2 with parallel.tp = 1" in refusal(tp_x=2)
    message = refusal(tp=4, tp_x=4)
    assert "parallel.tp_x = 4 does not make a grid of tp 4: it must divide it, and be less" in message
    assert "Fits tp 4: 1, 2." in message
    assert "does not divide model.hidden = 254" in refusal(tp=8, tp_x=4, shape=TINY.model_copy(update={"hidden": 254}))
    shape = TINY.model_copy(update={"heads": 12, "kv_heads": 6, "ffn": 684})
    message = refusal(tp=12, tp_x=3, shape=shape.model_copy(update={"hidden": 252}))
    assert "leaves tp / tp_x = 4, which fits model.kv_heads = 6 neither way" in message
    assert "Fits tp 12: 1, 2, 4, 6." in message
    message = refusal(tp=4, tp_x=2, sequence_parallel=True, sequence_length=255)
    assert "255 is not a multiple of tp / tp_x = 2" in message


@pytest.mark.parametrize(
    ("fields", "model", "said"),
    [
        ({"tp_overlap": True}, {}, "tp_overlap"),
        ({}, {"experts": Experts(count=4, per_token=1, ffn=8)}, "experts"),
        ({}, {"depths": Depths(capacity=0.5)}, "depths"),
    ],
)
def test_what_a_grid_does_not_combine_with(fields, model, said):
    message = refusal(tp=4, tp_x=2, shape=TINY.model_copy(update=model), **fields)
    assert "parallel.tp_x = 2 with" in message
    assert f"Leave tp_x or {said} out." in message


def test_what_shards_no_parameters_gathers_none():
    message = refusal(dp=2, zero=1, prefetch=2)
    assert "parallel.prefetch = 2 with parallel.zero = 1: parameters are not sharded" in message
    assert "parallel.reshard_after_forward = false" in refusal(dp=2, zero=2, reshard_after_forward=False)
    check(dp=2, zero=3, prefetch=0, reshard_after_forward=False)


def test_only_what_is_sharded_can_be_offloaded_whole():
    assert "parallel.offload = 'parameters' with parallel.zero = 2" in refusal(dp=2, zero=2, offload="parameters")
    assert "parallel.sync = 'diloco'" in refusal(dp=2, sync="diloco", offload="optimizer")
    check(dp=2, zero=3, offload="parameters")
    check(offload="optimizer")


def test_every_stage_has_a_layer():
    message = refusal(pp=5)
    assert "parallel.pp = 5: 4 layers cannot fill 5 stages" in message
    assert "Use pp <= 4." in message
    check(pp=3)  # layers are spread unevenly


def test_fewer_microbatches_than_stages_is_slow_but_right():
    check(pp=4, global_batch=1)


@pytest.mark.parametrize("field", ["dp", "tp", "pp", "micro_batch", "zero_shard", "bucket_mb"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_positive(field, value):
    with pytest.raises(UsageError, match=f"Layout: {field} = {value}: input should be greater than 0"):
        Layout(**{field: value})


def test_a_keyword_of_another_trainer_leads_to_the_field():
    with pytest.raises(UsageError, match="Layout: there is no key 'tensor_parallel_degree'; did you mean 'tp'"):
        Layout(tensor_parallel_degree=2)


@pytest.mark.parametrize("wrong", [{"zero": 4}, {"schedule": "1f1bb"}, {"recompute": "some"}, {"bucket_mb": math.inf}])
def test_choices_are_closed(wrong):
    with pytest.raises(UsageError, match=f"Layout: {next(iter(wrong))} = "):
        Layout(**wrong)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "one device"),
        ({"dp": 2}, "dp 2 (DDP)"),
        ({"dp": 4, "zero": 3, "zero_shard": 2}, "dp 4 (ZeRO-3, shard 2)"),
        ({"tp": 2, "sequence_parallel": True, "pp": 2}, "tp 2 + sequence parallel x pp 2 (1f1b)"),
        ({"tp": 8, "tp_x": 2}, "tp 8 (grid 2 x 4)"),
        ({"dp": 4, "pp": 2, "ep": 2}, "dp 4 (DDP) x pp 2 (1f1b) with ep 2"),  # 8 ranks: ep is no factor of them
    ],
)
def test_describe(fields, line):
    assert Layout(**fields).describe() == line


# ---- properties ----------------------------------------------------------------------------------------------------

degree = st.integers(1, 8)
slip = st.sampled_from([0] * 7 + [1, -1])  # now and then a size is off by one


@st.composite
def cases(draw) -> tuple[Layout, ModelShape, dict]:
    """A layout, a model and sizes: about half of them fit, the others miss by little."""
    dp, tp, pp, micro_batch = draw(degree), draw(degree), draw(degree), draw(st.integers(1, 4))
    zero = draw(st.integers(0, 3))
    shard = draw(st.none() | st.sampled_from([d for d in range(1, dp + 1) if dp % d == 0]))
    if shard and draw(slip):
        shard += 1
    cp = draw(st.sampled_from([1, 1, 2, 4, 6]))
    ulysses = max(1, draw(st.sampled_from([n for n in range(1, cp + 1) if cp % n == 0])) + draw(slip))
    layout = Layout(
        dp=dp,
        tp=tp,
        cp=cp,
        ulysses=ulysses,
        cp_order=draw(st.sampled_from(["zig-zag", "zig-zag", "striped"])),
        pp=pp,
        micro_batch=micro_batch,
        zero=zero,
        zero_shard=shard if zero or draw(slip) else None,
        sequence_parallel=draw(st.booleans()) if tp > 1 else bool(draw(slip)),
    )
    heads = max(1, tp * draw(st.sampled_from([1, ulysses])) * draw(st.integers(1, 4)) + draw(slip))
    shape = TINY.model_copy(
        update={
            "layers": max(1, pp + draw(st.integers(0, 5)) + draw(slip)),
            "heads": heads,
            "kv_heads": draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0])),
            "ffn": 8 * tp * draw(degree) + draw(slip),
        }
    )
    sizes = {
        "global_batch": max(1, dp * micro_batch * draw(degree) + draw(slip)),
        "sequence_length": max(1, tp * draw(st.sampled_from([1, 2 * cp])) * draw(degree) + draw(slip)),
        "ranks": draw(st.none() | st.just(max(1, layout.world_size + draw(slip)))),
    }
    return layout, shape, sizes


@given(cases())
def test_a_layout_covers_the_batch_or_says_what_would(case):
    layout, shape, sizes = case
    try:
        check_layout(layout, shape, **sizes)
    except UsageError as error:
        event("refused")
        for mended_layout, mended_sizes in mends(layout, sizes, str(error)):
            still = remaining(mended_layout, shape, mended_sizes)
            assert complaint(str(error)) != complaint(still), f"{error}\nmended: {mended_layout} {mended_sizes}"
        return
    event("accepted")
    batch, ranks = sizes["global_batch"], sizes["ranks"] or layout.world_size
    assert layout.microbatches(batch) * layout.dp * layout.micro_batch == batch
    assert math.prod(layout.shape) == layout.world_size == ranks
    assert len(layout.shape) == len(AXES)
    assert layout.dp_replicate * layout.dp_shard == layout.dp
    assert layout.cp_ring * layout.ulysses == layout.cp
    assert shape.heads % (layout.tp * layout.ulysses) == shape.ffn % layout.tp == 0
    assert math.lcm(shape.kv_heads, layout.tp) in (shape.kv_heads, layout.tp)


@given(
    dp=degree, tp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]), ep=degree, etp=st.none() | degree,
    count=st.integers(1, 12), ffn=st.integers(1, 12),
)  # fmt: skip
def test_experts_cover_a_stage_or_what_would_is_said(dp, tp, cp, ep, etp, count, ffn):
    layout = Layout(dp=dp, tp=tp, cp=cp, ep=ep, etp=etp)
    shape = TINY.model_copy(update={"experts": Experts(count=count, ffn=ffn)})
    sizes = {"global_batch": dp, "sequence_length": 256}
    said = remaining(layout, shape, sizes)
    inside = ep * layout.expert_tensor
    assert (not said) == ((dp * cp * tp) % inside == count % ep == ffn % layout.expert_tensor == 0), said
    proposals = re.compile(r"(parallel.*?) .*Nearest (\w+) that fits: (.*)\.", re.DOTALL)
    if match := proposals.match(said):
        for value in map(int, match[3].split(" or ")):
            still = proposals.match(remaining(layout.model_copy(update={match[2]: value}), shape, sizes))
            assert still is None or still.group(1, 2) != match.group(1, 2), f"{said}\nmended: {match[2]} {value}"


def complaint(message: str) -> str:
    """The field that a message is about."""
    return message.split(" = ")[0].split(":")[0]


def remaining(layout, shape, sizes) -> str:
    try:
        check_layout(layout, shape, **sizes)
    except UsageError as error:
        return str(error)
    return ""


def mends(layout: Layout, sizes: dict, message: str):
    """The layouts and sizes that a message proposes."""
    mend = message.split("\n", 1)[1]
    if message.startswith("parallel: "):
        for proposal in re.findall(r"Fits \d+: (.*)\. Or", mend):
            for degrees in proposal.split(", or "):
                yield layout.model_copy(update={n: int(v) for n, v in re.findall(r"(\w\w) (\d+)", degrees)}), sizes
        yield layout, sizes | {"ranks": int(re.findall(r"[Uu]se (\d+) ranks", mend)[0])}
    for what, key in (("global_batch", "global_batch"), ("lengths", "sequence_length")):
        if mend.strip().startswith(f"Nearest {what}"):
            rest, _, of_dp = mend.partition(" Or dp")
            sizes_of_batch, _, of_micro_batch = rest.partition(" Or micro_batch")
            for value in re.findall(r"\d+", sizes_of_batch):
                yield layout, sizes | {key: int(value)}
            for value in re.findall(r"\d+", of_micro_batch):
                yield layout.model_copy(update={"micro_batch": int(value)}), sizes
            for value in re.findall(r"\d+", of_dp):
                yield layout.model_copy(update={"dp": int(value)}), sizes | {"ranks": None}
    if "Nearest tp" in mend:
        for value in re.findall(r"\d+", mend):
            # A proposal may be tp 1, at which sequence parallelism has its own say.
            changed = {"tp": int(value), "sequence_parallel": layout.sequence_parallel and int(value) > 1}
            yield layout.model_copy(update=changed), sizes | {"ranks": None}
    if "Nearest that do" in mend:
        field = re.match(r"parallel\.(\w+)", message)[1]
        for value in re.findall(r"\d+", mend):
            yield layout.model_copy(update={field: int(value)}), sizes
    if match := re.search(r"Fits cp \d+: ([\d, ]+)\.", mend):
        for value in match[1].split(", "):
            yield layout.model_copy(update={"ulysses": int(value)}), sizes
    if match := re.search(r"parallel\.cp <= (\d+)", mend):
        yield layout.model_copy(update={"cp": int(match[1]), "ulysses": 1}), sizes | {"ranks": None}
    if match := re.search(r"Use pp <= (\d+)", mend):
        yield layout.model_copy(update={"pp": int(match[1])}), sizes | {"ranks": None}
