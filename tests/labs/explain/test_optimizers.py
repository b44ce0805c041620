"""`shoal explain optimizers`: ways that the rules really take, and bytes that are kept."""

import xml.etree.ElementTree as ET

import pytest
import torch

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.models.transformer import Transformer
from shoal.engine.optim.build import RULES, build
from shoal.engine.optim.shards import Shards
from shoal.labs.explain.optimizers import GROUPS, SURFACES, bytes_per_parameter, walk
from shoal.spec.catalog import model_shape
from shoal.spec.config import OptimizerConfig
from shoal.spec.optimizers import ELEMENTWISE

VALLEY, SADDLE = SURFACES


def test_plain_descent_takes_the_way_of_its_closed_form():
    way = walk(VALLEY, OptimizerConfig(name="sgd", learning_rate=0.03), 12)
    for n, (x, y) in enumerate(way.points):
        assert x == pytest.approx(-2 * (1 - 0.03) ** n)
        assert y == pytest.approx(0.7 * (1 - 0.03 * 20) ** n)
    assert way.losses[3] == pytest.approx((way.points[3][0] ** 2 + 20 * way.points[3][1] ** 2) / 2)


def test_momentum_leaves_the_saddle_first():
    ends = {
        name: walk(SADDLE, OptimizerConfig(name=name, learning_rate=0.02, momentum=0.9), 60).losses[-1]
        for name in ("sgd", "momentum")
    }
    assert ends["momentum"] < -0.2 < -0.01 < ends["sgd"]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_hessians_are_the_losses_own(surface):
    at = torch.tensor([0.3, -0.7], dtype=torch.float64)
    exact = torch.autograd.functional.hessian(surface.loss, at).diagonal()
    torch.testing.assert_close(surface.hessian(at), exact)


def test_the_bytes_are_those_that_the_rules_keep():
    shape = model_shape("tiny")
    said = bytes_per_parameter("tiny", "fp32")
    model = Transformer(shape)
    for name in ("adafactor", "adam8bit", "muon", "sophia-g"):
        named = [(n, p.detach(), torch.zeros_like(p)) for n, p in model.named_parameters()]
        kept = build(OptimizerConfig(name=name), Shards.from_parameters(named, lambda name, tensor: 0.0)).bytes()
        assert said[name] == pytest.approx(kept / sum(p.numel() for p in model.parameters()))


def test_rules_that_are_not_trained_so_are_left_out():
    assert set(bytes_per_parameter("tiny", "bf16-all")) == set(ELEMENTWISE)
    assert set(RULES) - set(bytes_per_parameter("tiny", "bf16")) == {"sophia-h"}
    assert set(RULES) - set(bytes_per_parameter("olmoe-1b-7b", "fp32")) == {"sophia-g", "sophia-h"}
    with pytest.raises(UsageError, match="fp8' with a model of experts"):
        bytes_per_parameter("olmoe-1b-7b", "fp8")


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    file = tmp_path / "optimizers.svg"
    assert main(["explain", "optimizers", "--steps", "5", "--out", str(file)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RULES) and "2.031" in out
    texts = [element.text for element in ET.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    for _, names in GROUPS:
        assert all(any(text.startswith(f"{name}, learning rate") for text in texts) for name in names)
    assert set(RULES) <= set(texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "bf17"], "did you mean 'bf16'?"),
        (["--model", "llama-3-9b"], "llama-3-8b"),
        (["--out", "x.pdf"], "ending in .svg"),
    ],
)
def test_refusals(options, message, capsys):
    assert main(["explain", "optimizers", *options]) == 2
    assert message in capsys.readouterr().err
