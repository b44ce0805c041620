"""What formulas say a forward leaves for its backward is what autograd keeps."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.base.section import plain
from shoal.engine import kernels
from shoal.engine.runtime import take_tokens
from shoal.launch.worker_pool import Pool
from shoal.planning.cost.memory import activations
from shoal.planning.cost.memory.activations import Saved
from shoal.planning.cost.micro_batch import EightBits, MicroBatch
from shoal.planning.cost.parameters import rank_parts
from shoal.spec.catalog import model_shape
from shoal.spec.config import Float8Config, RunConfig, build_config
from shoal.spec.layout import Layout
from shoal.training.step.engine import Engine
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run


def kept(engine: Engine) -> dict[int, int]:
    """Bytes by address of everything that autograd keeps of one forward of this rank's first stage."""
    stage = engine.stages[0]
    weights = {bucket.full.untyped_storage().data_ptr() for bucket in stage.parameters.buckets}
    found, alive = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    batch = take_tokens(engine.make_batches(0)[0], engine.runtime.tokens)
    local = engine.runtime.hidden_shape
    hidden = torch.zeros(local, dtype=engine.policy.compute, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage.module(batch.tokens, batch.targets, batch.documents, hidden)
    assert output.requires_grad
    return found


def both(config: RunConfig, fused: bool = False) -> tuple[int, int]:
    """Bytes kept on this rank, with fused operators as on CUDA or without, and what the formulas say autograd keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "use_fused", lambda x: fused)
        return _both(config, fused)


def _both(config: RunConfig, fused: bool) -> tuple[int, int]:
    engine = engine_of(config)
    layout = config.parallel
    run = MicroBatch(
        engine.shape, layout, config.data.sequence_length, engine.policy.compute.itemsize,
        kernel=config.train.attention,
        masked=config.data.document_mask, fused=fused,
        eight=EightBits.from_formats(engine.policy.formats, config.float8),
    )
    part = rank_parts(engine.shape, engine.program, engine.mesh.index("pp"))[0]
    said = activations.stage(run, part.layers, first=part.first, last=part.last)
    return sum(kept(engine).values()), activations.total([s for s in said if kept_by_autograd(s, layout)])


def kept_by_autograd(saved: Saved, layout: Layout) -> bool:
    """The runtime keeps a stage's ends, and the closure of a layer to be recomputed what all layers share."""
    if saved.what in ("stage input", "stage output"):
        return False
    return not (layout.recompute == "full" and saved.what in ("cos, sin", "mask"))


def with_depths(config: RunConfig, **fields: object) -> RunConfig:
    depths = {"depths": {"capacity": 0.5, "predictor": 5, **fields}}
    return config.model_copy(update={"model": build_config({"model": plain(config)["model"] | depths}).model})


def with_latents(config: RunConfig, **latent: int) -> RunConfig:
    model = plain(config)["model"] | {"kv_heads": 4, "latent": {"key_value_rank": 16, "rotary_dim": 8, **latent}}
    return config.model_copy(update={"model": build_config({"model": model}).model})


def run_of(
    family: str, recompute: str, kernel: str, masked: bool, precision: str, s: int = 24, **parallel: object
) -> RunConfig:
    model = {"name": family, "hidden": 48, "heads": 4, "kv_heads": 2, "head_dim": 12, "ffn": 80, "vocab": 300}
    config = small_run({"recompute": recompute, **parallel}, model, precision=precision, attention=kernel)
    data = config.data.model_copy(update={"sequence_length": s, "document_mask": masked})
    return config.model_copy(update={"data": data})


@pytest.mark.parametrize(("family", "precision", "shared", "biases"), [
    ("tiny", "fp32", 0, False), ("tiny", "bf16", 1, False), ("tiny", "bf16", 0, True), ("tiny", "fp32", 1, True),
    ("tiny-gpt", "bf16", 0, False), ("tiny-gpt", "fp32", 1, True),
])
def test_what_a_layer_with_experts_keeps(pool: Pool, family: str, precision: str, shared: int, biases: bool) -> None:
    """To the byte but for two scalars, which losses keep."""
    config = run_of(family, "none", "sdpa", False, precision, s=96)
    experts = {"count": 4, "per_token": 2, "ffn": 40, "shared": shared, "every": 2, "biases": biases}
    activation = "clamped" if biases and family == "tiny" else None
    parts = plain(config)["model"] | {"experts": experts, "activation": activation}
    model = config.model_copy(update={"model": build_config({"model": parts}).model})
    for fused in (False, True)[: 1 + (family == "tiny")]:
        ((found, said),) = pool.run(both, 1, model, fused)
        assert 0 <= found - said <= 16 + 4 * 4 * fused, fused  # and the ends of experts' rows


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("family", "precision", "weight"), [
    ("tiny", "fp32", "score"), ("tiny", "bf16", "sigmoid"), ("tiny-gpt", "bf16", "score"),
])
def test_what_a_layer_of_some_tokens_keeps(
    pool: Pool, weight: str, family: str, precision: str, recompute: str
) -> None:
    """To the byte."""
    base = run_of(family, recompute, "sdpa", False, precision, s=96)
    ((found, said),), ((before, said_before),) = (
        pool.run(both, 1, config) for config in (with_depths(base, weight=weight), base)
    )
    assert found - before == said - said_before


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}])
def test_what_ranks_keep_of_some_tokens(pool: Pool, parallel: dict) -> None:
    """Where ranks share sequences not as many of each rank's own tokens are among them."""
    config = with_depths(run_of("tiny", "none", "sdpa", True, "fp32", s=96, **parallel))
    for found, said in pool.run(both, 2, config):
        assert said == pytest.approx(found, rel=0.02 if set(parallel) == {"tp"} else 0.1)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["tiny", "tiny-gpt"]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["sdpa", "explicit"]),
    st.booleans(),
    st.sampled_from(["fp32", "bf16", "fp64", "fp8", "mxfp8", "nvfp4"]),
    st.booleans(),
)
def test_what_one_device_keeps(
    pool: Pool, family: str, recompute: str, kernel: str, masked: bool, precision: str, fused: bool
) -> None:
    config = run_of(family, recompute, kernel, masked, precision)
    # Where torch's layer norm in bf16 keeps its statistics in bf16, CUDA keeps them in fp32.
    ((found, said),) = pool.run(both, 1, config, fused and family == "tiny" and precision != "fp64")
    assert said == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize("pattern", [(), ("global", "local")])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(("kernel", "masked", "s"), [("sdpa", False, 24), ("sdpa", True, 24), ("explicit", False, 600)])
def test_what_windows_keep(pool: Pool, kernel: str, masked: bool, s: int, recompute: str, pattern: tuple) -> None:
    config = run_of("tiny", recompute, kernel, masked, "fp32", s=s)
    model = config.model.model_copy(update={"window": 7, "pattern": pattern})
    ((found, said),) = pool.run(both, 1, config.model_copy(update={"model": model}))
    assert said == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize("parts", [
    {"post_norm": "also"}, {"post_norm": "only", "qk_norm": True, "joint_qk_norm": True}, {"qk_norm": True},
    {"activation": "gelu", "scaled_embedding": True, "query_scalar": 5, "logit_softcap": 2.0}, {"softcap": 2.0},
    {"softcap": 2.0, "window": 7, "pattern": ("local", "global"), "local_rope_theta": 100.0},
    {"qk_norm": True, "plain_qk_norm": True, "window": 7, "pattern": ("local", "global"), "chunked": True,
     "global_rope": False, "temperature": 0.1},
    {"mtp_depth": 2},
    {"sinks": True, "window": 7, "pattern": ("local", "global"), "out_bias": True, "activation": "clamped"},
])  # fmt: skip
@pytest.mark.parametrize("fused", [False, True])
def test_what_other_parts_keep(pool: Pool, fused: bool, parts: dict) -> None:
    config = run_of("tiny", "none", "sdpa", False, "fp32")
    model = config.model.model_copy(update=parts)
    ((found, said),) = pool.run(both, 1, config.model_copy(update={"model": model}), fused)
    assert said == pytest.approx(found, rel=0.005)


def test_attention_in_blocks_keeps_fewer_scores(pool: Pool) -> None:
    ((found, said),) = pool.run(both, 1, run_of("tiny", "none", "explicit", False, "fp32", s=600))
    assert said == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize(("family", "precision", "kernel", "recompute", "float8"), [
    ("tiny", "fp8", "sdpa", "none", {}),
    ("tiny-gpt", "fp8", "explicit", "none", {"scales": "row"}),
    ("tiny", "fp8", "sdpa", "selective", {"keep": ["layers.0.*", "*.attention.k", "*.down"]}),
    ("tiny", "mxfp8", "explicit", "none", {}),
    ("tiny", "nvfp4", "sdpa", "none", {}),
])  # fmt: skip
def test_what_products_in_8_bits_keep(
    pool: Pool, family: str, precision: str, kernel: str, recompute: str, float8: dict
) -> None:
    """Codes of their inputs, once where several share one; what attention itself needs as it is."""
    config = run_of(family, recompute, kernel, False, precision)
    ((found, said),) = pool.run(both, 1, config.model_copy(update={"float8": Float8Config(**float8)}))
    assert said == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize(("family", "recompute", "float8"), [
    ("tiny", "none", {}), ("tiny", "selective", {"scales": "row", "keep": ["layers.*.mlp.*"]}),
    ("tiny", "none", {"keep": ["*.k", "*.up"]}), ("tiny-gpt", "none", {}), ("tiny", "full", {}),
])  # fmt: skip
def test_a_rank_keeps_a_part_of_the_codes_of_one_product_s_input(
    pool: Pool, family: str, recompute: str, float8: dict
) -> None:
    """With sequence parallelism; codes of several products, or of a recomputed layer, stay gathered."""
    config = run_of(family, recompute, "sdpa", False, "fp8", tp=2, sequence_parallel=True)
    for found, said in pool.run(both, 2, config.model_copy(update={"float8": Float8Config(**float8)})):
        assert said == pytest.approx(found, rel=0.005)


def test_codes_that_ranks_cannot_keep_equal_parts_of_stay_gathered(pool: Pool) -> None:
    config = run_of("tiny", "none", "sdpa", False, "fp8", tp=2, sequence_parallel=True)
    config = config.model_copy(update={"model": config.model.model_copy(update={"hidden": 49})})
    for found, said in pool.run(both, 2, config):
        assert said == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize(("latent", "keep"), [
    ({}, []), ({}, ["*.q"]), ({}, ["*.kv_down"]), ({"query_rank": 16}, []),
])  # fmt: skip
def test_a_rank_keeps_a_part_of_the_codes_of_what_queries_are_computed_from(
    pool: Pool, latent: dict, keep: list[str]
) -> None:
    """In latent attention; the heads of keys and values, which are split too, have an input of their own."""
    config = with_latents(run_of("tiny", "none", "sdpa", False, "fp8", tp=2, sequence_parallel=True), **latent)
    for found, said in pool.run(both, 2, config.model_copy(update={"float8": Float8Config(keep=keep)})):
        assert said == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize(("tp", "sequence_parallel", "family", "recompute"), [
    (2, True, "tiny", "none"), (2, True, "tiny", "selective"), (2, True, "tiny-gpt", "full"),
    (2, False, "tiny-gpt", "none"), (2, False, "tiny-gpt", "selective"), (2, False, "tiny", "full"),
    (4, False, "tiny", "selective"), (4, True, "tiny-gpt", "none"),  # a key/value head for each two ranks
])
def test_what_tensor_parallel_ranks_keep(
    pool: Pool, tp: int, sequence_parallel: bool, family: str, recompute: str
) -> None:
    parallel = {"tp": tp, "sequence_parallel": sequence_parallel}
    config = run_of(family, recompute, "sdpa", False, "bf16", **parallel)
    for found, said in pool.run(both, tp, config):
        assert said == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"tp": 4, "tp_x": 2}])
def test_what_ranks_with_fused_operators_keep(pool: Pool, parallel: dict) -> None:
    config = run_of("tiny", "none", "sdpa", False, "bf16", **parallel)
    for found, said in pool.run(both, config.parallel.tp, config, True):
        assert said == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize(("family", "precision", "kernel", "recompute", "parallel"), [
    ("tiny", "fp32", "sdpa", "none", {}),
    ("tiny-gpt", "bf16", "explicit", "none", {"sequence_parallel": True}),
    ("tiny-gpt", "fp32", "sdpa", "selective", {"cp": 2}),
    ("tiny", "bf16", "sdpa", "none", {"cp": 2, "ulysses": 2}),
    ("tiny", "bf16", "sdpa", "full", {"cp": 2}),
])
def test_what_ranks_of_a_grid_keep(
    pool: Pool, family: str, precision: str, kernel: str, recompute: str, parallel: dict
) -> None:
    heads = 8 if "ulysses" in parallel else 4
    config = run_of(family, recompute, kernel, False, precision, s=48, tp=4, tp_x=2, **parallel)
    config = config.model_copy(update={"model": config.model.model_copy(update={"heads": heads, "head_dim": 6})})
    for found, said in pool.run(both, config.parallel.world_size, config):
        assert said == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(("parallel", "recompute"), [
    ({"cp": 2}, "none"), ({"cp": 2}, "selective"), ({"cp": 2, "ulysses": 2}, "none"),
    ({"cp": 2, "ulysses": 2}, "full"), ({"cp": 4, "ulysses": 2}, "selective"),
    ({"cp": 2, "tp": 2, "sequence_parallel": True}, "none"),
])
def test_what_context_parallel_ranks_keep(pool: Pool, parallel: dict, recompute: str) -> None:
    family, masked = ("tiny-gpt", False) if parallel == {"cp": 2} else ("tiny", True)
    config = run_of(family, recompute, "sdpa", masked, "bf16", s=48, **parallel)
    for found, said in pool.run(both, config.parallel.world_size, config):
        assert said == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("family", ["tiny", "tiny-gpt"])
def test_what_a_stage_keeps(pool: Pool, family: str) -> None:
    config = run_of(family, "none", "sdpa", False, "fp32", pp=3)
    for found, said in pool.run(both, 3, config):
        assert said == pytest.approx(found, rel=0.02)


def test_ours_is_the_papers_without_dropout_and_scores() -> None:
    """GPT-3: 34 less the masks of two dropouts, no scores with a fused kernel; and what norms and softmax sum up."""
    shape = model_shape("gpt3-175b")
    run = MicroBatch(shape, Layout(), 2048, 2)
    ours = activations.total(activations.layer(run)) / (2048 * shape.hidden)
    assert ours == pytest.approx(34 - 2, abs=0.05)
