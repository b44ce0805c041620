"""A step of every technique on fake CUDA: no mixed devices, and no more synchronisations, copies and launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from shoal.spec.config import RunConfig, build_config


class Case(NamedTuple):
    """A technique's settings, and the most that one step may need (two micro-batches, two layers on one rank)."""

    settings: dict[str, dict[str, Any]]
    synchronisations: int
    copies: int
    launches: int


MODEL = {"name": "tiny", "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256}
EXPERTS = {"experts": {"count": 4, "per_token": 2, "ffn": 64}}
DEPTHS = {"depths": {"capacity": 0.5}}


def parallel(**settings: Any) -> dict:
    return {"parallel": settings}


def train(precision: str, **others: Any) -> dict:
    return {"train": {"precision": precision}, **others}


def optimizer(name: str, precision: str = "bf16") -> dict:
    return {"optimizer": {"name": name}, "train": {"precision": precision}}


CASES = {
    "plain": Case({}, 0, 0, 0),
    "documents": Case({"data": {"document_mask": True}}, 0, 0, 0),
    "zero-1": Case(parallel(dp=4, zero=1), 0, 0, 0),
    "zero-2": Case(parallel(dp=4, zero=2), 0, 0, 0),
    "zero-3": Case(parallel(dp=4, zero=3), 0, 0, 0),
    "hybrid": Case(parallel(dp=4, zero=3, zero_shard=2), 0, 0, 0),
    "offload-parameters": Case(parallel(dp=4, zero=3, offload="parameters"), 0, 0, 0),
    "offload-optimizer": Case(parallel(dp=4, zero=1, offload="optimizer"), 0, 0, 0),
    "recompute": Case(parallel(recompute="full"), 0, 0, 0),
    "recompute-selective": Case(parallel(recompute="selective"), 0, 0, 0),
    "tp": Case(parallel(tp=2), 0, 0, 0),
    "sp": Case(parallel(tp=2, sequence_parallel=True, tp_overlap=False), 0, 0, 0),
    "sp-overlap": Case(parallel(tp=2, sequence_parallel=True, tp_overlap=True), 0, 0, 0),
    "tp-overlap": Case(parallel(tp=2, tp_overlap=True), 0, 0, 0),
    "tp-2d": Case(parallel(tp=4, tp_x=2), 0, 0, 0),
    "cp": Case(parallel(cp=2), 0, 0, 0),
    "cp-striped": Case(parallel(cp=2, cp_order="striped"), 0, 0, 0),
    "cp-documents": Case(parallel(cp=2) | {"data": {"document_mask": True}}, 0, 0, 0),
    "ulysses": Case(parallel(cp=2, ulysses=2), 0, 0, 0),
    "ulysses-ring-documents": Case(parallel(cp=4, ulysses=2) | {"data": {"document_mask": True}}, 0, 0, 0),
    "gpipe": Case(parallel(pp=2, schedule="gpipe"), 0, 0, 0),
    "1f1b": Case(parallel(pp=2), 0, 0, 0),
    "interleaved": Case(parallel(pp=2, schedule="interleaved-1f1b", virtual_stages=2), 0, 0, 0),
    "zb-h1": Case(parallel(pp=2, schedule="zb-h1"), 0, 0, 0),
    "zb-v": Case(parallel(pp=2, schedule="zb-v"), 0, 0, 0),
    "dualpipe": Case(parallel(pp=2, schedule="dualpipev"), 0, 0, 0),
    "terapipe": Case(parallel(pp=2, schedule="terapipe"), 0, 0, 0),
    "pipedream": Case(parallel(pp=2, schedule="pipedream") | {"optimizer": {"clip_norm": 0}}, 0, 0, 0),
    "pipedream-2bw": Case(parallel(pp=2, schedule="pipedream-2bw"), 0, 0, 0),
    "experts": Case({"model": EXPERTS}, 0, 0, 0),
    "experts-ep": Case({"model": EXPERTS, "parallel": {"dp": 2, "ep": 2}}, 0, 0, 0),
    "experts-ep-tp": Case({"model": EXPERTS, "parallel": {"dp": 2, "tp": 2, "ep": 2}}, 0, 0, 0),
    "depths": Case({"model": DEPTHS}, 0, 0, 0),
    "depths-cp": Case({"model": DEPTHS, "parallel": {"cp": 2}}, 0, 0, 0),
    "fp32": Case(train("fp32"), 0, 0, 0),
    "bf16-sums": Case(train("bf16-sums"), 0, 0, 0),
    "bf16-moments": Case(train("bf16-moments"), 0, 0, 0),
    "bf16-weights": Case(train("bf16-weights"), 0, 0, 0),
    "bf16-all": Case(train("bf16-all"), 0, 0, 0),
    "fp16": Case(train("fp16"), 0, 0, 0),
    "fp8-tensor": Case(train("fp8"), 0, 0, 0),
    "fp8-delayed": Case(train("fp8", float8={"amax": "delayed"}), 0, 0, 0),
    "fp8-row": Case(train("fp8", float8={"scales": "row"}), 0, 0, 0),
    "fp8-block": Case(train("fp8", float8={"scales": "block"}), 0, 0, 0),
    "mxfp8": Case(train("mxfp8"), 0, 0, 0),
    "sgd": Case(optimizer("sgd"), 0, 0, 0),
    "momentum": Case(optimizer("momentum"), 0, 0, 0),
    "adagrad": Case(optimizer("adagrad"), 0, 0, 0),
    "adam": Case(optimizer("adam"), 0, 0, 0),
    "radam": Case(optimizer("radam"), 0, 0, 0),
    "sage": Case(optimizer("sage"), 0, 0, 0),
    "adam8bit": Case(optimizer("adam8bit"), 0, 0, 0),
    "adafactor": Case(optimizer("adafactor"), 0, 0, 0),
    "muon": Case(optimizer("muon"), 0, 0, 0),
    "sophia-g": Case(optimizer("sophia-g"), 0, 0, 0),
    "sophia-h": Case(optimizer("sophia-h", "fp32"), 0, 0, 0),
    "diloco": Case(parallel(dp=2, sync="diloco"), 0, 0, 0),
    "powersgd": Case(parallel(dp=2, sync="powersgd"), 0, 0, 0),
    "onebit": Case(parallel(dp=2, sync="onebit"), 0, 0, 0),
    "topk": Case(parallel(dp=2, sync="topk"), 0, 0, 0),
}


def build(settings: dict[str, dict[str, Any]]) -> RunConfig:
    """Complete a case: bf16, sequences of 64 tokens, two micro-batches."""
    layout = {"micro_batch": 1} | settings.get("parallel", {})
    layers = MODEL["layers"] * layout.get("pp", 1)
    return build_config({
        "model": MODEL | {"layers": layers} | settings.get("model", {}),
        "data": {"source": "synthetic", "sequence_length": 64} | settings.get("data", {}),
        "train": {"precision": "bf16", "global_batch": layout.get("dp", 1) * layout.get("pp", 1), "steps": 4} | settings.get("train", {}),
        "parallel": layout,
        "optimizer": settings.get("optimizer", {}),
        "float8": settings.get("float8", {}),
    })


def take_all(configs: dict[str, RunConfig]) -> dict[str, Any]:
    """Return the census of each run, or what went wrong, in a process with fake CUDA."""
    from shoal.testing.fake_cuda.census import take_census

    found: dict[str, Any] = {}
    for name, config in configs.items():
        try:
            found[name] = take_census(config, step=0)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def censuses(on_fake_cuda: Callable) -> dict[str, Any]:
    return on_fake_cuda(take_all, {name: build(case.settings) for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_a_step_needs_no_more_than_its_table_says(name: str, censuses: dict[str, Any]) -> None:
    census, case = censuses[name], CASES[name]
    assert not isinstance(census, str), census
    assert not census.mismatches
    needed = (census.synchronisations.total(), census.copies.total(), census.launches.total())
    allowed = (case.synchronisations, case.copies, case.launches)
    assert all(a <= b for a, b in zip(needed, allowed, strict=True)), "\n".join([f"{needed} {allowed}", *census.lines()])
