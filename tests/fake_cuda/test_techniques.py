"""A step of every technique on fake CUDA: no mixed devices, and no more synchronisations, copies and launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from shoal.spec.config import RunConfig, build_config


class Case(NamedTuple):
    """A technique's settings, and the most that the first step of a rank may need."""

    settings: dict[str, dict[str, Any]]
    synchronisations: int
    copies: int
    launches: int


MODEL = {"name": "tiny", "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256}
EXPERTS = {"experts": {"count": 4, "per_token": 2, "ffn": 64}}
KEPT = ["*.mlp.*"]
"""Layers that stay in 16 bits where encoding takes dozens of kernels: attention's matrices show the same counts."""
DEPTHS = {"depths": {"capacity": 0.5}}


def parallel(**settings: Any) -> dict:
    return {"parallel": settings}


def train(precision: str, **others: Any) -> dict:
    return {"train": {"precision": precision}, **others}


def optimizer(name: str) -> dict:
    return {"optimizer": {"name": name}}


CASES = {
    "plain": Case({}, 0, 5, 105),
    "documents": Case({"data": {"document_mask": True}}, 0, 6, 106),
    "zero-1": Case(parallel(dp=4, zero=1), 0, 5, 131),
    "zero-3": Case(parallel(dp=4, zero=3), 0, 5, 156),
    "hybrid": Case(parallel(dp=4, zero=3, zero_shard=2), 0, 5, 156),
    "offload-parameters": Case(parallel(dp=4, zero=3, offload="parameters"), 10, 15, 130),
    "offload-optimizer": Case(parallel(dp=4, zero=1, offload="optimizer"), 4, 6, 102),
    "recompute": Case(parallel(recompute="full"), 0, 5, 114),
    "recompute-selective": Case(parallel(recompute="selective"), 0, 5, 106),
    "tp": Case(parallel(tp=2), 0, 5, 125),
    "sp": Case(parallel(tp=2, sequence_parallel=True, tp_overlap=False), 0, 5, 125),
    "sp-overlap": Case(parallel(tp=2, sequence_parallel=True, tp_overlap=True), 0, 5, 145),
    "tp-overlap": Case(parallel(tp=2, tp_overlap=True), 0, 5, 130),
    "tp-2d": Case(parallel(tp=4, tp_x=2), 0, 5, 236),
    "cp": Case(parallel(cp=2), 0, 5, 131),
    "ulysses-ring-documents": Case(parallel(cp=4, ulysses=2) | {"data": {"document_mask": True}}, 0, 6, 151),
    "1f1b": Case(parallel(pp=2), 0, 8, 127),
    "zb-v": Case(parallel(pp=2, schedule="zb-v"), 0, 8, 249),
    "dualpipe": Case(parallel(pp=2, schedule="dualpipev"), 0, 8, 249),
    "terapipe": Case(parallel(pp=2, schedule="terapipe"), 0, 8, 127),
    "pipedream": Case(parallel(pp=2, schedule="pipedream") | {"optimizer": {"clip_norm": 0}}, 3, 6, 118),
    "pipedream-2bw": Case(parallel(pp=2, schedule="pipedream-2bw"), 0, 8, 127),
    "experts": Case({"model": EXPERTS}, 0, 6, 208),
    "experts-ep": Case({"model": EXPERTS, "parallel": {"dp": 2, "ep": 2}}, 1, 7, 241),
    "experts-ep-tp": Case({"model": EXPERTS, "parallel": {"dp": 2, "tp": 2, "ep": 2}}, 1, 7, 278),
    "depths": Case({"model": DEPTHS, "parallel": {}}, 1, 6, 212),
    "depths-cp": Case({"model": DEPTHS, "parallel": {"cp": 2}}, 5, 6, 300),
    "fp32": Case(train("fp32"), 0, 5, 108),
    "bf16-sums": Case(train("bf16-sums"), 0, 6, 101),
    "bf16-all": Case(train("bf16-all"), 0, 6, 100),
    "fp16": Case(train("fp16"), 1, 3, 79),
    "fp8-tensor": Case(train("fp8"), 0, 5, 125),
    "fp8-delayed": Case(train("fp8", float8={"amax": "delayed"}), 2, 3, 163),
    "fp8-row": Case(train("fp8", float8={"scales": "row"}), 0, 5, 131),
    "fp8-block": Case(train("fp8", float8={"scales": "block", "keep": KEPT}), 0, 5, 382),
    "mxfp8": Case(train("mxfp8", float8={"keep": KEPT}), 0, 5, 443),
    "nvfp4": Case(train("nvfp4", float8={"keep": KEPT}), 0, 5, 742),
    "sgd": Case(optimizer("sgd"), 0, 5, 101),
    "radam": Case(optimizer("radam"), 0, 5, 105),
    "sage": Case(optimizer("sage"), 1, 3, 110),
    "adam8bit": Case(optimizer("adam8bit"), 0, 5, 112),
    "adafactor": Case(optimizer("adafactor"), 1, 3, 467),
    "muon": Case(optimizer("muon"), 0, 5, 236),
    "sophia-g": Case(optimizer("sophia-g"), 3, 4, 213),
    "diloco": Case(parallel(dp=2, sync="diloco"), 2, 4, 79),
    "powersgd": Case(parallel(dp=2, sync="powersgd"), 3, 4, 169),
    "onebit": Case(parallel(dp=2, sync="onebit"), 13, 14, 221),
    "topk": Case(parallel(dp=2, sync="topk"), 3, 4, 201),
}


def build(settings: dict[str, dict[str, Any]]) -> RunConfig:
    """Complete a case: bf16, sequences of 64 tokens, as many micro-batches as stages; two layers where one is prepared
    or finished while the other computes, else one for each stage."""
    layout = {"micro_batch": 1} | settings.get("parallel", {})
    two = layout.get("schedule") in ("zb-v", "dualpipev") or "zero" in layout or "depths" in settings.get("model", {})
    layers = (2 if two else 1) * layout.get("pp", 1)
    batch = layout.get("dp", 1) * layout.get("pp", 1)
    return build_config({
        "model": MODEL | {"layers": layers} | settings.get("model", {}),
        "data": {"source": "synthetic", "sequence_length": 64} | settings.get("data", {}),
        "train": {"precision": "bf16", "global_batch": batch, "steps": 4} | settings.get("train", {}),
        "parallel": layout,
        "optimizer": settings.get("optimizer", {}),
        "float8": settings.get("float8", {}),
    })


def take_all(configs: dict[str, RunConfig]) -> dict[str, Any]:
    """Return the census of each run, or what went wrong, in a process with fake CUDA."""
    from tests.fake_cuda.census import take_census

    found: dict[str, Any] = {}
    for name, config in configs.items():
        try:
            found[name] = take_census(config, step=0)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


LAYER = {"plain": 26, "fp8-tensor": 80, "experts": 122}
"""The most launches of one layer, forward and backward."""


def with_two_layers(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"layers": 2})})


@pytest.fixture(scope="module")
def censuses(on_fake_cuda: Callable) -> dict[str, Any]:
    configs = {name: build(case.settings) for name, case in CASES.items()}
    deeper = {f"{name}, 2 layers": with_two_layers(configs[name]) for name in LAYER}
    return on_fake_cuda(take_all, configs | deeper)


@pytest.mark.parametrize("name", CASES)
def test_a_step_needs_no_more_than_its_table_says(name: str, censuses: dict[str, Any]) -> None:
    census, case = censuses[name], CASES[name]
    assert not isinstance(census, str), census
    assert not census.mismatches
    needed = (census.synchronisations.total(), census.copies.total(), census.launches.total())
    allowed = (case.synchronisations, case.copies, case.launches)
    fewer = all(a <= b for a, b in zip(needed, allowed, strict=True))
    assert fewer, "\n".join([f"needed {needed}, allowed {allowed}", *census.lines()])


@pytest.mark.parametrize("name", LAYER)
def test_a_layer_launches_no_more_kernels(name: str, censuses: dict[str, Any]) -> None:
    one, two = censuses[name], censuses[f"{name}, 2 layers"]
    assert two.launches.total() - one.launches.total() <= LAYER[name]
