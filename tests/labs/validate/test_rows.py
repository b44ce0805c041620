"""Published rows become points; what cannot is counted with its reason."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.base.errors import UsageError
from shoal.labs.validate import columns
from shoal.labs.validate.rows import Inexpressible, read_folder, read_row
from shoal.labs.validate.score import score
from shoal.planning.cost.batched_runs import ATTENTION, RECOMPUTE, describe_row
from shoal.planning.software_estimate import SoftwareEstimate
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.calibration import NETWORKS, calibration
from shoal.spec.catalog.clusters import nodes
from tests.labs.validate.published import COLUMNS, row, write


def test_a_row_is_what_it_says() -> None:
    point = read_row(row("large", (4, 2, 2), 2, step_time_s=3.5, mem_gb=40, mem_kind="peak GiB"), "file")
    assert point.seconds == 3.5
    assert point.bytes == 40 * 2**30
    layout = point.run.layout
    assert (layout.dp, layout.tp, layout.pp, layout.micro_batch, layout.shards) == (4, 2, 2, 2, 4)
    assert point.run.microbatches == 64 / (4 * 2)
    assert point.run.cluster.accelerator.generation == "hopper"
    assert point.run.software.name == "megatron-core"
    assert not point.assumed


@pytest.mark.parametrize(
    ("stages", "fixed", "job", "holes", "apart", "hides"),
    [(1, False, 13_441_896, 0.1, 2, True), (1, False, 14_018_000, 0.1, 2, False), (1, True, 14_099_000, 0.1, 2, False),
     (2, False, 13_441_896, 0.3, 0, False), (2, True, 14_099_000, 0.1, 2, False)],
)  # fmt: skip
def test_pipelines_of_nanotron_are_read_by_their_version(
    stages: int, fixed: bool, job: int, holes: float, apart: int, hides: bool
) -> None:
    published = row(
        "large", (4, 2, stages), 2, n_gpus=8 * stages, framework="nanotron", step_time_s=1, mem_gb=9,
        mem_kind="peak GiB", note=f"after_pp_fix={fixed}", source_loc=f"bench.csv job {job}",
    )  # fmt: skip
    point = read_row(published, "file")
    software = point.run.software
    assert (software.split_holes, software.reduced_apart, software.hides_gathers) == (holes, apart, hides)
    assert (point.seconds is None) == (software.ties_first) == (stages > 1 and not fixed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "theoretical"}, "kind theoretical"),
        ({"status": "other_failure"}, "status other_failure"),
        ({"layers": ""}, "layers not stated"),
        ({"gpu": "a new one"}, "accelerator a new one is not in the catalog"),
        ({"recompute": "a third of the layers"}, "recompute: a third of the layers"),
        ({"n_gpus": 24}, "dp x tp x pp x cp is not the number of accelerators"),
        ({"global_batch": "", "micro_batch": ""}, "global_batch not stated"),
        ({"layers": "", "hidden": ""}, "layers, hidden not stated"),
        ({"global_batch": "", "framework": "MaxText"}, "global_batch not stated"),
        ({}, "neither time nor memory"),
    ],
)
def test_what_is_no_point_has_a_reason(change: dict, reason: str) -> None:
    with pytest.raises(Inexpressible, match=reason):
        read_row(row(**change), "file")


def test_what_is_not_stated_is_assumed_and_said() -> None:
    point = read_row(row(step_time_s=1, vocab="", micro_batch="", recompute="", ffn="", framework="brand new"), "file")
    assert set(point.assumed) == {"vocab", "micro_batch", "recompute", "ffn"}


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 16)])
def test_a_batch_that_is_not_stated_is_one_micro_batch_or_four_for_each_stage(stages: int, micro_batches: int) -> None:
    point = read_row(row(layout=(2, 1, stages), each=2, global_batch="", step_time_s=1), "file")
    assert point.run.microbatches == micro_batches and point.assumed == ("global_batch",)
    counted = read_row(row(layout=(2, 1, stages), each=2, global_batch="", num_microbatches=8, step_time_s=1), "file")
    assert counted.run.microbatches == 8 and not counted.assumed


@pytest.mark.parametrize(
    ("published", "name"),
    [("qwen3_30b_a3b_(tokendrop)", "qwen3-30b-a3b"), ("gpt_oss_120b", "gpt-oss-120b"), ("kimi_k2", "kimi-k2")],
)
def test_a_model_without_a_shape_is_the_one_of_the_catalog_with_its_name(published: str, name: str) -> None:
    columns = row(step_time_s=1) | {"model": published}
    found = read_row(columns | {"layers": "", "hidden": "", "vocab": ""}, "file").run.shape
    assert found == model_shape(name).model_copy(update={"max_sequence": 2048})
    assumed = read_row(columns | {"layers": "", "hidden": "", "vocab": ""}, "file").assumed
    assert {"layers", "vocab"} <= set(assumed)
    stated = read_row(columns | {"hidden": model_shape(name).hidden}, "file").run.shape
    assert stated.layers == 16 and (stated.latent is not None) == (name == "kimi-k2"), "no column has widths of latents"


@pytest.mark.parametrize("published", ["gpt2_8.3b", "tiny-moe-9b", "kimi_k2_thinking", "DeepSeek-V2-Lite"])
def test_a_name_that_begins_as_a_model_of_the_catalog_is_another(published: str) -> None:
    columns = row(step_time_s=1) | {"model": published}
    with pytest.raises(Inexpressible, match="layers, hidden not stated"):
        read_row(columns | {"layers": "", "hidden": ""}, "file")
    assert read_row(columns, "file").run.shape.latent is None


def test_a_model_with_some_of_its_layers_has_its_latents() -> None:
    columns = row(step_time_s=1) | {"model": "deepseek-v2-4layers", "layers": "4", "hidden": "5120"}
    assert read_row(columns, "file").run.shape == model_shape("deepseek-v2").model_copy(
        update={"layers": 4, "vocab": 32000, "max_sequence": 2048}
    )
    assert read_row(columns | {"hidden": "4096"}, "file").run.shape.latent is None, "another width, another model"


def test_maxtext_accumulates_no_gradients_and_splits_activations_over_tensor_parallelism() -> None:
    found = read_row(row(layout=(2, 4, 1), each=1, framework="MaxText", global_batch=16, sp="n", step_time_s=1), "file")
    assert (found.run.layout.micro_batch, found.run.microbatches) == (8, 1)
    assert found.run.layout.sequence_parallel


@pytest.mark.parametrize("memory", [80, 36, 31])
def test_a_micro_batch_that_is_not_stated_is_the_fastest_that_fits(memory: int) -> None:
    estimates = []
    for each in (1, 2, 4, 8):
        stated = read_row(row(micro_batch=each, gpu_mem_gb=memory, step_time_s=1), "file")
        estimates.append((each, SoftwareEstimate(stated.run)))
    fastest = min((e.step_seconds, each) for each, e in estimates if e.fits)[1]
    found = read_row(row(micro_batch="", gpu_mem_gb=memory, step_time_s=1), "file")
    assert found.run.layout.micro_batch == fastest
    failed = read_row(row(micro_batch="", gpu_mem_gb=memory, status="oom"), "file")
    assert failed.run.layout.micro_batch == 1, "that of a run that did not fit is unknown"
    counted = read_row(row(micro_batch="", num_microbatches=8, gpu_mem_gb=memory, step_time_s=1), "file")
    assert counted.run.layout.micro_batch == 1, "it follows from their number"


def test_stages_of_a_pipeline_rank_that_are_not_stated_are_the_fastest_that_fit() -> None:
    tuned, plain = (read_row(row(layout=(2, 1, 4), vpp=vpp, step_time_s=1), "file").run for vpp in ("", 1))
    assert tuned.layout.schedule == "interleaved-1f1b" and tuned.layout.virtual_stages in (2, 4)
    assert SoftwareEstimate(tuned).step_seconds < SoftwareEstimate(plain).step_seconds
    assert plain.layout.schedule == "1f1b"
    for stated in ({"global_batch": 2}, {"schedule": "1F1B"}):
        found = read_row(row(layout=(2, 1, 4), vpp="", step_time_s=1, **stated), "file")
        assert found.run.layout.schedule == "1f1b"


@pytest.mark.parametrize(
    ("location", "gpus", "reduced", "blocking"),
    [
        ("github:VIA-Research/vTrain@f8dda84:data/ground_truth_single.csv", 256, 2, False),
        ("github:bigscience-workshop/bigscience@9e64ede:chronicles-prequel.md line 616", 384, 4, True),
        ("github:bigscience-workshop/bigscience@9e64ede:chronicles-prequel.md line 616", 160, 4, False),
        ("", 384, 4, False),
    ],
)
def test_what_a_source_says_of_its_runs(location: str, gpus: int, reduced: int, blocking: bool) -> None:
    stated = {"source_loc": location, "recompute": "full"}
    found = read_row(row(layout=(gpus, 1, 1), global_batch=gpus, step_time_s=1, **stated), "file")
    software = found.run.software
    assert (software.gradient_bytes, software.reduce_bytes, software.blocking) == (reduced, reduced, blocking)
    assert found.run.layout.recompute == ("none" if "ground_truth_single" in location else "full"), "whatever is stated"
    bridge = read_row(row(framework="Megatron-Core (Megatron-Bridge) 26.06", step_time_s=1), "file").run.software
    assert (bridge.gradient_bytes, bridge.reduce_bytes, bridge.fused_loss) == (2, 2, True), "by its recipes"
    assert not found.run.software.fused_loss
    for release, kind, arch, fused in (
        ("26.06.01", "MXFP8", "moe", True), ("26.04.01", "MXFP8", "moe", False), ("26.08", "BF16", "moe", False),
        ("26.08", "MXFP8", "dense", False),
    ):  # fmt: skip
        framework = f"Megatron-Core (Megatron-Bridge) {release} NeMo Container"
        named = row(framework=framework, precision=kind, arch=arch, year=2026, step_time_s=1)
        made = read_row(named, "file").run.software
        assert made.name == ("megatron-2026" if fused else "megatron-core") and made.family == "megatron-core"
        assert (made.graphs, made.overlap_rows, made.expert_kernels == 0) == (fused, fused, fused)
    for framework, splits in (("Megatron-DeepSpeed", True), ("Megatron-LM 2021", False)):
        made = read_row(row(framework=framework, year=2021, step_time_s=1), "file").run.software
        assert made.splits(70, 12) == splits, "DeepSpeed counts both ends as layers"
    for precision, wanted in (("FP8", 2), ("BF16", 4)):
        nemo = read_row(row(framework="NeMo 24.07", precision=precision, step_time_s=1), "file").run.software
        assert (nemo.gradient_bytes, nemo.reduce_bytes) == (wanted, wanted), "of its recipes those in 8 bits"


@pytest.mark.parametrize(
    ("mode", "ranks"), [("FSDP", 64), ("HSDP", 8), ("HSDP, shard group=16", 16), ("ZeRO-1, optimizer shard group=4", 4)]
)
def test_how_many_ranks_have_a_share(mode: str, ranks: int) -> None:
    point = read_row(row(layout=(64, 1, 1), dp_mode=mode, zero_stage=3, step_time_s=1), "file")
    assert point.run.layout.shards == ranks


def test_software_with_zero_is_assumed_to_use_it() -> None:
    said = [("", "", "Megatron-LM", 2025), ("", "", "Megatron-LM", 2021), ("", "", "PyTorch FSDP", 2024),
            ("", "DDP", "Megatron-LM", 2025), (0, "", "Megatron-LM", 2025)]  # fmt: skip
    found = [
        read_row(row(zero_stage=stage, dp_mode=mode, framework=name, year=year, step_time_s=1), "file")
        for stage, mode, name, year in said
    ]
    assert [point.run.layout.zero for point in found] == [1, 0, 3, 0, 0]
    assert ["zero_stage" in point.assumed for point in found] == [True, True, True, False, False]


def test_formats_of_products() -> None:
    said = {"BF16": "bf16", "FP8-CS": "fp8", "MXFP8": "fp8", "float8 rowwise": "bf16", "NVFP4": "nvfp4"}
    found = {text: read_row(row(gpu="GB300", precision=text, step_time_s=1), "file").run for text in said}
    assert {text: run.precision for text, run in found.items()} == said


def test_what_is_computed_again_has_a_name() -> None:
    said = {"none": "none", "selective": "selective", "selective (op-level SAC)": "operators", "full": "full"}
    found = {text: describe_row(read_row(row(recompute=text, step_time_s=1), "file").run) for text in said}
    assert {text: RECOMPUTE[run["recompute"]] for text, run in found.items()} == said


@pytest.mark.parametrize(
    ("text", "framework", "kind"),
    [
        ("flash_attention2 + RMS kernel", "AA-Scaling", "flash-2"),
        ("flash_attentionv1.0.8", "AA-Scaling", "flash-1"),
        ("flash-attn3", "Megatron-Core", "flash-3"),
        ("flash-attn", "Megatron-Core", "flash-3"),
        ("flash-attn", "llm-foundry/Composer FSDP1", "flash-1"),
        ("flash-attn", "Megatron-LM 2020", "flash-2"),
        ("torch", "AA-Scaling", "unfused"),
        ("fused", "AA-Scaling", "fused-softmax"),
        ("", "Megatron-LM 2020", "fused-softmax"),
    ],
)
def test_which_kernel_attention_is(text: str, framework: str, kind: str) -> None:
    run = read_row(row(attn_kernel=text, framework=framework, year=2023, step_time_s=1), "file").run
    assert run.software.attention == kind
    assert kind in ATTENTION


@pytest.mark.parametrize(
    ("gpu", "memory", "peak", "bandwidth", "per_node"),
    [
        ("H100-SXM-80GB", "80", 989.4e12, 3350e9, 8),
        ("H100-96GB HBM2e 500W (Grand Teton)", "96", 989.4e12, 2400e9, 8),
        ("GB200", "186", 2500e12, 8000e9, 72),
        ("GB300", "288", 2500e12, 8000e9, 72),
        ("B300", "288", 2250e12, 8000e9, 8),
    ],
)
def test_what_a_published_accelerator_is(gpu: str, memory: str, peak: float, bandwidth: float, per_node: int) -> None:
    given = row(gpu=gpu, gpu_mem_gb=memory, layout=(72, 1, 1), global_batch=72, step_time_s=1)
    run = describe_row(read_row(given, "file").run)
    assert (run["peak"], run["hbm"], run["per_node"]) == (peak, bandwidth, per_node)


@pytest.mark.parametrize(
    ("gpu", "precision", "mode", "layers"),
    [
        ("GB200", "FP8-CS", "FSDP", 40), ("GB300", "FP8", "FSDP", 20), ("GB300", "BF16", "FSDP", 30),
        ("GB200", "FP8-CS", "DDP+dist-opt", 0), ("H100-SXM-80GB", "FP8", "FSDP", 0),
    ],
)  # fmt: skip
def test_recipes_that_keep_layers_in_the_memory_of_the_host(gpu: str, precision: str, mode: str, layers: int) -> None:
    stated = {"gpu": gpu, "precision": precision, "dp_mode": mode, "model": "llama3-70b"}
    for framework, expected in (("Megatron-Core (Megatron-Bridge) 26.04", layers), ("NeMo 24.07", 0)):
        found = read_row(row(framework=framework, step_time_s=1) | stated, "file").run.software
        assert found.offloaded_layers == expected


def test_a_published_part_of_activations_waits_in_the_memory_of_the_host() -> None:
    note = "activation offload ratio alpha=0.355; ckpt=no"
    found = read_row(row(layout=(2, 2, 4), note=note, step_time_s=1), "file").run
    assert found.software.offloaded_layers == pytest.approx(0.355 * found.shape.layers / 4)


@pytest.mark.parametrize(("policy", "kept"), [("minimal", "products"), ("full", "products"), ("selective", "core")])
def test_what_selective_recomputation_keeps_in_published_runs(policy: str, kept: str) -> None:
    given = row(framework="MaxText", recompute=policy, step_time_s=1)
    assert read_row(given, "file").run.software.selective == kept


def test_the_vocabulary_of_a_published_bert() -> None:
    sizes = {
        model: read_row(row(model="small", vocab="", step_time_s=1) | {"model": model}, "file").run.shape.vocab
        for model in ("bert-L24", "gpt2-L24")
    }
    assert sizes == {"bert-L24": 30592, "gpt2-L24": 51200}


def test_times_from_throughput_and_none_from_what_did_not_fit() -> None:
    assert read_row(row(tokens_per_s_per_gpu=1000), "file").seconds == pytest.approx(64 * 2048 / (1000 * 8))
    assert read_row(row(kind="measured_oom", status="oom", step_time_s=1), "file").seconds is None


@pytest.mark.parametrize(
    ("text", "per_accelerator", "kind"),
    [
        ("NVLink3; 4x100Gb RoCE per node", 50e9 / 8, "roce"),
        ("4 Omni-Path links per node (100Gb/s each)", 50e9 / 8, "omni-path"),
        ("1600 Gbps/node RoCE", 25e9, "roce"),
        ("NVLink4 450GB/s; 400Gb/s NDR IB per GPU", 50e9, "infiniband"),
        ("InfiniBand 200 GB/s per node", 25e9, "infiniband"),
        ("Selene: NVLink3; 8x200Gb/s HDR IB per node", 25e9, "infiniband"),
        ("", 50e9, "infiniband"),
    ],
)
def test_what_leaves_a_node(text: str, per_accelerator: float, kind: str) -> None:
    given = {"interconnect": text}
    assert columns.leaving(given, nodes()["H100"], 8) == pytest.approx(per_accelerator)
    assert columns.network(given) == kind
    assert kind in NETWORKS


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(COLUMNS), st.sampled_from(["", "0", "3", "-1", "nan", "1e9", "?", "full", "fp8"]), max_size=4
    )
)
def test_any_row_is_estimated_or_has_a_reason(garbled: dict[str, str]) -> None:
    given_row = row("large", (4, 2, 2), 2, step_time_s=3.5, mem_gb=40, mem_kind="peak GiB") | garbled
    try:
        point = read_row(given_row, "file")
    except (Inexpressible, UsageError, ValidationError) as reason:
        assert str(reason)
        return
    together, alone = score([point], calibration()), score([point])
    for scored in (together, alone):
        assert np.isfinite([scored.seconds[0], scored.bytes[0], scored.part[0]]).all()
    assert alone.seconds == pytest.approx(together.seconds), "what is scored is what an estimate says"
    assert alone.bytes == pytest.approx(together.bytes) and alone.part == pytest.approx(together.part)


def test_a_folder_keeps_count(tmp_path) -> None:
    good = row(step_time_s=1) | {"a column that nobody knows": "x"}
    write(tmp_path, [good, row(), row(layers="", step_time_s=1), row(layers="", step_time_s=1)])
    (tmp_path / "hardware.csv").write_text("accelerator,peak\nH100,989\n")
    points, left = read_folder(tmp_path)
    assert len(points) == 1
    assert left == {("made", "neither time nor memory"): 1, ("made", "layers not stated"): 2}
