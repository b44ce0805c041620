"""Products in 8 bits: every layout rounds what one device rounds, with scales of every grain."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.base.errors import UsageError
from shoal.engine.parallel.float8 import Float8, multiply
from shoal.engine.parallel.linear import Linear
from shoal.engine.precision.float8 import ROW, TENSOR
from shoal.engine.precision.policy import POLICIES
from shoal.pipeline.from_layout import check_run
from shoal.spec.catalog import model_shape
from shoal.spec.config import Float8Config, RunConfig, build_config
from shoal.spec.number_formats import E4M3, E5M2
from shoal.testing.verify.case import prepare, run_case
from shoal.training.step.optimizer_step import NonFinite
from tests.engine.parallel.counting import engine_of
from tests.engine.precision.quantise import quantise
from tests.testing.verify.runs import runs, small_run

MODEL = {"layers": 2, "hidden": 32, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn": 128}
CASES = [
    ("fp8", {}),
    ("fp8", {"scales": "row"}),
    ("fp8", {"scales": "block", "block": 16}),
    ("fp8", {"amax": "delayed", "history": 2, "margin": 1}),
    ("mxfp8", {"gradient": "e4m3", "keep": ("layers.0.*",)}),
]
LAYOUTS = [
    {"dp": 2, "zero": 3, "tp": 2, "recompute": "full"},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb-h1"},
]


def in_float8(config: RunConfig, precision: str, float8: dict) -> RunConfig:
    train = config.train.model_copy(update={"precision": precision})
    return config.model_copy(update={"train": train, "float8": Float8Config(**float8)})


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize(("precision", "float8"), CASES, ids=str)
def test_every_grain_on_layouts(pool, precision, float8, parallel):
    config = in_float8(small_run(parallel, MODEL), precision, float8)
    verdict, _ = run_case(prepare(config, own_precision=False), pool, steps=3 if "history" in float8 else 2)
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient < 1e-12


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs(max_ranks=4), st.sampled_from(CASES))
def test_drawn_layouts(pool, run, case):
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
    """The input of a layer is kept as codes; q, k and v keep the same ones, and so do gate and up."""
    kept, distinct = pool.run(_kept, 1, in_float8(small_run({}, MODEL), "fp8", {}))[0]
    assert kept == 2 * 7  # layers, linear layers in each
    assert distinct == 2 * 4


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


@pytest.mark.parametrize(("grain", "dtype", "near"), [(TENSOR, torch.float32, 1e-4), (ROW, torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3)])
def test_native_products_are_the_emulated_ones(grain, dtype, near, kinds, monkeypatch):
    """`torch._scaled_mm` runs on the CPU too."""
    calls, product = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **named: (calls.append(named), product(*args, **named))[1])
    a, b = torch.randn(32, 64), torch.randn(48, 64) * torch.logspace(0, 2, 48)[:, None]
    a, b = quantise(a, kinds[0], grain), quantise(b, kinds[1], grain)
    exact = a.values(torch.float64) @ b.values(torch.float64).t()
    for native in (False, True):
        error = (multiply(a, b, dtype, native=native).double() - exact).abs() / exact.abs().amax(0)
        assert error.max() < near and len(calls) == native


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3)], ids=["forward", "backward"])
def test_native_products_are_what_torch_takes_on_cuda(scales, kinds, monkeypatch):
    """Fake tensors go through the checks that `torch._scaled_mm` makes of their shapes, strides and formats."""
    taken, product = [], torch._scaled_mm

    def counting(*args, **options):
        taken.append(options["scale_a"].shape)
        return product(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counting)
    grain = {"tensor": TENSOR, "row": ROW}[scales]
    with FakeTensorMode():
        a, b = (torch.empty(n, 64, dtype=torch.bfloat16, device="cuda") for n in (32, 48))
        a, b = quantise(a, kinds[0], grain), quantise(b, kinds[1], grain)
        y = multiply(a, b, torch.bfloat16, native=True)
        assert (tuple(y.shape), y.dtype, y.device.type) == ((32, 48), torch.bfloat16, "cuda")
    assert [tuple(shape) for shape in taken] == [() if scales == "tensor" else (32, 1)]


@pytest.mark.parametrize(("precision", "settings", "native"), [
    ("fp8", {}, True), ("fp8", {"scales": "row"}, True), ("fp8", {"scales": "block"}, False), ("mxfp8", {}, False),
    ("fp64-fp8", {}, False),
])
def test_only_products_that_are_made_in_8_bits_count_as_such(precision, settings, native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    policy, device = POLICIES[precision], torch.device("cuda")
    float8 = Float8.from_policy(policy, Float8Config(**settings), model_shape("tiny"), torch.device("cpu"))
    assert float8.native(policy.compute, device) == native
    assert not float8.native(policy.compute, torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")  # whose devices of that number have other formats
    assert not float8.native(policy.compute, device)


@pytest.mark.parametrize(("precision", "sections", "said"), [
    ("bf16", {"float8": {"scales": "row"}}, "this precision ignores the section"),
    ("bf16", {"loss_scale": {"initial": 2.0}}, "this precision ignores the section"),
    ("mxfp8", {"float8": {"scales": "row"}}, "the format fixes blocks of 32 and their scales"),
    ("fp8", {"float8": {"block": 64}}, "which does not read it"),
    ("fp8", {"float8": {"scales": "row", "amax": "delayed"}}, "the history has one value per tensor"),
    ("fp8", {"train": {"compile": True}}, "the compiler does not see"),
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
