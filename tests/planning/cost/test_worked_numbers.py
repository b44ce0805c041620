"""Numbers that courses and papers work out by hand, found again."""

import pytest

from shoal.base.units import DAY
from shoal.labs.explain import scaling
from shoal.labs.explain.precision import RECIPES
from shoal.labs.explain.scaling import YEAR, six_n_t, training_seconds
from shoal.planning.cost import flops, roofline
from shoal.planning.full_training import FullTraining
from shoal.spec.catalog import Experts, accelerator, link, model_shape
from shoal.spec.catalog.clusters import cluster
from shoal.spec.layout import Layout

GPT_3 = six_n_t(175e9, 499e9)  # 5.24e8 PFLOP
LLAMA_3 = six_n_t(405e9, 15.6e12)  # 3.79e10 PFLOP


def test_least_compute_bound_batch() -> None:
    """591 on the H100 with the sparse rate that is printed first; 295 with the dense one. Trillium: 574."""
    h100, trillium = accelerator("h100-sxm"), accelerator("tpu-v6e")
    assert h100.sparse_flops["bf16"] / h100.memory_bandwidth == pytest.approx(591, abs=0.5)
    assert h100.dense_flops("bf16") / h100.memory_bandwidth == pytest.approx(295, abs=0.5)
    least = trillium.dense_flops("bf16") / trillium.memory_bandwidth
    assert least == pytest.approx(574, abs=0.5)
    work = roofline.matrix_product(round(least * 1.2), 16384, 16384)
    assert work.intensity > least > roofline.matrix_product(round(least * 0.9), 16384, 16384).intensity


def test_a_dot_product_never_is() -> None:
    assert roofline.matrix_product(1, 10**9, 1).intensity == pytest.approx(0.5)
    assert roofline.matrix_product(1, 10**9, 1, itemsize=4).intensity == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("name", "gpt_3", "llama_3"),
    [("macbook-m3", 923, 66_781), ("core-ultra-258v", 346, 25_043), ("tpu-v6e", 18.1, 1_309), ("h100-sxm", 8.31, 601)],
)
def test_years_on_one_device(name: str, gpt_3: float, llama_3: float) -> None:
    """At the largest rate that is printed: of the H100 the sparse one, which the course rounds to 2,000."""
    machine = accelerator(name)
    rounded = 2_000 / 1_978.9 if name == "h100-sxm" else 1.0
    for training, years in ((GPT_3, gpt_3), (LLAMA_3, llama_3)):
        found = training_seconds(training, machine.printed[1] * rounded) / YEAR
        assert found == pytest.approx(years, rel=1e-3)


def test_years_at_the_dense_rate() -> None:
    """Twice as many."""
    h100 = accelerator("h100-sxm")
    assert training_seconds(GPT_3, h100.dense_flops("bf16")) / YEAR == pytest.approx(16.8, abs=0.05)


def test_gpt_4_on_one_b200() -> None:
    b200 = accelerator("b200-sxm").dense_flops("bf16")
    assert training_seconds(2e25, b200) / YEAR == pytest.approx(282, abs=0.5)


def test_petaflop_days() -> None:
    """Brown et al. 2020, table D.1: 3.14e23 FLOPs of GPT-3 are 3,640 petaFLOP/s-days."""
    assert flops.petaflop_days(3.14e23) == pytest.approx(3640, rel=2e-3)


@pytest.mark.parametrize(("name", "billions"), [("tpu-v5p", 9), ("h100-sxm", 8)])
def test_largest_model_of_plain_data_parallelism(name: str, billions: int) -> None:
    """Memory as it is printed (95 of v5p are GiB) over the 10 bytes of bf16 weights and fp32 moments."""
    printed = accelerator(name).memory_bytes / (2**30 if name.startswith("tpu") else 1e9)
    assert printed / RECIPES["bf16 weights, fp32 moments, no gradients"].total // 1 == billions


def test_tokens_that_keep_chips_busy() -> None:
    """v5p: 2,550 tokens a chip over one axis, 850 over three; so 16 M tokens keep 18,800 chips busy, DeepSeek-V2's
    40 M 47,000."""
    v5p, ici = accelerator("tpu-v5p"), link("ici-v5p").bandwidth
    peak = v5p.dense_flops("bf16")  # 4 B D F / X FLOPs for every 4 D F bytes, over an axis' two links
    assert peak / (2 * ici) == pytest.approx(2550)
    three = peak / (2 * ici * 3)
    assert three == pytest.approx(850)
    assert 16e6 / three == pytest.approx(18_800, rel=2e-3)
    assert 40e6 / three == pytest.approx(47_000, rel=2e-3)
    training = six_n_t(70e9, 15e12)
    days = training_seconds(training, v5p.dense_flops("bf16"), int(16e6 / three), utilisation=0.5) / DAY
    assert days == pytest.approx(17, abs=0.2)


@pytest.mark.parametrize(
    ("billions", "gigabytes"), [(1, (16, 20)), (7, (112, 140)), (70, (1120, 1400)), (405, (6480, 8100))]
)
def test_memory_of_a_model(billions: int, gigabytes: tuple[int, int]) -> None:
    recipes = RECIPES["bf16, fp32 Adam"], RECIPES["bf16, fp32 Adam, gradients in bf16 and fp32"]
    assert tuple(billions * recipe.total for recipe in recipes) == gigabytes


def test_bytes_of_a_parameter() -> None:
    assert [recipe.total for recipe in RECIPES.values()] == [16, 20, 8, 10]


def test_a_global_batch_of_4_m_tokens() -> None:
    """1,024 sequences of 4 k: 4 micro-batches of 2 on 128 replicas; on 512 one, and nothing left to accumulate."""
    batch = 4 * 2**20 // 4096
    assert batch == 1024 == 2 * 128 * 4
    assert Layout(dp=128, micro_batch=2).microbatches(batch) == 4
    assert Layout(dp=512, micro_batch=2).microbatches(batch) == 1


def test_resnet_50_on_256_v100() -> None:
    """A master receives 25.6 M gradients in fp32 of each worker and sends as many weights, by NVLink 2, both directions
    together: 0.17 s. 0.33 s for 32 images of each worker are 15 % of the fp32 peak."""
    gradient, wire = 25.6e6 * 4, 2 * link("nvlink-2").bandwidth
    assert 2 * 256 * gradient / wire == pytest.approx(0.17, abs=0.006)
    per_image = 3 * 2 * 4.1e9  # forward and backward (He et al. 2016: 4.1e9 multiply-adds with torchvision's strides)
    peak = accelerator("v100-sxm2-16gb").peak_flops["fp32"]
    assert training_seconds(32 * per_image, peak, utilisation=0.15) == pytest.approx(0.33, abs=0.006)


def test_model_flops_are_the_papers() -> None:
    """Brown et al. 2020, table D.1: 3.14e23 for GPT-3 of 174.6 B on 300 B tokens, attention left out."""
    shape = model_shape("gpt3-175b")
    assert six_n_t(174.6e9, 300e9) == pytest.approx(3.14e23, rel=2e-3)
    assert 300e9 * shape.flops_per_token(2048) == pytest.approx(3.14e23, rel=0.05)


@pytest.mark.parametrize("name", ["gpt3-175b", "gpt3-6.7b"])
def test_hardware_flops_are_megatrons(name: str) -> None:
    """96 B s l h^2 (1 + s/6h + v/16lh), Narayanan et al. 2021, equation 3; 72 (1 + s/6h + v/12lh) when all is kept."""
    shape, s = model_shape(name), 2048
    layers, h, v = shape.layers, shape.hidden, shape.vocab
    full = 96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops.hardware_flops(shape, s, "full") == pytest.approx(full)
    plain = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert shape.flops_per_token(s) == flops.hardware_flops(shape, s, "none") == pytest.approx(plain)
    selective = flops.hardware_flops(shape, s, "selective") - shape.flops_per_token(s)
    assert selective == 4 * layers * h * s  # the core's two products once more


def test_a_window_counts_its_tokens_alone() -> None:
    """Half of Gemma 2's layers: 12 a d (s + w) / 2 a layer (model FLOPs per token)."""
    plain = model_shape("llama-3.2-1b")
    shape = plain.model_copy(update={"window": 1024, "pattern": ("local", "global")})
    less = plain.flops_per_token(8192) - shape.flops_per_token(8192)
    assert less == 12 * plain.layers // 2 * plain.heads * plain.head_dim * (8192 - 1024)
    assert flops.layer_flops(shape, 8192, 0).core * 8 == flops.layer_flops(shape, 8192, 1).core
    assert shape.flops_per_token(512) == plain.flops_per_token(512)


def test_experts_count_where_a_token_goes() -> None:
    """One expert of the shape's width is the dense model and a router; Mixtral 8x7B's 13 B active of 47 B."""
    shape = model_shape("llama-3-8b")
    one = shape.model_copy(update={"experts": Experts(count=1, ffn=shape.ffn)})
    assert one.flops_per_token(1) - shape.flops_per_token(1) == 6 * shape.layers * shape.hidden
    mixtral = model_shape("mixtral-8x7b")
    assert mixtral.flops_per_token(0) / 6 + mixtral.vocab * mixtral.hidden == pytest.approx(12.9e9, rel=0.005)
    assert flops.layer_flops(mixtral, 1).mlp == 2 * 4096 * (2 * 3 * 14336 + 8)


@pytest.mark.parametrize(("law", "billions"), [(scaling.CHINCHILLA, 40), (scaling.REFITTED, 72)])
def test_chinchilla(law: scaling.Parametric, billions: int) -> None:
    """Gopher's budget of 5.76e23 is better spent on 70 B than on 280 B; best, by approach 3, on 40 B (Hoffmann et al.
    2022, section 3.4), and on as many as 20 tokens each make when that is fitted again (Besiroglu et al. 2024)."""
    gopher = 5.76e23
    best = law.optimum(gopher)
    assert best.parameters == pytest.approx(1e9 * billions, rel=0.01)
    assert best.loss < law.loss(70e9, gopher / 6 / 70e9) < law.loss(280e9, gopher / 6 / 280e9)
    for allocation in (best, scaling.twenty_tokens(gopher)):
        assert six_n_t(allocation.parameters, allocation.tokens) == pytest.approx(gopher)
    for change in (0.9, 1.1):
        assert law.loss(best.parameters * change, best.tokens / change) > best.loss


def test_kaplan() -> None:
    """Kaplan et al. 2020: a petaFLOP/s-day trains 1.3e9 parameters; ten times the budget 5.4 times the size."""
    day = 1e15 * DAY
    assert scaling.kaplan_optimum(day).parameters == pytest.approx(1.3e9)
    ratio = scaling.kaplan_optimum(10 * day).parameters / scaling.kaplan_optimum(day).parameters
    assert ratio == pytest.approx(5.4, abs=0.05)
    for days in (1, 100, 3640):  # GPT-3's models: 2.57 days^-0.048 (Brown et al. 2020, figure 3.1)
        assert scaling.kaplan_optimum(days * day).loss == pytest.approx(2.57 * days**-0.048, rel=0.04)


def test_money_and_energy() -> None:
    """Llama-3 70B reports 6.4 M H100 hours at 700 W."""
    seconds = 6.4e6 * 3600 / 1024
    assert flops.dollars(seconds, 1024, 2.0) == pytest.approx(12.8e6)
    for pue in (1.0, 1.1):  # with the building
        assert FullTraining(15e12, seconds, 1024, 2.0, 700, pue).kilowatt_hours == pytest.approx(pue * 4.48e6)
    assert 8 * cluster("64x8xH100").watts == 10_200, "of a node"
