"""The promise of shoal: every valid layout computes what one device computes."""

import random
from itertools import product
from typing import get_args

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from shoal.launch.worker_pool import Pool
from shoal.pipeline.schedules import SCHEDULES
from shoal.spec.catalog.experts import Gate
from shoal.spec.config import RunConfig
from shoal.testing.verify.case import prepare, run_case
from shoal.testing.verify.compare import TOLERANCES
from shoal.testing.verify.draw import draw_run
from tests.testing.verify.runs import runs, small_run


@settings(
    max_examples=2,  # `shoal verify --random N` draws more
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(run=runs(max_ranks=8))
def test_any_layout_computes_what_one_device_computes(pool: Pool, run: RunConfig) -> None:
    verdict, _ = run_case(prepare(run, own_precision=False, accumulate=False), pool, steps=2)
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient <= 1e-9


@pytest.mark.parametrize(("precision", "parallel"), [
    ("bf16", {"dp": 2, "zero": 1, "tp": 2, "sequence_parallel": True}),
    ("fp32", {"dp": 2, "zero": 3, "pp": 2, "recompute": "full"}),
])  # fmt: skip
def test_the_runs_own_precision_stays_within_its_rounding(pool: Pool, precision: str, parallel: dict) -> None:
    case = prepare(small_run(parallel, precision=precision), own_precision=True)
    verdict, _ = run_case(case, pool, steps=2)
    assert not verdict.findings, verdict.findings[0].text
    # ... and it is the run's precision that ran: an error of fp64's size would mean that it was not.
    assert verdict.worst_gradient > 1e-9
    assert verdict.worst_gradient < TOLERANCES[precision].gradient


LLAMA4 = {
    "layers": 3, "window": 5, "pattern": ["local", "global"], "chunked": True, "global_rope": False, "temperature": 0.7,
    "temperature_floor": 3, "qk_norm": True, "plain_qk_norm": True,
    "experts": {"count": 4, "ffn": 8, "every": 2, "shared": 1, "score": "sigmoid", "scales_input": True,
                "normalise": False, "balance_loss": 0.1},
}  # fmt: skip


@pytest.mark.parametrize(("parallel", "masked"), [
    ({"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True, "ep": 2, "recompute": "full"}, False),
    ({"pp": 3, "schedule": "terapipe", "sequence_slices": 3}, True),
    ({"cp": 4, "ulysses": 2, "cp_order": "striped"}, True),
])  # fmt: skip
def test_chunks_and_layers_without_positions_on_layouts(pool: Pool, parallel: dict, masked: bool) -> None:
    model = LLAMA4 if parallel.get("schedule") != "terapipe" else {**LLAMA4, "experts": {}}
    config = small_run(parallel, model, precision="fp64")
    data = config.data.model_copy(update={"sequence_length": 18, "document_mask": masked})
    verdict, _ = run_case(prepare(config.model_copy(update={"data": data}), own_precision=False), pool, steps=1)
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient <= 1e-12


@pytest.mark.parametrize(("parallel", "latent"), [
    ({"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True, "recompute": "full"}, {"query_rank": 6, "value_dim": 3}),
    ({"tp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "selective"}, {"value_dim": 6}),
    ({"cp": 4, "ulysses": 2, "tp": 2, "sequence_parallel": True, "tp_overlap": True}, {"query_rank": 6}),
])  # fmt: skip
def test_latent_attention_on_layouts(pool: Pool, parallel: dict, latent: dict) -> None:
    """Latents that every rank computes, of its own tokens or of all."""
    model = {"kv_heads": 4, "heads": 4, "latent": {"key_value_rank": 5, "rotary_dim": 4, **latent}}
    config = small_run(parallel, model, precision="fp64")
    data = config.data.model_copy(update={"sequence_length": 17 + (parallel.get("tp", 1) > 1)})
    verdict, _ = run_case(prepare(config.model_copy(update={"data": data}), own_precision=False), pool, steps=1)
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient <= 1e-12


@pytest.mark.parametrize(("parallel", "model"), [
    ({}, {"tied": True}),
    ({"pp": 2, "tp": 2, "sequence_parallel": True, "zero": 1}, {"mtp_weight": 1.0}),
    ({"dp": 2, "zero": 3, "pp": 2, "schedule": "zb-h1", "recompute": "full"}, {"tied": True}),
    ({"cp": 2, "tp": 2, "zero": 3}, {"window": 3}),
    ({"dp": 2, "ep": 2, "pp": 3}, {"experts": {"count": 4, "ffn": 8, "per_token": 2, "balance_loss": 0.1}}),
])  # fmt: skip
def test_multi_token_prediction_on_layouts(pool: Pool, parallel: dict, model: dict) -> None:
    """The last stage has a copy of the embedding; ranks see tokens of others, and documents end before them."""
    config = small_run(parallel, {"mtp_depth": 2, **model}, precision="fp64")
    data = config.data.model_copy(update={"sequence_length": 18, "document_mask": True})
    verdict, _ = run_case(prepare(config.model_copy(update={"data": data}), own_precision=False), pool, steps=1)
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient <= 1e-12


def test_drawn_runs_are_valid_and_reach_every_corner() -> None:
    drawn = [draw_run(random.Random(i).choice) for i in range(600)]
    for run in drawn:
        prepare(run, own_precision=False)  # raises if it is not valid
    layouts = [run.parallel for run in drawn]
    sparse = [run for run in drawn if run.model.experts.count]
    assert max(layout.world_size for layout in layouts) == 8
    corners = {
        "every ZeRO stage with hybrid shards": {
            layout.zero for layout in layouts if 1 < layout.dp_shard < layout.dp
        } == {1, 2, 3},
        "every schedule": {layout.schedule for layout in layouts if layout.pp > 1} == set(SCHEDULES),
        "stages that the user chooses": {layout.virtual_stages for layout in layouts} == {None, 1, 2, 3},
        "every recomputation": {layout.recompute for layout in layouts} == {"none", "selective", "full"},
        "both families, tied and not": len({(run.model.name, run.model.tied) for run in drawn}) == 4,
        "three axes at once": any(min(layout.dp, layout.tp, layout.pp) > 1 for layout in layouts),
        "replicated key/value heads": any(run.model.kv_heads < run.parallel.tp for run in drawn),
        "vocabulary not divisible": any(run.model.vocab % run.parallel.tp for run in drawn),
        "layers not divisible": any(run.model.layers % run.parallel.pp for run in drawn),
        "sequence parallel": any(layout.sequence_parallel for layout in layouts),
        "context parallel, every order and kind": {
            (layout.cp_order, layout.ulysses > 1) for layout in layouts if layout.cp_ring > 1
        } | {("", True) for layout in layouts if layout.cp == layout.ulysses > 1} >= {
            *product(("zig-zag", "striped", "contiguous"), (False,)), ("zig-zag", True), ("", True),
        },
        "context parallel with every other axis": all(
            any(layout.cp > 1 < getattr(layout, axis) for layout in layouts) for axis in ("dp", "tp", "pp", "zero")
        ),
        "sequences that cp does not divide": any(run.data.sequence_length % run.parallel.cp for run in drawn),
        "documents over cp": any(run.data.document_mask and run.parallel.cp > 1 for run in drawn),
        "document masks": any(run.data.document_mask for run in drawn),
        "every gate": {run.model.experts.gate for run in sparse} == set(get_args(Gate)),
        "experts over ranks, beside every other axis": all(
            any(run.parallel.ep > 1 and getattr(run.parallel, axis) > 1 for run in sparse)
            for axis in ("dp", "tp", "cp", "pp")
        ),
        "experts split otherwise than the rest": any(
            run.parallel.expert_tensor != run.parallel.tp and run.parallel.ep > 1 for run in sparse
        ),
        "experts under every ZeRO stage": {run.parallel.zero for run in sparse if run.parallel.ep > 1} == {0, 1, 2, 3},
        "layers that take some tokens, beside every other axis": all(
            any(run.model.depths.capacity and getattr(run.parallel, axis) > 1 for run in drawn)
            for axis in ("dp", "tp", "cp", "pp", "zero")
        ),
        "windows, beside every other axis": all(
            any(run.model.window and getattr(run.parallel, axis) > 1 for run in drawn)
            for axis in ("dp", "tp", "cp", "pp", "zero")
        ),
        "chunks, layers without positions, and weights of inputs, beside every other axis": all(
            any(on(run) and getattr(run.parallel, axis) > 1 for run in drawn)
            for axis in ("dp", "tp", "cp", "pp", "zero")
            for on in (lambda run: run.model.chunked, lambda run: run.model.temperature,
                       lambda run: run.model.experts.scales_input)
        ),
        "multi-token prediction, beside every other axis": all(
            any(run.model.mtp_depth and getattr(run.parallel, axis) > 1 for run in drawn)
            for axis in ("dp", "tp", "cp", "pp", "zero")
        ),
        "windows in some layers, of documents over cp": any(
            run.model.window and run.model.pattern and run.data.document_mask and run.parallel.cp_ring > 1
            for run in drawn
        ),
        "norms of updates and of all heads, over tp": {
            (run.model.post_norm, bool(run.model.joint_qk_norm)) for run in drawn if run.parallel.tp > 1
        } == {*product((None, "also", "only"), (False, True))},
        "norms of shared heads": any(run.model.joint_qk_norm and run.model.kv_heads < run.parallel.tp for run in drawn),
        "capped scores and other gates, over tp and over cp": all(
            any(run.model.softcap and getattr(run.parallel, axis) > 1 for run in drawn)
            and any(run.model.activation and run.model.logit_softcap and getattr(run.parallel, axis) > 1
                    for run in drawn)
            for axis in ("tp", "cp", "pp")
        ),
        "sinks, and biases of experts, beside every other axis": all(
            any(run.model.sinks and getattr(run.parallel, axis) > 1 for run in drawn)
            and any(run.model.experts.biases and getattr(run.parallel, axis) > 1 for run in sparse)
            for axis in ("dp", "tp", "cp", "pp", "zero")
        ),
        "such layers with experts": any(run.model.depths.capacity for run in sparse),
        "latent attention, beside every other axis": all(
            any(run.model.latent.key_value_rank and getattr(run.parallel, axis) > 1 for run in drawn)
            for axis in ("dp", "tp", "cp", "pp", "zero")
        ),
        "tied over a pipeline": any(run.model.tied and run.parallel.pp > 1 for run in drawn),
    }
    assert all(corners.values()), [name for name, reached in corners.items() if not reached]
