"""`shoal bench optimizers`: all variants of a rule compute the same."""

import pytest
import torch

from shoal.cli.main import main
from shoal.engine.optim.build import RULES
from shoal.labs.bench.optimizers import FUSED, baseline_names, build_baseline, build_flat, choose_shapes, compare
from shoal.spec.config import OptimizerConfig

SHAPES = {"layers.0.mlp.up.weight": (32, 512), "layers.0.mlp_norm.weight": (48,), "layers.0.mlp.gate.weight": (64, 256)}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_all_variants_make_the_same_updates(rule):
    config = OptimizerConfig(name=rule, hessian_every=10**9)
    ours = build_flat(config, SHAPES)
    others = {way: build_baseline(config, SHAPES, way) for way in baseline_names(rule)}
    assert set(others) == ({"fused", "foreach"} if rule in FUSED else {"plain loop"})
    start = ours().clone()
    for other in others.values():
        other()
    for _ in range(7):
        weights = ours()
        tensors = [other() for other in others.values()]
    moved = (weights - start).norm()
    for theirs in tensors:
        # 8-bit codes: what lies at a border between two may fall to either side
        allowed = 2e-2 if rule == "adam8bit" else 2e-3
        assert (weights - torch.cat([t.flatten() for t in theirs])).norm() < allowed * moved


def test_shapes_have_at_least_the_parameters_asked_for():
    for parameters in (1_000_000, 10_000_000, 100_000_000):
        count = sum(torch.Size(shape).numel() for shape in choose_shapes(parameters).values())
        assert parameters <= count < 1.4 * parameters + 3_200_000


def test_a_ratio_is_of_the_medians_and_the_fastest_make_baseline():
    baselines = {"fused": [5.0, 4.0, 9.0], "foreach": [6.0, 6.0, 6.0]}
    ours, compiled = (
        compare("adam", 1, name, seconds, baselines)
        for name, seconds in (("eager", [1.0, 3.0, 2.0]), ("compiled", [8.0] * 3))
    )
    assert (ours["baseline"], ours["target"], ours["ratio"], ours["met"]) == ("fused", 1.0, 2.5, True)
    assert (compiled["ratio"], compiled["met"]) == (0.625, False)


def test_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["bench", "optimizers", "--rules", "sgd,radam", "--parameters", "100000", "--turns", "2"]) in (0, 1)
    out = capsys.readouterr().out
    assert "radam" in out and "plain loop" in out
    assert main(["bench", "optimizers", "--rules", "adm"]) == 2
    assert "did you mean 'adam'" in capsys.readouterr().err
