"""Products in 8 bits: every layout rounds what one device rounds, with scales of every grain."""

import dataclasses
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd

from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.float8.product import Float8Product
from shoal.engine.parallel.linear import Linear
from shoal.engine.precision.policy import POLICIES
from shoal.engine.precision.recipe import GRADIENT, WEIGHT
from shoal.pipeline.from_layout import check_run
from shoal.planning.cost.micro_batch import EightBits, MicroBatch
from shoal.spec.compatibility.sizes import float8_layers
from shoal.spec.config import Float8Config, RunConfig, build_config
from shoal.testing.verify.case import prepare, run_case
from shoal.training.dry_run.dry_run import make_samples
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import runs, small_run

MODEL = {"layers": 2, "hidden": 32, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn": 128}
CASES = [
    ("fp8", {}),
    ("fp8", {"scales": "row"}),
    ("fp8", {"scales": "block", "block": 16}),
    ("fp8", {"amax": "delayed", "history": 2, "margin": 1}),
    ("mxfp8", {"gradient": "e4m3", "keep": ("layers.0.*",)}),
    ("nvfp4", {}),
    ("nvfp4", {"keep": ("layers.1.*", "*.mlp.up")}),
]
LAYOUTS = [
    {"dp": 2, "zero": 3, "tp": 2, "recompute": "full"},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb-h1"},
]


def in_float8(config: RunConfig, precision: str, settings: dict) -> RunConfig:
    train = config.train.model_copy(update={"precision": precision})
    return config.model_copy(update={"train": train, "float8": Float8Config(**settings)})


@pytest.mark.parametrize(("precision", "settings", "parallel"), [
    (*case, layout) for case, layout in zip(CASES, (*LAYOUTS[::-1], *LAYOUTS[::-1], LAYOUTS[1], *LAYOUTS), strict=True)
], ids=str)
def test_every_grain_on_layouts(pool, precision, settings, parallel):
    config = in_float8(small_run(parallel, MODEL), precision, settings)
    verdict, _ = run_case(prepare(config, own_precision=False), pool, steps=3 if "history" in settings else 1)
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient < 1e-12


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_latents(pool, sequence_parallel):
    """With a scale of all tokens, of which with sequence parallelism a rank has a part."""
    model = {**MODEL, "kv_heads": 8, "latent": {"key_value_rank": 16, "rotary_dim": 16, "query_rank": 16}}
    run = small_run({"tp": 2, "sequence_parallel": sequence_parallel}, model)
    verdict, _ = run_case(prepare(in_float8(run, "fp8", {}), own_precision=False), pool, steps=2)
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient < 1e-12
    check_run(in_float8(run, "fp8", {}), run.model.shape(vocab=257, sequence_length=8))
    blocks = in_float8(run, "fp8", {"scales": "block", "block": 8})
    if sequence_parallel:
        with pytest.raises(UsageError, match="blocks of tokens are cut between the ranks that compute latents"):
            check_run(blocks, run.model.shape(vocab=257, sequence_length=8))


LATENT = {"key_value_rank": 16, "rotary_dim": 16}


@pytest.mark.parametrize("model", [
    {}, {"name": "tiny-gpt"}, {"kv_heads": 8, "latent": LATENT}, {"kv_heads": 8, "latent": LATENT | {"query_rank": 16}},
], ids=str)  # fmt: skip
def test_every_linear_layer_of_a_block_has_them_unless_it_is_kept(model):
    shape = build_config({"model": {"name": "tiny"} | model}).model.shape(vocab=257, sequence_length=8)
    with torch.device("meta"):
        blocks = Transformer(shape).layers.named_modules(prefix="layers")
    names = {name for name, module in blocks if isinstance(module, torch.nn.Linear)}
    assert sorted(names) == sorted(float8_layers(shape, ()))
    kept = {name for name in names if name.startswith("layers.0.") or name.endswith(".up")}
    assert sorted(names - kept) == sorted(float8_layers(shape, ("layers.0.*", "*.up")))


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs(max_ranks=4), st.sampled_from(CASES))
def test_drawn_layouts(pool, run, case):
    assume(run.parallel.world_size > 1)  # the first example is the simplest, of one rank
    config = in_float8(run, *case)
    try:
        case = prepare(config, own_precision=False, accumulate=False)
    except UsageError:
        assume(False)
    verdict, _ = run_case(case, pool, steps=2)
    assert not verdict.findings, f"{run.parallel.describe()}: {verdict.findings[0].text}"


def test_without_the_word_of_the_axis_scales_differ(pool):
    """What the collective is for: a layer that is told that nothing is split computes something else."""
    config = in_float8(small_run({"tp": 2}, MODEL), "fp8", {})
    assert all(difference > 1e-6 for difference in pool.run(_alone, 2, config))


def test_draws_are_of_positions_in_the_complete_gradient(pool):
    """A layer that counts its own features, not all, rounds otherwise."""
    config = in_float8(small_run({"tp": 2}, MODEL), "nvfp4", {})
    assert all(difference > 1e-6 for difference in pool.run(_count_own_features, 2, config))


def _count_own_features(config: RunConfig) -> float:
    norms = []
    for own in (False, True):
        engine = engine_of(prepare(config, own_precision=False).config)
        for stage in engine.stages:
            for module in stage.module.modules():
                if own and isinstance(module, Linear) and module.product is not None:
                    module.product.features = torch.arange(len(module.product.features))
        norms.append(engine.step(0).gradient_norm)
    return abs(norms[0] / norms[1] - 1)


def test_a_short_training_follows_that_in_bf16(pool):
    """One batch by heart. Four bits cost more than eight, and little of what is learnt."""
    losses = {}
    for precision in ("bf16", "fp8", "nvfp4"):
        config = in_float8(small_run({}, MODEL, steps=30), precision, {})
        (losses[precision],) = pool.run(_learn, 1, config)
    first, last = losses["bf16"][0], losses["bf16"][-1]
    assert abs(losses["fp8"][-1] - last) < 0.01 * (first - last)
    assert abs(losses["nvfp4"][-1] - last) < 0.02 * (first - last)


def _learn(config: RunConfig) -> list[float]:
    engine = engine_of(config)
    engine.sample_indices = lambda step, m: range(m * 2, m * 2 + 2)
    return [engine.step(step).loss for step in range(30)]


def _alone(config: RunConfig) -> float:
    norms = []
    for told in (True, False):
        case = prepare(config, own_precision=False)
        engine = engine_of(case.config)
        if not told:
            for stage in engine.stages:
                for module in stage.module.modules():
                    if isinstance(module, Linear) and module.product is not None:
                        module.product.split = ""
        norms.append(engine.step(0).gradient_norm)
    return abs(norms[0] / norms[1] - 1)


def test_eight_bits_are_kept_for_backward(pool):
    """The input of a product is kept as codes; q, k and v are one product, and so are gate and up."""
    kept, distinct = pool.run(_kept, 1, in_float8(small_run({}, MODEL), "fp8", {}))[0]
    assert kept == distinct == 2 * 4  # layers, products in each


def _kept(config: RunConfig) -> tuple[int, int]:
    """Codes that the first micro-batch keeps, and how many pieces of memory these are."""
    engine, saved = engine_of(config), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        engine.step(0)
    codes = [x for x in saved if x.dtype == torch.float8_e4m3fn]
    codes = codes[: len(codes) // engine.microbatches]
    return len(codes), len({x.untyped_storage().data_ptr() for x in codes})


def test_with_scales_of_the_past_too_what_is_not_finite_stays_so(pool):
    settings = {"amax": "delayed"}
    for norm in pool.run(_spoilt_norm, 1, in_float8(small_run({}, MODEL), "fp8", settings)):
        assert norm == "not finite"


def _spoilt_norm(config: RunConfig) -> str:
    """What comes of an infinity in the input of a layer, in the second step."""
    engine = engine_of(config)
    engine.step(0)
    layer = dict(engine.stages[0].module.named_modules())["layers.1.mlp"]
    layer.register_forward_pre_hook(lambda module, args: (args[0] + torch.inf, *args[1:]))
    try:
        engine.step(1)
    except NonFinite:
        return "not finite"
    return "finite"


def test_kept_codes_are_what_the_estimate_counts(pool):
    """Validation encodes the weights along the input features alone: half of the codes."""
    config = in_float8(small_run({"tp": 2}, MODEL), "fp8", {"scales": "row", "keep": ("layers.0.*", "*.k")})
    shape = config.model.shape(vocab=257, sequence_length=config.data.sequence_length)
    eight = EightBits.from_formats(POLICIES["fp8"].formats, config.float8)
    counted = MicroBatch(shape, config.parallel, 32, eight=eight).weight_codes(range(shape.layers))
    for kept in pool.run(_kept_codes, 2, config):
        assert 2 * kept == counted > 0


def _kept_codes(config: RunConfig) -> int:
    engine = engine_of(config)
    engine.evaluate(engine.samples)
    kept = {id(codes): codes for bucket in engine.parameters.buckets for _, pair in bucket._derived.values()
            for codes in pair}
    return sum(codes.codes.numel() for codes in kept.values())


def test_weights_are_encoded_once_for_a_step(pool):
    (counts,) = pool.run(_weight_encodings, 1, in_float8(small_run({"micro_batch": 1}, MODEL), "fp8", {}))
    assert counts == [8, 8, 8, 8, 8]  # two steps, one with changed weights, one with a restored state, validation


def _weight_encodings(config: RunConfig) -> list[int]:
    engine, counts = engine_of(config), []
    seen = Counter()
    encode = Float8Product.encode

    def counting(self, x, what, **options):
        seen[what] += 1
        return encode(self, x, what, **options)

    Float8Product.encode = counting
    try:
        for change in (lambda: None, lambda: None, lambda: _double(engine), lambda: engine.restored(2)):
            change()
            seen.clear()
            engine.step(0)
            assert seen[GRADIENT] == 8 * engine.microbatches
            counts.append(seen[WEIGHT])
        seen.clear()
        engine.evaluate(engine.samples)
        counts.append(seen[WEIGHT])
    finally:
        Float8Product.encode = encode
    return counts


def _double(engine) -> None:
    """Change the weights without telling the engine."""
    for bucket in engine.parameters.buckets:
        bucket.full.mul_(2)


@pytest.mark.parametrize(("parallel", "settings"), [
    ({"pp": 2, "schedule": "pipedream"}, {}),  # each micro-batch with the version of its forward
    ({"pp": 2, "schedule": "pipedream-2bw"}, {"amax": "delayed", "history": 2}),
    ({"dp": 2, "zero": 1}, {"scales": "row"}),
    ({"dp": 2, "zero": 3, "prefetch": 2}, {"scales": "row"}),
], ids=str)
def test_kept_codes_are_those_of_the_weights_in_use(pool, parallel, settings):
    config = in_float8(small_run(parallel, MODEL), "fp8", settings)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"clip_norm": 0.0})})
    for wrong in pool.run(_stale, config.parallel.world_size, config):
        assert wrong == 0


def _stale(config: RunConfig) -> int:
    """Count the products whose codes are not the codes of the current weight."""
    engine, wrong = engine_of(config), 0
    kept = Float8Product.encode_weight

    def compare(self, weights, *, turned, native):
        nonlocal wrong
        found, bucket = kept(self, weights, turned=turned, native=native), self.bucket
        self.bucket = SimpleNamespace(derive=lambda key, compute: compute())
        now = kept(self, weights, turned=turned, native=native)
        self.bucket = bucket
        wrong += not (torch.equal(found.codes.double(), now.codes.double()) and torch.equal(found.scale, now.scale))
        return found

    Float8Product.encode_weight = compare
    try:
        for step in range(3):
            engine.step(step)
        engine.evaluate(engine.samples)
    finally:
        Float8Product.encode_weight = kept
    return wrong


@pytest.mark.parametrize(("parallel", "precision", "settings"), [
    ({}, "fp64-fp8", {"amax": "delayed", "history": 2}), ({"dp": 2, "zero": 3}, "fp64-mxfp8", {}),
], ids=str)
def test_compiled_layers_compute_the_same(pool, parallel, precision, settings):
    """Captured and differentiated, but not made into C++. In bf16, compiled operations round differently."""
    config = in_float8(small_run(parallel, MODEL | {"layers": 1}), precision, settings)
    found = {}
    for compile in (False, True):
        train = config.train.model_copy(update={"compile": compile})
        changed = config.model_copy(update={"train": train})
        found[compile] = pool.run(take_steps, config.parallel.world_size, changed, timeout=300)
    for (compiled, graphs), (eager, none) in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=0)
        assert graphs > none == 0


def take_steps(config: RunConfig) -> tuple[torch.Tensor, int]:
    """Loss and gradient norm of two steps, and the number of compiled graphs."""
    torch._dynamo.reset()  # this process may have compiled the layers of many other tests
    graphs = []
    capture = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or make_boxed_func(graph.forward))
    case = prepare(config, own_precision=True, accumulate=False)
    case = dataclasses.replace(case, config=case.config.model_copy(update={"train": config.train}))
    mesh = Mesh(config.parallel, dist.get_rank())
    with patch.object(torch, "compile", partial(torch.compile, backend=capture, fullgraph=config.parallel.tp == 1)):
        engine = Engine(case.config, case.shape, mesh, make_samples(case.config, case.shape))
    results = [engine.step(step) for step in range(2)]
    values = torch.tensor([(result.loss, result.gradient_norm) for result in results], dtype=torch.float64)
    return values, len(graphs)


@pytest.mark.parametrize(("precision", "sections", "said"), [
    ("bf16", {"float8": {"scales": "row"}}, "this precision ignores the section"),
    ("bf16", {"loss_scale": {"initial": 2.0}}, "this precision ignores the section"),
    ("mxfp8", {"float8": {"scales": "row"}}, "the format fixes blocks of 32 and their scales"),
    ("nvfp4", {"float8": {"gradient": "e4m3"}}, "blocks of 16 and their scales.\n  Set only float8.keep, or use fp8"),
    ("nvfp4", {"train": {"compile": True}}, "does not know the position of the micro-batch"),
    ("nvfp4", {"parallel": {"tp": 2}, "model": {"name": "tiny", "ffn": 48}}, "a rank's 24 cut a block of 16"),
    ("fp8", {"float8": {"block": 64}}, "which does not read it"),
    ("fp8", {"float8": {"scales": "row", "amax": "delayed"}}, "the history has one value per tensor"),
    ("fp8", {"parallel": {"pp": 2, "schedule": "terapipe", "sequence_slices": 2}}, "each slice of a sequence"),
    ("fp8", {"parallel": {"tp": 4}, "model": {"name": "tiny", "heads": 4, "kv_heads": 2}}, "share a key/value head"),
    ("mxfp8", {"parallel": {"tp": 2}, "model": {"name": "tiny", "ffn": 96}}, "a rank's 48 cut a block of 32"),
    ("fp8", {"parallel": {"cp": 2}}, "the parts of a sequence"),
    ("fp8", {"float8": {"keep": ["*.mlp.down", "layers.0.*", "*.mlp.dwn"]}}, "'[*].mlp.dwn': it matches no linear"),
    ("mxfp8", {"float8": {"keep": ["head"]}}, "These are layers.0.attention.q, "),
])
def test_what_does_not_go_together_is_refused(precision, sections, said):
    values = {"train": {"precision": precision}, **{k: v for k, v in sections.items() if k != "train"}}
    values["train"] |= sections.get("train", {})
    config = build_config(values)
    shape = config.model.shape(vocab=257, sequence_length=config.data.sequence_length)
    with pytest.raises(UsageError, match=said):
        check_run(config, shape)
