"""Products on hardware: which devices make them, and the calls of torch that they are."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.engine.parallel.float8 import product as float8_product
from shoal.engine.parallel.float8.apply import Float8
from shoal.engine.parallel.float8.operators import keep_part
from shoal.engine.parallel.float8.product import Float8Product
from shoal.engine.parallel.weight_grad import GradSink
from shoal.engine.precision.float8 import ROW, TENSOR, Codes
from shoal.engine.precision.nvfp4 import RoundingDraws
from shoal.engine.precision.policy import POLICIES
from shoal.engine.precision.product import multiply
from shoal.engine.precision.recipe import AmaxHistory, Recipe, hardware_scales
from shoal.planning.cost.micro_batch import EightBits
from shoal.spec.catalog import model_shape
from shoal.spec.config import Float8Config
from shoal.spec.number_formats import E4M3, E5M2
from tests.engine.precision.quantise import quantise


@pytest.mark.parametrize(("grain", "dtype", "near"), [(TENSOR, torch.float32, 1e-4), (ROW, torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3)])
def test_native_products_are_the_emulated_ones(grain, dtype, near, kinds):
    """`torch._scaled_mm` runs on the CPU too."""
    if grain == ROW and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no products with a scale per row on the CPU")
    a, b = torch.randn(32, 64), torch.randn(48, 64) * torch.logspace(0, 2, 48)[:, None]
    a, b = quantise(a, kinds[0], grain), quantise(b, kinds[1], grain)
    a_values, b_values = a.values(torch.float64), b.values(torch.float64).t()
    exact, terms = a_values @ b_values, a_values.abs() @ b_values.abs()  # what rounding of each term may add up to
    for native in (False, True):
        c, d = ((for_hardware(each) for each in (a, b)) if native else (a, b))
        error = (multiply(c, d, dtype).double() - exact).abs() / terms
        assert error.max() < near


def for_hardware(codes: Codes) -> Codes:
    return Codes(codes.codes, codes.scale.reciprocal(), codes.grain, for_hardware=True)


@pytest.mark.parametrize(("precision", "settings"), [
    ("fp8", {}), ("fp8", {"scales": "row"}), ("fp8", {"scales": "block"}), ("mxfp8", {}),
    ("fp8", {"amax": "delayed"}),
])
def test_native_products_are_what_torch_takes_on_cuda(precision, settings, monkeypatch):
    """Fake tensors go through torch's checks of shapes, strides and formats; all three products, with every scale."""
    taken, product = [], torch._scaled_mm

    def counting(*args, **options):
        taken.append((options["scale_a"], options["scale_b"], options["use_fast_accum"], options["out_dtype"]))
        return product(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counting)
    # torch without CUDA neither indexes fake CUDA tensors nor changes them in place
    monkeypatch.setattr(float8_product, "add_gradient", lambda gradient, total, fresh: None)
    monkeypatch.setattr(AmaxHistory, "note", lambda *args: None)
    monkeypatch.setattr(AmaxHistory, "scale", lambda *args: torch.empty(1, 1, device="cuda"))
    recipe = Recipe.from_config(POLICIES[precision].formats.products, Float8Config(**settings))
    tokens, width, out = 512, 1024, 1536
    with FakeTensorMode():
        bucket = SimpleNamespace(derive=lambda key, compute: compute())
        history = AmaxHistory(recipe, ["a"], torch.bfloat16, torch.device("cuda")) if recipe.history else None
        x, gradient, weight = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((tokens, width), (tokens, out), (out, width))
        )
        layer = Float8Product(
            "a", recipe, history, "", None, native=True, weights=[weight], bucket=bucket, sink=GradSink(),
            device=torch.device("cuda"),
        )  # fmt: skip
        codes, scale, turned, turned_scale, _ = layer.encode_input(x)
        y = layer.forward(codes, scale, [weight], torch.bfloat16)
        along, across = layer.encode_gradient(gradient)
        d_x = layer.backward_input(along, [weight], torch.bfloat16)
        total = torch.empty(out, width, device="cuda")
        layer.gradient_term(across, turned, turned_scale, torch.bfloat16)(total, False)
        layer.gradient_term(across, turned, turned_scale, torch.bfloat16)(total, True)
        assert (y.shape, d_x.shape, y.device.type) == ((tokens, out), (tokens, width), "cuda")
    assert [fast for _, _, fast, _ in taken[:3]] == [recipe.scales in ("tensor", "row"), False, False]
    assert taken[2][3] == torch.bfloat16
    expected = {
        "tensor": [((), ())] * 3,
        "row": [((tokens, 1), (1, out)), ((tokens, 1), (1, width)), ((out, 1), (1, width))],
        "block": [((tokens, 8), (8, 12)), ((tokens, 12), (12, 8)), ((out, 4), (4, width))],
        "mx": [((tokens * 32,), (out * 32,)), ((tokens * 48,), (width * 48,)), ((out * 16,), (width * 16,))],
    }[recipe.scales]
    assert [(tuple(a.shape), tuple(b.shape)) for a, b, _, _ in taken[:3]] == expected
    for a, b, _, _ in taken[:3]:
        if recipe.scales == "block":  # the outer dimension of 1 x 128 is contiguous, the inner one of 128 x 128
            assert a.stride() == (1, len(a)) and (b.is_contiguous() if b.shape[1] == width else b.stride()[0] == 1)
        else:
            assert a.is_contiguous() and b.is_contiguous()


def test_products_in_4_bits_are_what_torch_takes_on_cuda(monkeypatch):
    """Products in NVFP4, with stochastic rounding; none writes into the buffer of the weight gradient."""
    taken, product, recipe = [], F.scaled_mm, Recipe.from_config("nvfp4", Float8Config())

    def counting(*args, **options):
        taken.append(tuple(tuple(scale.shape) for scale in (*args[2], *args[4])))
        return product(*args, **options)

    monkeypatch.setattr(F, "scaled_mm", counting)
    monkeypatch.setattr(float8_product, "add_gradient", lambda gradient, total, fresh: taken.append(gradient.dtype))
    tokens, width, out = 128, 256, 384
    with FakeTensorMode():
        x, gradient, weight = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((tokens, width), (tokens, out), (out, width))
        )
        layer = Float8Product(
            "a", recipe, None, "", None, native=True, weights=[weight], sink=GradSink(), device=torch.device("cuda"),
            bucket=SimpleNamespace(derive=lambda key, compute: compute()),
        )  # fmt: skip
        layer.draws, layer.features = RoundingDraws(0), torch.arange(out, device="cuda")
        codes, scale, turned, turned_scale, _ = layer.encode_input(x)
        eight = EightBits.from_formats(POLICIES["nvfp4"].formats, Float8Config(), packed=True)
        assert codes.nbytes == turned.nbytes == eight.codes(tokens * width) == tokens * width // 2
        assert scale.nbytes == turned_scale.nbytes == eight.scales(tokens, width) + 4
        y = layer.forward(codes, scale, [weight], torch.bfloat16)
        along, across = layer.encode_gradient(gradient, 0)
        d_x = layer.backward_input(along, [weight], torch.bfloat16)
        total = torch.empty(out, width, device="cuda")
        layer.gradient_term(across, turned, turned_scale, torch.bfloat16)(total, True)
        assert (y.shape, d_x.shape, y.device.type, y.dtype) == ((tokens, out), (tokens, width), "cuda", torch.bfloat16)
        assert layer.normalise(x, None, weight, 1e-5) is None and layer.activate(x, (), layer) is None
    x, d_y, w = tokens * width // 16, tokens * out // 16, width * out // 16
    expected = [(a, (1,), b, (1,)) for a, b in (((x,), (w,)), ((d_y,), (w,)), ((d_y,), (x,)))]
    assert taken == [*((a, one, b, two) for a, one, b, two in expected), torch.bfloat16]


@pytest.mark.parametrize(("capability", "cuda", "native"), [
    ((8, 0), "13.0", ""), ((8, 9), "13.0", "tensor row"), ((9, 0), "13.0", "tensor row block"),
    ((9, 0), "12.8", "tensor row"), ((10, 0), "13.0", "tensor row mx nv"),
    ((10, 3), "12.8", "tensor row mx nv"), ((10, 0), "12.7", "tensor row mx"), ((12, 0), "13.0", "tensor row"),
])
def test_scales_of_hardware(capability, cuda, native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    device = torch.device("cuda")
    assert hardware_scales(device) == set(native.split())
    assert not hardware_scales(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")  # whose devices of that number have other formats
    assert not hardware_scales(device)


@pytest.mark.parametrize(("precision", "settings", "native"), [
    ("fp8", {}, (9, 10)), ("fp8", {"scales": "row"}, (9, 10)), ("fp8", {"scales": "block"}, (9,)),
    ("fp8", {"scales": "block", "block": 64}, ()), ("mxfp8", {}, (10,)), ("nvfp4", {}, (10,)),
    ("fp64-fp8", {}, ()), ("fp64-nvfp4", {}, ()),
])
@pytest.mark.parametrize("major", [9, 10])
def test_only_products_that_are_made_in_8_or_4_bits_count_as_such(precision, settings, native, major, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    policy, device = POLICIES[precision], torch.device("cuda")
    run = Float8.from_policy(policy, Float8Config(**settings), model_shape("tiny"), torch.device("cpu"))
    assert run.native(policy.compute, device) == (major in native)
    assert not run.native(policy.compute, torch.device("cpu"))


def test_a_kept_part_of_codes_keeps_no_other_part():
    """Also where the codes are contiguous, as on hardware, so that a part could be a view of all of them."""
    turned = torch.arange(24, dtype=torch.uint8).view(6, 4)
    for part in range(3):
        kept = keep_part((turned, turned, turned, turned, turned), 3, part)[2]
        assert torch.equal(kept, turned[2 * part : 2 * part + 2])
        assert kept.untyped_storage().nbytes() == 8


@pytest.mark.parametrize("deferring", [False, True])
def test_codes_are_gathered_while_the_input_s_gradient_is_computed(monkeypatch, deferring):
    """And in a split backward in its second half: until then a rank has its rows alone."""
    steps, terms = [], []

    def gather(out, part, group):
        steps.append("gather")
        out.copy_(part.repeat(2))  # the other rank has the same rows
        return SimpleNamespace(wait=lambda: steps.append("arrived"))

    def multiplying(*args, **options):
        steps.append("product")
        return multiply(*args, **options)

    monkeypatch.setattr(float8_product, "all_gather_flat", gather)
    monkeypatch.setattr(float8_product, "multiply", multiplying)
    weight, device = torch.nn.Parameter(torch.randn(16, 32)), torch.device("cpu")
    layer = Float8Product(
        "a", Recipe.from_config("fp8", Float8Config()), None, "", None, native=False, weights=[weight], device=device,
        bucket=SimpleNamespace(derive=lambda key, compute: compute()),
        keepers=SimpleNamespace(size=lambda: 2, rank=int),
        sink=SimpleNamespace(deferring=deferring, add=lambda weights, term: terms.append(term)),
    )  # fmt: skip
    _, _, turned, scale, _ = layer.encode_input(torch.randn(8, 32))
    assert turned.shape == (16, 8)
    d_x = layer.take_gradient(layer.encode_gradient(torch.randn(8, 16)), turned, scale, torch.float32)
    assert d_x.shape == (8, 32) and steps == (["product"] if deferring else ["gather", "product"])
    terms[0](torch.empty(16, 32), True)
    assert steps[-2:] == ["arrived", "product"] and steps.count("gather") == 1
