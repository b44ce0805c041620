"""A run with any update rule goes on in the middle: bit for bit on its layout, to rounding on another."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shoal.base.section import plain
from shoal.engine.optim.build import RULES
from shoal.spec.optimizers import ELEMENTWISE, ESTIMATES
from shoal.training.run_folder import new_run
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite, StepResult
from tests.trainings.runs import checkpoints, copy_until, curve, same_bits, small_config, train_here, train_in

CURVATURE = {"hessian_every": 4, "hessian_scale": 50.0}
AMPLIFIED = {"adafactor": 1e4}  # divides by moments without a floor, and so gradients that are rounding alone


@pytest.mark.parametrize("rule", sorted(RULES))
def test_any_rule_goes_on_where_it_was(rule, corpus, pool, tmp_path):
    # Two updates after the checkpoint: Sophia's first uses its old estimate, its second makes a new one.
    config = small_config(
        corpus, {"dp": 2, "zero": 1, "micro_batch": 4}, train={"precision": "fp64", "steps": 5, "validate_every": 0},
        model={"layers": 1, "hidden": 32, "ffn": 140}, checkpoint={"every": 3},
        optimizer={"name": rule, "warmup_steps": 0, **(CURVATURE if rule in ESTIMATES else {})},
    )
    whole = train_in(pool, config, tmp_path / "whole")
    same = train_in(pool, config, copy_until(whole, tmp_path / "same", 3), resume=True)
    assert curve(same) == curve(whole)
    assert same_bits(checkpoints(same)[5], checkpoints(whole)[5])
    if rule in ELEMENTWISE and rule != "adamw":  # their states are cut as weights are, by the same code
        return
    layout = type(config.parallel)(tp=2, micro_batch=8)
    other = train_in(
        pool, config.model_copy(update={"parallel": layout}), copy_until(whole, tmp_path / "other", 3), resume=True
    )
    assert curve(other)[:3] == curve(whole)[:3]
    for (_, loss, norm), (_, same_loss, same_norm) in zip(curve(other), curve(whole), strict=True):
        assert loss == pytest.approx(same_loss, rel=1e-9 * AMPLIFIED.get(rule, 1), abs=0)
        assert norm == pytest.approx(same_norm, rel=2e-8 * AMPLIFIED.get(rule, 1), abs=0)


def not_finite_once(values: dict[str, Any], folder: Path, step: int) -> None:
    """A run that ends since a step's gradients seem not to be finite, after its estimate was taken."""
    update = Engine.update

    def spoilt(engine: Engine, number: int, *arguments: Any) -> StepResult:
        if number == step:
            raise NonFinite(f"step {step}")
        return update(engine, number, *arguments)

    with mock.patch.object(Engine, "update", spoilt), pytest.raises(NonFinite):
        train_here(values, folder, resume=False)


@pytest.mark.parametrize("rule", sorted(ESTIMATES))
def test_a_run_that_ends_after_an_estimate_does_not_take_it_again(rule, corpus, pool, tmp_path):
    config = small_config(
        corpus, {"dp": 2, "zero": 1, "micro_batch": 4}, train={"precision": "fp64", "steps": 6, "validate_every": 0},
        optimizer={"name": rule, "warmup_steps": 0, **CURVATURE}, checkpoint={"every": 3}, model={"layers": 1},
    )
    whole = train_in(pool, config, tmp_path / "whole")
    ended = tmp_path / "ended"
    new_run(config, ended)
    pool.run(not_finite_once, 2, plain(config), ended, 4)
    assert max(checkpoints(ended)) == 4
    train_in(pool, config, ended, resume=True)
    assert curve(ended) == curve(whole)
    assert same_bits(checkpoints(ended)[6], checkpoints(whole)[6])
