"""Steps that the host does not wait for: the same numbers, and a failure found one step late leaves the same state.

The decisions on the device run on the CPU; their kernels on fake CUDA (`tests/fake_cuda`).
"""

import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from shoal.base.section import plain
from shoal.engine.data.prepare import prepare
from shoal.training.nonfinite_locator import locate_nonfinite
from shoal.training.run_folder import new_run
from shoal.training.step.optimizer_step import NonFinite
from tests.training.step.test_engine import engine_of, numbers_config, state_of
from tests.training.test_nonfinite_locator import poison
from tests.trainings.runs import checkpoints, curve, small_config, stored, train_here, train_in

LAYOUTS = {
    "one device": {"micro_batch": 2},
    "dp 2 x tp 2, ZeRO-1": {"dp": 2, "zero": 1, "tp": 2, "micro_batch": 2},
    "pp 2 x dp 2, ZeRO-2": {"pp": 2, "dp": 2, "zero": 2, "micro_batch": 2},
}


def steps_of(values, early: bool) -> tuple[list, list]:
    engine, _ = engine_of(values)
    engine.starts_early = early
    return [engine.step(step, stop=step == 2) for step in range(3)], state_of(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_started_step_is_the_step(layout, pool):
    config = numbers_config(LAYOUTS[layout], optimizer={"clip_norm": 0.1})
    assert config.optimizer.clip_norm < 1
    early, usual = (pool.run(steps_of, config.parallel.world_size, plain(config), early) for early in (True, False))
    for (ours, our_state), (theirs, their_state) in zip(early, usual, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            assert (one.tokens, one.stop, one.learning_rate) == (two.tokens, two.stop, two.learning_rate)
            assert one.loss == pytest.approx(two.loss, rel=1e-12)
            assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-12)
        assert [step.stop for step in ours] == [False, False, True]
        for one, two in zip(our_state, their_state, strict=True):
            torch.testing.assert_close(one[3], two[3], rtol=1e-11, atol=1e-13)


def failed_steps(values) -> tuple[list[str], bool, bool, str]:
    """A good step, then two started ones with a NaN: what their results raise, whether the state stayed, until when."""
    engine, _ = engine_of(values)
    engine.starts_early = True
    engine.step(0)
    before = state_of(engine)
    mlp = engine.stages[0].module.layers["0"].mlp
    with patch.object(mlp, "forward", lambda x, inner=mlp.forward: inner(x) * math.nan):
        started = [engine.start(1), engine.start(2)]
        errors = []
        for step in started:
            with pytest.raises(NonFinite) as caught:
                step.read()
            errors.append(str(caught.value))
        message = locate_nonfinite(engine, 1, caught.value)
    with pytest.raises(NonFinite):  # finite itself, but the flag stays
        engine.step(3)
    same = all(torch.equal(one[3], two[3]) for one, two in zip(before, state_of(engine), strict=True))
    engine.restored(1)
    engine.step(1)
    moved = any(not torch.equal(one[3], two[3]) for one, two in zip(before, state_of(engine), strict=True))
    return errors, same, moved, message


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_no_update_follows_a_step_that_is_not_finite(name, pool):
    parallel = {} if name == "muon" else {"dp": 2, "zero": 1}
    config = numbers_config({"micro_batch": 2, **parallel}, optimizer={"name": name, "clip_norm": 1.0})
    for errors, same, moved, message in pool.run(failed_steps, config.parallel.world_size, plain(config)):
        assert [error.split(":")[0] for error in errors] == ["step 1", "step 2"]
        assert same and moved
        assert "First on" in message and "The weights are unchanged and saved" in message


def train_early(values, folder: Path, bad_step: int | None) -> str:
    """Train with results read late; optionally with a NaN from a step on. Returns the error."""

    def early(engine) -> bool:
        make = engine.get_batches

        def batches(step):
            if step == bad_step:
                poison(engine, "forward", "layers.0.mlp.down")
            return make(step)

        engine.get_batches = batches
        return True

    with patch("shoal.training.step.engine.starts_early", early):
        try:
            train_here(values, folder, False)
        except NonFinite as error:
            return str(error)
    return ""


def test_a_run_logs_and_saves_the_same(corpus, tmp_path, pool):
    config = small_config(
        corpus, {"dp": 2, "micro_batch": 2}, train={"steps": 14, "validate_every": 6}, metrics={"log_every": 3}
    )
    usual = train_in(pool, config, tmp_path / "usual")
    for name, bad_step in (("early", None), ("bad", 9)):
        prepare(config.data)
        new_run(config, tmp_path / name)
        errors = pool.run(train_early, 2, plain(config), tmp_path / name, bad_step)
        expected, found = curve(usual), curve(tmp_path / name)
        steps = 14 if bad_step is None else bad_step
        assert [step for step, _, _ in found] == [step for step, _, _ in expected if step <= steps]
        for one, two in zip(found, expected, strict=False):
            assert one == pytest.approx(two, rel=1e-4)
        assert max(checkpoints(tmp_path / name)) == steps
        assert all(torch.isfinite(values).all() for values in stored(checkpoints(tmp_path / name)[steps]).values())
        if bad_step is not None:  # step 9 was started and step 10 too before it was found
            assert all(error.startswith("step 9: loss nan") for error in errors)
