"""Latent attention in the formulas: the bytes and parameters of the module; and DeepSeek-V3 beside its paper."""

from typing import Any

import numpy as np
import pytest

import shoal
from shoal.base.section import plain
from shoal.launch.worker_pool import Pool
from shoal.planning.cost.batched_runs import Runs, describe_row
from shoal.planning.cost.micro_batch import EightBits, MicroBatch
from shoal.planning.cost.shares import layer_weights, weights_on_rank
from shoal.planning.cost.time.kernels import Kernels
from shoal.planning.run import EstimatedRun
from shoal.planning.software_estimate import SoftwareEstimate
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import cluster
from shoal.spec.catalog.software import Software, find_software
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import Layout
from tests.planning.cost.test_activations import both, run_of
from tests.planning.cost.test_working import off

LATENT = {"key_value_rank": 20, "rotary_dim": 8, "value_dim": 10}
PUBLISHED = Layout(pp=16, dp=128, ep=64, zero=1, recompute="selective")  # DeepSeek-V3, section 3.2


def with_latents(config: RunConfig, **fields: int) -> RunConfig:
    model = plain(config)["model"] | {"kv_heads": 4, "latent": LATENT | fields}
    return config.model_copy(update={"model": build_config({"model": model}).model})


@pytest.mark.parametrize(("recompute", "kernel", "precision", "fields", "parallel"), [
    ("none", "sdpa", "bf16", {"query_rank": 16}, {}),
    ("none", "explicit", "fp32", {}, {}),
    ("selective", "sdpa", "fp8", {"query_rank": 16}, {}),
    ("none", "sdpa", "fp32", {"query_rank": 16}, {"tp": 2, "sequence_parallel": True}),
    ("none", "sdpa", "fp32", {}, {"tp": 2}),
    ("none", "sdpa", "fp32", {}, {"cp": 4, "ulysses": 2}),
])  # fmt: skip
def test_what_a_layer_keeps(
    pool: Pool, recompute: str, kernel: str, precision: str, fields: dict, parallel: dict
) -> None:
    """To the byte."""
    masked = kernel == "sdpa" and not parallel
    config = with_latents(run_of("tiny", recompute, kernel, masked, precision, 32, **parallel), **fields)
    for fused in (False, True)[: 1 + (precision == "bf16")]:
        for found, said in pool.run(both, config.parallel.world_size, config, fused):
            assert found == said


@pytest.mark.parametrize(("parallel", "model"), [
    ({"tp": 2, "sequence_parallel": True, "recompute": "full"}, {"ffn": 256}),
    ({"dp": 2, "ep": 2, "zero": 1}, {"experts": {"count": 4, "per_token": 2, "ffn": 256, "shared": 1}}),
    ({"pp": 2, "schedule": "zb-h1"}, {"ffn": 1024}),
])
def test_a_peak_is_what_a_dry_run_counts(parallel: dict, model: dict) -> None:
    """Beside a narrow feed-forward block the backward of attention needs most."""
    latent = {"kv_heads": 8, "latent": {"key_value_rank": 128, "rotary_dim": 32, "query_rank": 192}}
    assert abs(off(parallel, {**latent, **model}, s=256, microbatches=2, rank=0, precision="bf16")) < 0.01


@pytest.mark.parametrize("tp", [1, 8])
def test_weights_are_the_shape_s(tp: int) -> None:
    """The parameters of all ranks add up to the model, without norms and routers. Each tensor-parallel rank has the
    matrices that make the latents."""
    shape = model_shape("deepseek-v3")
    run = EstimatedRun(shape, Layout(tp=tp, pp=16), cluster(f"{16 * tp}xH800"), 4096, 16)
    runs = Runs.from_rows([describe_row(run)])
    layer, end = weights_on_rank(runs)
    more = shape.layers * shape.hidden * (1536 + 512 + 64) * (tp - 1)
    counted = tp * (shape.layers * float(layer[0]) + 2 * float(end[0]))
    assert counted == pytest.approx(shape.parameters() + more, rel=1e-3)
    routers = 58 / 61 * shape.hidden * 256
    assert float(layer_weights(runs)[0]) == pytest.approx(shape.mean_layer_matrices() - routers)


def test_codes_of_weights_in_8_bits_are_as_many_as_the_matrices() -> None:
    shape = model_shape("deepseek-v3").model_copy(update={"experts": None})
    run = MicroBatch(shape, Layout(), 4096, eight=EightBits(True, 0))
    assert run.weight_codes(range(3)) == 2 * 3 * shape.layer_matrices(0)


def test_deepseek_v3_is_priced_beside_its_paper() -> None:
    """180 thousand hours of an H800 for 10^12 tokens, whose all-to-all its schedule hides (section 3.2.1)."""
    published = 15_360 * 4096 / 1e12 * 180e3 * 3600 / 2048  # seconds of a step
    found = shoal.estimate(
        PUBLISHED, model="deepseek-v3", cluster="2048xH800", global_batch=15_360, sequence_length=4096,
        precision="fp8", software="megatron-core",
    )
    hidden = found.step_seconds - found.breakdown["expert parallelism"]
    assert hidden == pytest.approx(published, rel=0.2) and found.step_seconds > published


def test_deepseek_v3_with_its_further_module_takes_what_its_paper_says() -> None:
    """Its ranks have the first and the last stage, so that the module is computed by two (section 3.2.1)."""
    shape, own = model_shape("deepseek-v3").model_copy(update={"mtp_depth": 1}), find_software("hai-llm")
    alone = own.model_copy(update={"paired": False})
    given: dict[str, Any] = {
        "model": shape, "cluster": "2048xH800", "global_batch": 15_360, "sequence_length": 4096, "precision": "fp8",
    }  # fmt: skip
    layout = PUBLISHED.model_copy(update={"schedule": "zb-h1"})
    found, last = (shoal.estimate(layout, software=each, **given) for each in (own, alone))
    assert found.step_seconds == pytest.approx(19.9, rel=0.1) and last.step_seconds > 1.2 * 19.9
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    assert found.breakdown["launches"] < 0.2 * found.step_seconds


def test_deepseek_v3_fits_by_what_its_software_recomputes_and_stores_in_8_bits() -> None:
    """DeepSeek-AI 2024, sections 3.2.3 and 3.3.3: no tensor parallelism on devices of 80 GB."""
    def memory(software: Software) -> float:
        run = EstimatedRun(
            model_shape("deepseek-v3"), PUBLISHED, cluster("2048xH800"), 4096, 15_360, "fp8", software=software
        )
        found = SoftwareEstimate(run).footprint
        return float(found.needed[0] / found.capacity[0])

    own = find_software("hai-llm")
    stored = own.model_copy(update={"recomputes_heads": False, "recomputes_norms": False})
    assert memory(own) < memory(own.model_copy(update={"recomputes_norms": False})) < memory(stored)
    assert memory(own) < 0.75 < 1 < memory(stored.model_copy(update={"kept_bytes": 2}))
    assert memory(own) < memory(own.model_copy(update={"kept_bytes": 2}))


def test_values_with_zeros_cost_what_they_multiply() -> None:
    run = EstimatedRun(model_shape("deepseek-v3"), PUBLISHED, cluster("2048xH800"), 4096, 15_360)
    row = describe_row(run)
    kernels = Kernels(Runs.vary(row, {"pads_values": np.array([0, 1])}), cluster_calibration(run.cluster))
    plainly, padded = kernels.attention[0]
    assert padded / plainly == pytest.approx(2 * 192 / (192 + 128))
