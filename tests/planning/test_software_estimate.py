"""Estimates and plans for other software than shoal."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from math import ceil, prod
from typing import Any

import pytest
import yaml

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.pipeline.from_layout import virtual_stages
from shoal.planning.describe import describe_run
from shoal.planning.estimable import check_closed_form
from shoal.planning.search.kinds import TIE
from shoal.planning.search.planner import LayoutPlanner
from shoal.planning.search.space import build_layout
from shoal.planning.search.usual import find_usual
from shoal.planning.software_estimate import SoftwareEstimate, estimate_run
from shoal.report.planning.estimate_lines import bound
from shoal.report.planning.other_software import (
    MEGATRON_FORMATS,
    TORCHTITAN_CONVERTERS,
    software_lines,
    torchtitan_config,
)
from shoal.spec.catalog.software import find_software, software_table
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS


@pytest.mark.parametrize("name", [name for name in software_table() if name != "shoal"])
@pytest.mark.parametrize(
    "layout", [Layout(tp=8, pp=4, zero=1, sequence_parallel=True), Layout(zero=3), Layout(pp=8, recompute="selective")]
)
def test_the_parts_of_a_step_are_the_step(name: str, layout: Layout) -> None:
    found = shoal.estimate(layout, model="llama-3-8b", cluster="8x8xH100", software=name)
    assert isinstance(found, SoftwareEstimate)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    assert all(seconds >= 0 for seconds in found.breakdown.values())
    assert len(found.memory) == layout.pp
    assert found.fullest.reserved == pytest.approx(float(found.footprint.needed[0]))
    assert found.fits == bool(found.footprint.fits[0])
    assert 0.05 < found.mfu <= found.hfu < 0.8


def test_a_full_memory_is_said_with_what_fills_it() -> None:
    layout = Layout(pp=4, tp=8, sequence_parallel=True, micro_batch=8)
    full = shoal.estimate(
        layout, model="llama-3-8b", cluster="4x8xH100", sequence_length=7680, global_batch=128, software="nanotron"
    )
    assert re.match(r"The memory is full, with [\d.]+ GB that are freed but still read by collectives", bound(full))


def test_software_changes_the_answer_as_it_should() -> None:
    def seconds(name: str, **change: object) -> float:
        software = find_software(name).model_copy(update=change)
        layout = Layout(tp=8, pp=2, zero=1, sequence_parallel=True)
        return shoal.estimate(layout, model="llama-3-8b", cluster="4x8xH100", software=software).step_seconds

    assert seconds("megatron-core", overlap_tensor=False) > seconds("megatron-core")
    assert seconds("megatron-core", overlap_data=False) > seconds("megatron-core")
    assert seconds("megatron-core", attention="unfused") > seconds("megatron-core")


def test_four_bits_are_faster_where_they_are_multiplied() -> None:
    def seconds(software: str, cluster: str) -> list[float]:
        given = {"layout": Layout(zero=1), "model": "llama-3-8b", "cluster": cluster, "software": software}
        return [shoal.estimate(**given, precision=kind).step_seconds for kind in ("bf16", "fp8", "nvfp4")]

    for software in ("megatron-core", "shoal"):
        half, eight, four = seconds(software, "8xGB300")
        assert four < 0.8 * eight < eight < half
        half, eight, four = seconds(software, "8xH100")
        assert eight < four and (four >= half if software == "shoal" else four == half), "without products in 4 bits"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"software": "megatron"}, "--software 'megatron' is not in the catalog; did you mean"),
        ({"software": "nanotron", "optimizer": "muon"}, "--optimizer = muon: not estimated for --software nanotron"),
        ({"software": "nanotron", "layout": Layout(pp=2, schedule="zb-v")}, "allowed: 1f1b, interleaved-1f1b"),
        (
            {"software": "torchtitan", "layout": Layout(dp=8, zero=3, reshard_after_forward=False)},
            "parallel.reshard_after_forward = False: not estimated for --software torchtitan; allowed: True",
        ),
        ({"software": "nanotron", "layout": Layout(dp=3)}, "the cluster has 8"),
        ({"software": "nanotron", "global_batch": 4}, "Give at least 8 sequences"),
        ({"software": "nanotron", "global_batch": 12}, "Nearest global_batch that fits: 8 or 16"),
        ({"software": "megatron-core", "layout": Layout(tp=3), "cluster": "3xH100"}, "tp = 3 does not divide"),
        ({"software": "megatron-core", "layout": Layout(pp=2, virtual_stages=2)}, "take one of .*interleaved-1f1b"),
        ({"software": "megatron-core", "layout": Layout(pp=64), "cluster": "64xH100"}, "32 layers cannot fill 64"),
        (
            {"software": "megatron-core", "layout": Layout(ep=16), "model": "mixtral-8x7b", "cluster": "16xH100"},
            "parallel.ep = 16 does not divide model.experts.count = 8",
        ),
    ],
)
def test_what_no_software_can_split_or_has_no_closed_form_is_refused(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shoal.estimate(**{"layout": Layout(), "cluster": "8xH100"} | given)


def test_a_plan_is_the_best_of_all_estimates() -> None:
    planner = LayoutPlanner("llama-3-8b", "2x8xH100", global_batch=64, sequence_length=4096, software="megatron-core")
    plan = planner.plan()
    assert plan.found.seconds <= (1 + TIE) * min(one.seconds for one in plan.best)
    for one in plan.best:
        estimate = estimate_run(replace(plan.run, layout=one.layout))
        assert estimate.step_seconds == pytest.approx(one.seconds) and estimate.fits
        assert one.layout.zero in (0, 1)
    levels = {"dp": 8, "tp": 2, "pp": 1, "micro_batch": 1, "sequence_parallel": True, "zero": 1}
    some = replace(plan.run, layout=build_layout(planner.space, levels))
    assert estimate_run(some).step_seconds >= min(one.seconds for one in plan.best) or not estimate_run(some).fits


@pytest.mark.parametrize(("software", "stage"), [("megatron-core", 1), ("torchtitan", 3), ("megatron-2021", 0)])
def test_the_usual_layout_shards_as_the_software_does(software: str, stage: int) -> None:
    run = LayoutPlanner("llama-3-8b", "2x8xH100", global_batch=64, sequence_length=4096, software=software).plan().run
    usual = find_usual(run)
    assert usual is not None and usual.layout.zero == stage


def test_stages_of_torchtitan_hold_all_of_their_parameters_and_gradients() -> None:
    layout = Layout(dp=8, tp=8, pp=8, sequence_parallel=True, zero=3, micro_batch=4, recompute="full")
    run = {"layout": layout, "model": "llama-3.1-405b", "cluster": "64x8xH100", "global_batch": 256, "precision": "fp8"}
    stage = 405.9e9 / 64
    held = shoal.estimate(**run, sequence_length=8192, software="torchtitan").fullest.allocated
    assert held > (2 + 4 + 12 / 8) * stage, "and a share of the optimizer's states"


def test_other_software_multiplies_experts_in_8_and_4_bits() -> None:
    """shoal has no such products of experts; NVIDIA's recipes train so. Where each of 16 experts of a rank is converted
    with kernels of its own, their launches take longer than the products save."""
    def planner(software: str, precision: str) -> LayoutPlanner:
        run = {"global_batch": 64, "sequence_length": 4096, "precision": precision, "software": software}
        return LayoutPlanner("qwen3-30b-a3b", "8xB200", **run)

    half, eight, four = (planner("megatron-2026", kind).plan().found.seconds for kind in ("bf16", "mxfp8", "nvfp4"))
    assert four < eight < half
    assert planner("megatron-core", "mxfp8").plan().found.seconds > half
    with pytest.raises(UsageError, match="grouped products of experts have no 8-bit implementation"):
        planner("shoal", "fp8")
    with pytest.raises(UsageError, match="--precision = fp32: not estimated for --software megatron-core"):
        planner("megatron-core", "fp32")
    with pytest.raises(UsageError, match="reshard_after_forward = False: not estimated"):
        LayoutPlanner("llama-3-8b", "8xB200", software="torchtitan", fixed={"reshard_after_forward": False})


def test_commands_answer_for_other_software(tmp_path, capsys: pytest.CaptureFixture) -> None:
    run = ["--model", "llama-3-8b", "--cluster", "2x8xH100", "--global-batch", "64"]
    page = tmp_path / "page.html"
    layout = ["--parallel.zero", "3", "--sequence-length", "4096"]
    assert main(["estimate", *run, *layout, "--software", "torchtitan", "--out", str(page)]) == 0
    assert "gathers and reductions" in capsys.readouterr().out and "<svg" in page.read_text()
    assert main(["plan", *run, "--software", "megatron-core", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "--tensor-model-parallel-size" in said and "layouts of megatron-core priced" in said
    assert "--tensor-model-parallel-size" in page.read_text()
    assert main(["plan", *run, "--software", "torchtitan"]) == 0
    assert "[parallelism]" in capsys.readouterr().out
    assert main(["plan", *run, "--software", "torchtitan", "--toml", str(tmp_path / "run.toml")]) == 2
    assert "--toml" in capsys.readouterr().err


def test_shoal_is_the_default() -> None:
    run = describe_run(Layout(), model="llama-3-8b", cluster="8xH100")
    assert run.software.name == "shoal" and not isinstance(estimate_run(run), SoftwareEstimate)


@pytest.mark.parametrize(
    ("software", "layers", "layout", "wanted", "unwanted"),
    [
        ("megatron-core", 32, {"pp": 4, "virtual_stages": 2, "schedule": "interleaved-1f1b", "zero": 1, "dp": 4},
         {"--num-layers-per-virtual-pipeline-stage 4", "--use-distributed-optimizer"}, {"--account-for", "instances"}),
        ("megatron-core", 30, {"pp": 4, "virtual_stages": 2, "schedule": "interleaved-1f1b", "zero": 1, "dp": 4,
                               "zero_shard": 2},
         {"--num-layers-per-virtual-pipeline-stage 4", "--num-distributed-optimizer-instances 2",
          "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"}, set()),
        ("megatron-2021", 32, {"pp": 4, "tp": 2, "recompute": "full"}, {"--recompute-granularity full"},
         {"--context-parallel-size", "virtual"}),
        ("megatron-core", 61, {"pp": 16, "zero": 1},
         {"--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"}, {"--account"}),
        ("zero-bubble", 30, {"pp": 8, "schedule": "zb-h2"},
         {"--allow-padding-num-layers", "--enable-zero-bubble --zero-bubble-max-pending-backward 16"}, {"--account"}),
    ],
)  # fmt: skip
def test_megatron_gets_the_arguments_of_a_layout(
    software: str, layers: int, layout: dict[str, Any], wanted: set[str], unwanted: set[str]
) -> None:
    split = Layout.model_validate(layout)
    of = {"cluster": f"{split.world_size // 8}x8xA100", "global_batch": 64, "sequence_length": 2048}
    run = describe_run(split, model="llama-3-8b", software=software, **of)
    run = replace(run, shape=run.shape.model_copy(update={"layers": layers}))
    lines = list(software_lines(run))
    said = "\n".join(lines)
    assert all(any(line.startswith(each) for line in lines) for each in wanted) and "--bf16" in lines, said
    assert not any(each in said for each in unwanted), said
    assert run.software.splits(layers, layout["pp"] * layout.get("virtual_stages", 1))


def test_megatron_is_told_what_estimates_of_2026_assume() -> None:
    run = describe_run(Layout(dp=8, ep=8), model="qwen3-30b-a3b", cluster="8xB200", software="megatron-2026")
    said = "\n".join(software_lines(run))
    assert "--cuda-graph-scope full_iteration" in said and "--overlap-moe-expert-parallel-comm" in said
    assert "--moe-flex-dispatcher-backend hybridep" in said and "--expert-model-parallel-size 8" in said
    assert "graph" not in "\n".join(software_lines(replace(run, software=find_software("megatron-core"))))


def test_torchtitan_gets_the_stages_of_a_layout() -> None:
    """torchtitan adds to the layers what both ends have less, divides by the layers of a stage, and rounds up."""
    for layers in (30, 32):
        layout = Layout(dp=4, zero=3, pp=4, schedule="interleaved-1f1b", virtual_stages=2)
        of = {"cluster": "2x8xH100", "global_batch": 64, "sequence_length": 2048, "software": "torchtitan"}
        run = describe_run(layout, model="llama-3-8b", **of)
        parallel = torchtitan_config(replace(run, shape=run.shape.model_copy(update={"layers": layers})))["parallelism"]
        less = sum(parallel[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last"))
        assert ceil((layers + less) / parallel["pipeline_parallel_layers_per_stage"]) == 4 * 2
    assert "model" not in torchtitan_config(run)
    assert torchtitan_config(replace(run, precision="fp8"))["model"] == {"converters": ["quantize.linear.float8"]}


def config_of(
    software: str, layout: Layout, cluster: str = "2x8xA100", batch: int = 64, model: str = "llama-3-8b"
) -> str:
    run = describe_run(layout, model=model, cluster=cluster, global_batch=batch, software=software)
    heading, *lines = software_lines(run)
    assert "words" not in heading, "a config of its own"
    return "\n".join(lines)


def test_other_software_gets_its_own_config() -> None:
    layout = Layout(dp=2, tp=4, pp=2, micro_batch=2, zero=1, sequence_parallel=True)
    nanotron = yaml.safe_load(config_of("nanotron", layout))
    assert nanotron["parallelism"] | {"dp": 2, "tp": 4, "pp": 2, "tp_mode": "REDUCE_SCATTER"} == nanotron["parallelism"]
    assert nanotron["tokens"]["batch_accumulation_per_replica"] == 64 / (2 * 2)
    assert nanotron["optimizer"]["zero_stage"] == 1
    foundry = yaml.safe_load(config_of("composer", Layout(dp=16, zero=3, zero_shard=8, recompute="full")))
    assert foundry["fsdp_config"] == {"sharding_strategy": "HYBRID_SHARD", "activation_checkpointing": True}
    assert (foundry["global_train_batch_size"], foundry["precision"]) == (64, "amp_bf16")
    speed = json.loads(config_of("deepspeed", Layout(dp=16, micro_batch=2, zero=3, zero_shard=8)))
    assert speed["zero_optimization"] == {"stage": 3, "overlap_comm": True, "mics_shard_size": 8}
    micro = speed["train_micro_batch_size_per_gpu"] * speed["gradient_accumulation_steps"] * 16
    assert micro == speed["train_batch_size"] == 64


@pytest.mark.parametrize(("software", "layout", "says"), [
    ("torchtitan", Layout(dp=16, zero=1), "torchtitan has no ZeRO-1:"),
    ("composer", Layout(dp=4, tp=2, pp=2, zero=3), "composer has no tp and no pp:"),
    ("megatron-core", Layout(dp=4, pp=4, schedule="zb-h1"), "megatron-core has no zb-h1:"),
    ("megatron-core", Layout(dp=4, pp=4, virtual_stages=3, schedule="interleaved-1f1b"),
     "megatron-core has no split of 32 layers into 12 stages:"),
])  # fmt: skip
def test_a_layout_that_the_software_lacks_has_no_config(software: str, layout: Layout, says: str) -> None:
    run = describe_run(layout, model="llama-3-8b", cluster="2x8xA100", global_batch=64, software=software)
    heading, words = software_lines(run, "The layout")
    assert heading.startswith("The layout, in shoal's words") and heading.endswith(says)
    assert words == f"{layout.describe()}, micro-batch {layout.micro_batch}"


def test_replicas_without_zero_need_no_stage_of_it() -> None:
    run = describe_run(Layout(dp=16), model="llama-3-8b", cluster="2x8xA100", global_batch=64, software="torchtitan")
    assert "data_parallel_replicate_degree = 16" in "\n".join(software_lines(run))


@pytest.mark.parametrize("layout", [
    Layout(dp=128, zero=3), Layout(dp=128, zero=3, zero_shard=64), Layout(dp=32, tp=4, zero=3, zero_shard=8),
    Layout(dp=32, cp=2, tp=2, zero=3, micro_batch=4),
    Layout(dp=64, tp=2, ep=8, zero=3), Layout(dp=8, cp=16, ep=8, zero=3),
])  # fmt: skip
def test_maxtext_gets_all_chips_and_the_batch(layout: Layout) -> None:
    model = "mixtral-8x7b" if layout.ep > 1 else "llama-3-8b"
    said = dict(line.split("=") for line in config_of("maxtext", layout, "2xv5p-128", 256, model).splitlines())
    degrees = {axis: prod(int(said[key]) for key in said if key.startswith(axis)) for axis in ("ici", "dcn")}
    assert degrees == {"ici": 64, "dcn": 2}, "two slices of 64 chips"
    batch = float(said["per_device_batch_size"]) * layout.world_size * int(said["gradient_accumulation_steps"])
    assert batch == 256
    assert int(said["dcn_data_parallelism"]) == min(2, layout.dp_replicate)


@pytest.mark.parametrize("software", ["composer", "deepspeed", "hai-llm", "maxtext", "megatron-2021"])
def test_plans_split_along_axes_that_the_software_has(software: str) -> None:
    """A plan for llm-foundry with tensor parallelism, or for DeepSpeed with ring attention, could not be run."""
    of = find_software(software)
    plan = LayoutPlanner("llama-3-8b", "2x8xA100", global_batch=64, sequence_length=8192, software=software).plan()
    kept = [plan.found, *plan.best]
    assert all(of.has(**{axis: getattr(one.layout, axis) for axis in ("tp", "cp", "ep", "pp")}) for one in kept)
    assert len(kept) > 1


def test_deepseek_v3_is_planned_for_the_cluster_that_trained_it() -> None:
    """Its 61 layers are on 16 pipeline ranks, with 64 ranks of experts (DeepSeek-AI 2024, section 3.2)."""
    run = {"sequence_length": 4096, "global_batch": 15_360, "precision": "fp8", "software": "hai-llm"}
    plan = LayoutPlanner("deepseek-v3", "2048xH800", **run).plan()
    published = LayoutPlanner("deepseek-v3", "2048xH800", fixed="pp=16,ep=64", **run).plan()
    fastest = min(found.seconds for found in plan.best)
    assert fastest <= min(found.seconds for found in published.best) < 1.05 * fastest


@pytest.mark.parametrize(("software", "fixed", "said"), [
    ("composer", "tp=2", "--fix tp=2: composer has no such layouts.\n  Give tp = 1, or leave it out."),
    ("deepspeed", "cp=2", "Give cp = 1"), ("composer", "zero=1", "Give zero = 3"),
    ("nanotron", "schedule=interleaved-1f1b", "Give schedule = 1f1b"),
])  # fmt: skip
def test_a_fixed_field_that_the_software_lacks_is_named(software: str, fixed: str, said: str) -> None:
    """It is no lack of memory."""
    run = {"global_batch": 64, "sequence_length": 2048, "software": software}
    planner = LayoutPlanner("llama-3-8b", "8xH100", fixed=fixed, **run)
    with pytest.raises(UsageError) as refused:
        planner.plan()
    assert said in str(refused.value)


def formats_of(software: str) -> set[str]:
    run = describe_run(Layout(zero=find_software(software).zero_stages[0]), model="llama-3-8b", cluster="8xB200")
    run, estimated = replace(run, software=find_software(software)), set()
    for precision in FORMATS:
        with suppress(UsageError):
            check_closed_form(replace(run, precision=precision))
            estimated.add(precision)
            assert list(software_lines(replace(run, precision=precision)))
    return estimated


def test_every_estimated_number_format_has_its_arguments() -> None:
    """What a software does not train in is refused: its config would train in another format than was estimated."""
    assert formats_of("megatron-core") == set(MEGATRON_FORMATS)
    assert formats_of("torchtitan") == {"bf16", "fp16", *TORCHTITAN_CONVERTERS}
    assert TORCHTITAN_CONVERTERS["mxfp8"].endswith("linear.mx")
    for name in ("megatron-2019", "megatron-2021", "zero-bubble", "nanotron", "deepspeed"):
        assert formats_of(name) == {"bf16", "fp16"}, name
    assert formats_of("composer") == {"bf16", "fp16", "fp8"}
    assert "quantization=fp8" in "\n".join(software_lines(replace(
        describe_run(Layout(dp=8, zero=3), model="llama-3-8b", cluster="8xH100"), precision="fp8",
        software=find_software("maxtext"),
    )))  # fmt: skip


def test_partial_sharding_has_larger_shards_and_closer_ranks() -> None:
    def found(shard: int) -> SoftwareEstimate:
        layout = Layout(dp=32, zero=3, zero_shard=shard)
        return shoal.estimate(layout, model="llama-3-8b", cluster="4x8xH100", software="torchtitan", global_batch=32,
                              sequence_length=2048)  # fmt: skip

    part, all_of_it = found(8), found(32)
    assert part.fullest.reserved > 1.2 * all_of_it.fullest.reserved
    assert part.step_seconds != pytest.approx(all_of_it.step_seconds, rel=0.01)


def test_balanced_software_has_no_stage_without_a_layer() -> None:
    assert find_software("nanotron").splits(32, 32) and not find_software("nanotron").splits(32, 33)


def test_the_usual_layout_of_llama_3_405b_is_the_published_one() -> None:
    """126 layers in 16 stages: the embedding and the head count as layers (Llama 3, table 4)."""
    planner = LayoutPlanner("llama-3.1-405b", "2048x8xH100", global_batch=2048, sequence_length=8192,
                            software="megatron-core")  # fmt: skip
    usual = find_usual(planner.run)
    assert usual is not None and (usual.layout.tp, usual.layout.pp, usual.layout.dp) == (8, 16, 128)


@pytest.mark.parametrize("software", ["megatron-2021", "megatron-core", "torchtitan", "zero-bubble"])
def test_stages_are_planned_as_the_software_splits_the_layers(software: str) -> None:
    """126 layers: 16 stages count both ends; Megatron-LM of 2021 has none that it could not divide."""
    run = {"global_batch": 512, "sequence_length": 4096, "software": software}
    plan = LayoutPlanner("llama-3.1-405b", "64x8xH100", **run).plan()
    layouts = [found.layout for found in plan.listed]
    usual = find_usual(plan.run)
    assert layouts and usual is not None
    for layout in (*layouts, usual.layout):
        assert plan.run.software.splits(126, layout.pp * virtual_stages(layout))
