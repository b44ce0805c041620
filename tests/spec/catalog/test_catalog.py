"""Facts are what their sources say."""

import math
from itertools import pairwise

import pytest

from shoal.base.errors import UsageError
from shoal.spec.catalog import accelerator, accelerators, match, model_names, model_shape
from shoal.spec.catalog.tables import table

SIZES = ("tiny", "tiny-gpt", "bench-10m", "gpt2-124m", "gpt3-175b", "llama-2-70b", "llama-3.1-405b", "llama-3.2-1b")


CROSS_ATTENTION = 12 * 4 * 768**2
"""Of the decoder of T5-Base, which a shape that is all decoder has not."""


@pytest.mark.parametrize("name", model_names())
def test_parameter_count_is_the_published_one(name):
    said, count = published(name), model_shape(name).parameters()
    printed, to = said.get("published_parameters"), said.get("published_to", 1)
    assert said["source"]
    if printed is None:
        assert said["source"].startswith("shoal: ") or "switch-base-8" in said["source"]
        return
    rounded = round(count / to) * to
    assert (rounded == printed) == ("off_because" not in said), f"{name}: {count} parameters, printed as {printed}"
    if name.startswith("switch-base"):
        assert round((count + CROSS_ATTENTION) / to) * to == printed
    else:
        assert count == pytest.approx(printed, rel=0.02), "off by more than a rounding"


def published(name):
    """What the catalog says of a model besides its shape."""
    entry = table("models")[name]
    return entry if "source" in entry else published(entry["same_as"])


SPARSE = [name for name in model_names() if model_shape(name).experts]


@pytest.mark.parametrize("name", SPARSE)
def test_active_parameters_are_the_published_ones(name):
    said, shape = published(name), model_shape(name)
    embedding = shape.vocab * shape.hidden
    experts, block = shape.experts, shape.hidden * shape.experts.ffn * (3 if shape.family == "llama" else 2)
    block += (2 * experts.ffn + shape.hidden) * experts.biases
    unmet = len(experts.layers(shape.layers)) * (experts.count - experts.per_token) * block
    active, to = shape.parameters() - unmet, min(said.get("published_to", 1), 10**9)
    if name.startswith("switch-base"):
        # What is printed is T5-Base, which has no router.
        routers = 12 * shape.experts.count * shape.hidden
        assert round((active + CROSS_ATTENTION - routers) / 1e6) * 10**6 == said["published_active"]
        embedding = shape.max_sequence * shape.hidden  # the head is tied to the other, and multiplied with
    else:
        # Authors count the embedding or leave it out; Qwen3's cut the count, and do not round it.
        rounded = math.floor if name.startswith("qwen3") else round
        assert said["published_active"] in [rounded(count / to) * to for count in (active, active - embedding)]
    matrices = shape.flops_per_token(0) / 6
    vectors = active - embedding - matrices
    assert 0 <= vectors < 2e-3 * matrices  # norms and biases: a token's FLOPs are those of what it meets


def test_twice_the_experts_are_twice_their_weights():
    sizes = [model_shape(f"switch-base-{n}").parameters() for n in (8, 16, 32, 64, 128)]
    for n, (few, many) in zip((8, 16, 32, 64), pairwise(sizes), strict=True):
        assert many - few == 12 * n * (2 * 768 * 3072 + 768)  # with the router's rows
    few, many = (model_shape(f"switch-base-{n}").flops_per_token(512) for n in (8, 16))
    assert many - few == 6 * 12 * 8 * 768  # a token meets one of them, and every router


def test_latent_attention_counts_the_released_matrices():
    """The shapes of the weights of a layer of deepseek-ai/DeepSeek-V3."""
    attention = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
    norms = [(1536,), (512,), (7168,), (7168,)]
    dense, expert = [(18432, 7168)] * 3, [(2048, 7168)] * 3
    layer = _numbers(attention + norms)
    sparse = layer + _numbers([(256, 7168)]) + 257 * _numbers(expert)
    rest = _numbers([(129280, 7168)] * 2 + [(7168,)])
    assert model_shape("deepseek-v3").parameters() == 3 * (layer + _numbers(dense)) + 58 * sparse + rest


def _numbers(shapes):
    return sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize("name", model_names())
def test_parameter_count_is_that_of_the_module(name):
    import torch

    from shoal.engine.models.transformer import Transformer

    shape = model_shape(name)
    with torch.device("meta"):
        model = Transformer(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters()


@pytest.mark.parametrize("name", SIZES)
def test_flops_count_six_for_each_weight_of_a_matrix(name):
    """PaLM's definition: 6 N + 12 L a d s, where N are the weights that tokens are multiplied with."""
    shape = model_shape(name)
    attention = 12 * shape.layers * shape.heads * shape.head_dim
    assert shape.flops_per_token(1) - attention == 6 * sum(_matrices(shape))
    assert shape.flops_per_token(4096) - shape.flops_per_token(0) == 4096 * attention


def _matrices(shape):
    """Weights of every matrix of the module that is multiplied with, the head included and the embeddings left out."""
    import torch

    from shoal.engine.models.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(shape)
    return [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]


def test_the_folder_of_a_model_is_no_name_and_leads_to_its_import(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=rf"is the folder of a model(.|\n)*shoal import hf {tmp_path} --out run.toml"):
        model_shape(str(tmp_path))


def test_unknown_model_names_the_nearest():
    with pytest.raises(UsageError, match="'llama-3-8B' is not in the catalog; did you mean 'llama-3-8b'"):
        model_shape("llama-3-8B")
    with pytest.raises(UsageError, match=r"did you mean 'llama-3\.1-8b'"):  # as the hub names it
        model_shape("meta-llama/Llama-3.1-8B")
    with pytest.raises(UsageError, match=r"allowed: .*tiny"):
        model_shape("???")


def test_another_name_is_the_same_shape():
    assert model_shape("llama-3-405b") == model_shape("llama-3.1-405b")


@pytest.mark.parametrize("name", accelerators())
def test_accelerators_are_plausible(name):
    a = accelerator(name)
    assert a.source
    assert set(a.peak_flops) <= {"bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "fp4", "int8"}
    assert a.half in a.peak_flops
    assert 10e12 < max(a.peak_flops.values()) < 20e15  # FLOP/s, not TFLOP/s
    assert 10e9 < a.memory_bytes < 1e12
    assert 100e9 < a.memory_bandwidth < 20e12
    order = [a.peak_flops[f] for f in ("fp64", "fp32", "tf32", "bf16", "fp8", "fp4") if f in a.peak_flops]
    assert order == sorted(order), "fewer bits are not slower"
    for kind, flops in a.sparse_flops.items():
        assert flops == pytest.approx(2 * a.peak_flops[kind], rel=1e-3), "half of it zero, twice as fast"
    assert a.dollars_per_hour is None or a.price_source


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_device_names_match(device, name):
    assert match(device) == accelerator(name)


@pytest.mark.parametrize("device", ["NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "", "cpu"])
def test_variants_and_slices_match_nothing(device):
    assert match(device) is None


def test_no_two_accelerators_share_a_device_name():
    devices = [device for name in accelerators() for device in accelerator(name).devices]
    assert len(devices) == len(set(devices))


def test_unknown_accelerator_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'h100-sxm'"):
        accelerator("h100-smx")
