"""The table of number formats: its facts are torch's, and everybody reads it."""

import re
from typing import get_args

import pytest
import torch

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.precision.policy import POLICIES
from shoal.labs.explain.precision import RECIPES, per_parameter
from shoal.pipeline.from_layout import check_run
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart
from shoal.spec.catalog import model_shape
from shoal.spec.config import build_config
from shoal.spec.config.sections import Precision
from shoal.spec.layout import Layout
from shoal.spec.number_formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64


@pytest.mark.parametrize("kind", [FP64, FP32, FP16, BF16, E4M3, E5M2], ids=lambda kind: kind.name)
def test_the_facts_of_a_format_are_torchs(kind):
    info = torch.finfo(getattr(torch, kind.name))
    assert (kind.itemsize * 8, kind.largest) == (info.bits, info.max)
    assert (2.0**kind.smallest, 2.0**-kind.digits) == (info.smallest_normal, info.eps)
    tiniest = torch.tensor(2.0**kind.tiniest, dtype=torch.float64).to(getattr(torch, kind.name))
    assert tiniest.double() == 2.0**kind.tiniest
    if kind.itemsize <= 2:  # half of it is a tie, which goes to the even 0
        assert torch.tensor(2.0 ** (kind.tiniest - 1)).to(tiniest.dtype).double() == 0


def test_the_config_takes_what_the_table_has():
    assert set(get_args(Precision)) == set(FORMATS) == set(POLICIES)


def test_bytes_of_a_parameter():
    """Rajbhandari et al. 2020: 16; with gradients in float32 besides 20; all in bfloat16 8; weights and moments 10. As
    the cost model counts them, but for what it says of no run: a second gradient, or none."""
    assert [recipe.total for recipe in RECIPES.values()] == [16, 20, 8, 10]
    shape = model_shape("llama-3-8b")
    for name, besides in (("bf16-sums", 0), ("bf16", BF16.itemsize), ("bf16-all", 0), ("bf16-weights", -FP32.itemsize)):
        said = state_bytes(shape, Layout(), FORMATS[name], "adamw", [StagePart(range(shape.layers))])
        total = (said.parameters + said.gradients + said.optimizer) / shape.parameters() + besides
        assert any(recipe.total == pytest.approx(total, rel=1e-4) for recipe in RECIPES.values()), name
    of = {name: per_parameter(formats).total for name, formats in FORMATS.items()}
    assert (of["fp32"], of["bf16"], of["bf16-sums"], of["bf16-weights"], of["bf16-all"]) == (16, 18, 16, 14, 8)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_cost_model_counts_the_same_bytes(name):
    shape = model_shape("llama-3-8b")
    said = state_bytes(shape, Layout(), FORMATS[name], "adamw", [StagePart(range(shape.layers))])
    row = per_parameter(FORMATS[name])
    n = shape.parameters()
    assert said.parameters == pytest.approx(n * (row.weights + row.master), rel=1e-4)
    assert said.gradients == pytest.approx(n * row.gradients, rel=1e-4)
    assert said.optimizer == n * row.moments


def test_explain_precision_prints_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "precision"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"bf16-sums +2 +2 +4 +8 +16 +16 +112 +1,120 +6,480", out)
    assert re.search(r"bf16-all +2 +2 +4 +8 +8 +56 +560 +3,240", out)
    assert re.search(r"fp16 +fp32 +fp16 +fp32 +fp32 +float32 master weights, dynamic", out)
    assert "…" not in out


@pytest.mark.parametrize(("precision", "sections", "said"), [
    ("fp16", {"parallel": {"pp": 2, "schedule": "pipedream"}}, "its stages update independently"),
    ("fp16", {"parallel": {"dp": 2, "sync": "local-sgd"}}, "its own loss scale"),
    ("bf16-all", {"parallel": {"dp": 2, "sync": "powersgd"}}, "round to 8 bits"),
    ("bf16-weights", {"optimizer": {"name": "muon"}}, "Use one of .*adamw"),
    ("bf16-moments", {"optimizer": {"name": "adafactor"}}, "needs complete tensors"),
])
def test_what_does_not_go_together_is_refused(precision, sections, said):
    config = build_config({"train": {"precision": precision}, **sections})
    with pytest.raises(UsageError, match=said):
        check_run(config, model_shape("tiny"))
