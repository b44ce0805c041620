"""A run with any update rule goes on in the middle: bit for bit on its layout, to rounding on another."""

import pytest

from shoal.optim.build import RULES
from shoal.optim.names import ESTIMATES

from .runs import checkpoints, copy_until, curve, same_bits, small_config, train_in

CURVATURE = {"hessian_every": 4, "hessian_scale": 50.0}
AMPLIFIED = {"adafactor": 1e4}  # divides by moments without a floor, and so gradients that are rounding alone


@pytest.mark.parametrize("rule", sorted(RULES))
def test_any_rule_goes_on_where_it_was(rule, corpus, pool, tmp_path):
    # Two updates after the checkpoint: Sophia's first uses its old estimate, its second makes a new one.
    config = small_config(
        corpus, {"dp": 2, "zero": 1, "micro_batch": 4}, train={"precision": "fp64", "steps": 5, "validate_every": 0},
        model={"layers": 2, "hidden": 32, "ffn": 140}, checkpoint={"every": 3},
        optimizer={"name": rule, "warmup_steps": 0, **(CURVATURE if rule in ESTIMATES else {})},
    )
    whole = train_in(pool, config, tmp_path / "whole")
    same = train_in(pool, config, copy_until(whole, tmp_path / "same", 3), resume=True)
    assert curve(same) == curve(whole)
    assert same_bits(checkpoints(same)[5], checkpoints(whole)[5])
    layout = type(config.parallel)(tp=2, micro_batch=8)
    other = train_in(
        pool, config.model_copy(update={"parallel": layout}), copy_until(whole, tmp_path / "other", 3), resume=True
    )
    assert curve(other)[:3] == curve(whole)[:3]
    for (_, loss, norm), (_, same_loss, same_norm) in zip(curve(other), curve(whole), strict=True):
        assert loss == pytest.approx(same_loss, rel=1e-9 * AMPLIFIED.get(rule, 1), abs=0)
        assert norm == pytest.approx(same_norm, rel=2e-8 * AMPLIFIED.get(rule, 1), abs=0)
