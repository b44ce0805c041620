"""The samples of a run: of its corpus, or of a model of one's own."""

from __future__ import annotations

from typing import cast

from shoal.engine.data.batches import CompleteDataset, Dataset, open_complete, open_dataset
from shoal.engine.data.prepare import prepare
from shoal.engine.data.token_stream import Split
from shoal.engine.own.definition import load_own_model
from shoal.engine.own.samples import OwnDataset
from shoal.engine.own.trial import try_out
from shoal.spec.config import RunConfig


def open_samples(config: RunConfig, split: Split) -> Dataset:
    """Open one split; see `open_dataset`."""
    if config.model.module:
        return cast(Dataset, OwnDataset(load_own_model(config.model.module), split, config.train.seed))
    return open_dataset(config.data, seed=config.train.seed, split=split)


def open_validation(config: RunConfig, *, progress: bool = False) -> dict[str, CompleteDataset]:
    """Open the named texts for validation, by name."""
    named = config.data.validation
    return {name: open_complete(config.data.select_files((path,)), progress=progress) for name, path in named.items()}


def try_samples(config: RunConfig) -> None:
    """Try out the samples and the loss of a model of one's own before ranks start; see `try_out`."""
    if config.model.module:
        try_out(load_own_model(config.model.module), config.train.seed, config.parallel.micro_batch,
                config.parallel.tp)


def prepare_samples(config: RunConfig) -> None:
    """Tokenise the corpus of a run and its texts for validation, if it has any; see `prepare`."""
    if not config.model.module:
        prepare(config.data)
        open_validation(config, progress=True)
