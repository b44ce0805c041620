"""Small models to train beside each other on the default corpus, on one device."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Dataset, open_dataset
from shoal.engine.data.prepare import prepare
from shoal.spec.config import RunConfig
from shoal.training.check import check
from shoal.training.step.engine import Engine


def engine_and_validation(config: RunConfig) -> tuple[Engine, Dataset]:
    """What trains a run of one rank, and the samples that it is not trained on."""
    shape = check(config)
    prepare(config.data)
    train, validation = (open_dataset(config.data, seed=config.train.seed, split=s) for s in ("train", "validation"))
    return Engine(config, shape, Mesh(config.parallel, 0), train), validation


def trained(engine: Engine, validation: Dataset, steps: int, every: int) -> Iterator[tuple[int, float | None]]:
    """Train: after each step how many are done, and the validation loss if it is one of every so many, or the last."""
    for done in range(1, steps + 1):
        engine.step(done - 1)
        yield done, engine.evaluate(validation) if done % every == 0 or done == steps else None
