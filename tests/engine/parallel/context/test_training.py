"""Training with a part of every sequence on each rank: losses, norms and validation are those of one device."""

import pytest

from shoal.engine.runtime import take_tokens
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run


def trained(config: RunConfig) -> tuple[list[float], int]:
    """Loss and gradient norm of two steps, then the validation loss; and the targets that count on this rank."""
    engine = engine_of(config)
    found = []
    for step in range(2):
        result = engine.step(step)
        found += [result.loss, result.gradient_norm]
    mine = sum(take_tokens(batch, engine.runtime.tokens).unmasked() for batch in engine.make_batches(1))
    return [*found, engine.evaluate(engine.samples)], mine


@pytest.mark.parametrize(
    "parallel",
    [
        {"cp": 3},
        {"cp": 4, "ulysses": 2, "cp_order": "striped"},
        {"cp": 2, "dp": 2, "zero": 3},
        {"cp": 2, "pp": 2, "schedule": "terapipe", "sequence_slices": 3},
    ],
    ids=["ring", "both", "sharded", "slices"],
)
def test_what_ranks_report_is_one_device_whatever_counts_on_each(pool: Pool, parallel: dict) -> None:
    """Slices are for training alone: validation takes the same tokens of a rank at once."""
    documents = {"sequence_length": 21, "document_mask": True}

    def run(parallel: dict) -> RunConfig:
        config = small_run(parallel, {"layers": 2}, global_batch=8, precision="fp64", validation_sequences=8)
        return config.model_copy(update={"data": config.data.model_copy(update=documents)})

    ((expected, tokens),) = pool.run(trained, 1, run({}))
    config = run(parallel)
    every = pool.run(trained, config.parallel.world_size, config)
    for found, _ in every:
        assert found == pytest.approx(expected, rel=1e-9)
    counts = [mine for _, mine in every]
    assert sum(counts) == tokens * config.parallel.pp
    assert len(set(counts)) > 1, "the ranks differ in the targets that count"
