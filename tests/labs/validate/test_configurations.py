"""Published rows are completed by the configurations of their runs."""

import pytest

from shoal.labs.validate.configurations import configurations
from shoal.labs.validate.rows import read_row
from tests.labs.validate.published import row

BRIDGE = {"framework": "Megatron-Core (Megatron-Bridge) 26.02.01", "dp_mode": "DDP+dist-opt", "n_gpus": "64"}


@pytest.mark.parametrize(
    ("gpu", "precision", "printed", "layout"),
    [
        ("GB300", "NVFP4", {"dp": 64, "micro_batch": 2}, (16, 1, 4, 5, 1)),
        ("GB300", "MXFP8", {"dp": 16, "pp": 4, "vpp": "", "micro_batch": 2}, (16, 1, 4, 5, 1)),
        ("GB200", "FP8 finer-grained", {"dp": 8, "tp": 2, "pp": 4, "vpp": 5, "micro_batch": 2}, (8, 2, 4, 5, 1)),
        ("GB200", "BF16", {"dp": 64, "micro_batch": 2}, (64, 1, 1, None, 2)),
    ],
)
def test_a_recipe_counts_where_a_printed_layout_cannot_be(
    gpu: str, precision: str, printed: dict[str, object], layout: tuple[int | None, ...]
) -> None:
    """Without a pipeline, weights and gradients of Llama-3-70B in 16 bits fill a GB300."""
    stated = {"gpu": gpu, "gpu_mem_gb": "", "precision": precision, "layers": 80, "vpp": "", "global_batch": 256}
    published = row(step_time_s=1, **stated | printed) | BRIDGE | {"model": "llama3-70b"}
    if precision == "FP8 finer-grained":
        published["framework"] = "Megatron-Core (Megatron-Bridge) 25.09"
    found = read_row(published, "file").run.layout
    assert (found.dp, found.tp, found.pp, found.virtual_stages, found.micro_batch) == layout


def test_configurations_of_published_runs_complete_their_rows() -> None:
    gpt = {"source_loc": "github:Oneflow-Inc/DLPerf:reports/GPT/dlperf_gpt_test_report_210512.md", "recompute": ""}
    given = row(layers=24, hidden=2304, heads="", layout=(2, 4, 4), micro_batch="", global_batch=512, step_time_s=1)
    found = read_row(given | gpt, "file")
    assert (found.run.shape.heads, found.run.layout.micro_batch, found.run.layout.recompute) == (24, 8, "full")
    assert "recompute" not in found.assumed and "heads" not in found.assumed
    stated = read_row(given | gpt | {"heads": "16", "recompute": "none"}, "file").run
    assert (stated.shape.heads, stated.layout.recompute) == (16, "none"), "what is published counts"

    expert = row(precision="BF16", layers="", hidden="", micro_batch=4, dp=16, pp=4, step_time_s=1) | BRIDGE
    again = read_row(expert | {"model": "gpt_oss_120b"}, "file").run
    assert again.software.recomputes_norms and again.software.recomputes_activation and again.layout.micro_batch == 1

    for model, size in (("llama2-70b-SFT", 4), ("llama2-70b", 12)):
        published = row(framework="NeMo 24.07", step_time_s=1) | {"model": model}
        assert read_row(published, "file").run.software.optimizer_bytes == size


def test_every_configuration_says_what_it_changes_and_by_what_source() -> None:
    for entry in configurations():
        assert set(entry) <= {"where", "set", "instead", "source"} and entry["where"] and entry["source"]
        assert entry.get("set") or entry.get("instead")
