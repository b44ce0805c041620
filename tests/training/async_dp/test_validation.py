"""Replicas of asynchronous training compute the validation loss of one process."""

import pytest

from shoal.engine.data.batches import SyntheticDataset
from shoal.spec.config import RunConfig
from tests.training.async_dp.test_methods import SGD, config_of, engine_of


def validated(config: RunConfig) -> tuple[float, list[list[int]]]:
    """A validation loss, and the samples of each of this rank's passes."""
    engine, samples, passes = engine_of(config, 0.0), SyntheticDataset(64, 16, 1, 0.5), []
    read = samples.batch
    samples.batch = lambda indices: passes.append(list(indices)) or read(indices)
    return engine.evaluate(samples), passes


def test_replicas_share_out_the_passes(pool):
    """Three passes of two samples, of which one replica computes two."""
    few = {"train": {"validation_sequences": 5}}
    layout = {"micro_batch": 2, "dp": 2}
    (loss, first), (same, second) = pool.run(validated, 2, config_of("ps-ssp", SGD, {}, few, **layout))
    assert (first, second) == ([[0, 1], [4, 5]], [[2, 3]])
    ((right, _),) = pool.run(validated, 1, config_of("all-reduce", SGD, {}, few, micro_batch=2))
    assert loss == same == pytest.approx(right, rel=1e-12)
