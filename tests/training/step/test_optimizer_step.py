"""Several updates in one step: what they reduce to, what they keep, how they resume, and what a NaN leaves behind."""

import math

import pytest
import torch
import torch.distributed as dist

from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.spec.config import build_config
from shoal.training.check import check
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite
from tests.training.step.test_engine import Uneven, engine_of, numbers_config, state_of, whole
from tests.trainings.runs import checkpoints, copy_until, curve, same_bits, small_config, train_in


def async_config(parallel, microbatches, layers=4, **optimizer):
    batch = microbatches * parallel.get("micro_batch", 1) * parallel.get("dp", 1)
    return numbers_config({"micro_batch": 1, **parallel}, {"global_batch": batch}, optimizer, layers=layers)


# ---- what they reduce to -------------------------------------------------------------------------------------------


def weights_after(values, steps: int) -> tuple[list, list]:
    engine, _ = engine_of(values)
    return [engine.step(step) for step in range(steps)], state_of(engine)


def assert_same(pool, one, two, steps=(2, 2)):
    ranks = [
        pool.run(weights_after, config.parallel.world_size, plain(config), count)
        for config, count in zip((one, two), steps, strict=True)
    ]
    ours, theirs = (whole(state for _, state in found) for found in ranks)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12)
    return ranks[0][0][0], ranks[1][0][0]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_one_update_a_step_is_the_synchronous_step(pool, schedule):
    for pp, microbatches in ((1, 1), (2, 1 if schedule == "pipedream" else 3)):
        one = async_config({"pp": pp, "schedule": schedule}, microbatches, clip_norm=0.1)
        ours, theirs = assert_same(pool, one, async_config({"pp": pp}, microbatches, clip_norm=0.1))
        assert ours == theirs


def test_pipedream_on_one_stage_is_a_step_for_every_micro_batch(pool):
    ours, theirs = assert_same(
        pool, async_config({"schedule": "pipedream"}, 4), async_config({}, 1), steps=(2, 8)
    )
    assert ours[1].gradient_norm == pytest.approx(sum(step.gradient_norm for step in theirs[4:]) / 4)


def test_stale_weights_make_a_difference(pool):
    """Else the comparison with the emulation would show nothing."""
    states = [
        whole(state for _, state in pool.run(weights_after, pp, plain(async_config(
            {"pp": pp, "schedule": "pipedream"}, 4)), 1))
        for pp in (1, 2)
    ]
    assert max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0]) > 1e-4


# ---- what is kept --------------------------------------------------------------------------------------------------


def versions_in_bytes(values) -> tuple[float, float]:
    """Memory of all versions of this rank's weights, in stages; and what autograd left alive of older ones."""
    engine, _ = engine_of(values)
    for step in range(2):
        engine.step(step)
    (kept,) = engine.runtime.versions.values()
    one = sum(bucket.resident.untyped_storage().nbytes() for bucket in engine.parameters.buckets)
    return 1 + kept.bytes() / one, len(kept.copies)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    ("schedule", "expected"), [("pipedream", [4, 3, 2, 1]), ("pipedream-2bw", [2, 2, 2, 2])]
)
def test_the_memory_of_stashed_weights_is_the_papers(pool, schedule, expected, zero):
    config = async_config({"pp": 4, "schedule": schedule, "zero": zero}, 12)
    assert pool.run(versions_in_bytes, 4, plain(config)) == [(versions, 0) for versions in expected]


# ---- resumed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_resumed_run_is_bit_identical(pool, corpus, tmp_path, schedule):
    parallel = {"pp": 2, "schedule": schedule, "micro_batch": 1}

    config = small_config(
        corpus, parallel, train={"steps": 4, "validate_every": 0, "global_batch": 4}, optimizer={"clip_norm": 0.0},
        checkpoint={"every": 2},
    )
    through = train_in(pool, config, tmp_path / "through")
    resumed = train_in(pool, config, copy_until(through, tmp_path / "resumed", 2), resume=True)
    assert curve(through) == curve(resumed)
    assert same_bits(checkpoints(through)[4], checkpoints(resumed)[4])


# ---- not finite ----------------------------------------------------------------------------------------------------


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, math.nan)


def spoilt_step(values) -> tuple[str, bool, list]:
    """A NaN in stage 0's backward of micro-batch 2: the error, whether the weights are those of a step cut short."""
    config = build_config(values)
    engine = Engine(config, check(config), Mesh(config.parallel, dist.get_rank()), Uneven(config))
    calls = []
    if dist.get_rank() == 0:
        inner = engine.stages[0].module.layers["0"].mlp
        forward = inner.forward

        def spoil(x):
            calls.append(x)
            return _Spoil.apply(forward(x)) if len(calls) == 3 else forward(x)

        inner.forward = spoil
    with pytest.raises(NonFinite) as caught:
        engine.step(0)
    return str(caught.value), caught.value.untouched, state_of(engine)


def test_a_stage_with_a_nan_makes_no_further_update_and_is_named(pool):
    config = async_config({"pp": 2, "schedule": "pipedream"}, 4)
    found = pool.run(spoilt_step, 2, plain(config))
    for message, untouched, state in found:
        assert "the gradient of update 3 of 4 is not finite on rank 0 (pp 0)" in message
        assert not untouched
        assert all(torch.isfinite(values).all() for *_, values in state)
