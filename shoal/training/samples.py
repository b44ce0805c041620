"""The samples of a run: of its corpus, or of a model of one's own."""

from __future__ import annotations

from typing import cast

from shoal.engine.data.batches import CompleteDataset, Dataset, open_complete, open_dataset
from shoal.engine.data.prepare import prepare
from shoal.engine.data.token_stream import Split
from shoal.engine.own.chain import find_chain
from shoal.engine.own.definition import load_own_model
from shoal.engine.own.samples import OwnDataset
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.own.trial import try_out
from shoal.engine.precision.policy import POLICIES
from shoal.pipeline.from_layout import build_layout_program
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
    """Try out the samples, the loss and the stages of a model of one's own before ranks start; see `try_out`."""
    if config.model.module:
        own, layout, train = load_own_model(config.model.module), config.parallel, config.train
        try_out(own, train.seed, layout.micro_batch, SplitRanks.alone(layout))
        if layout.pp > 1:
            batch = OwnDataset(own, "train", train.seed).batch(range(layout.micro_batch))
            program = build_layout_program(layout, layout.microbatches(train.global_batch))
            chain = find_chain(own, POLICIES[train.precision], train.seed, batch)
            chain.find_shared(chain.assign(program, sequence_parallel=layout.sequence_parallel))


def prepare_samples(config: RunConfig) -> None:
    """Tokenise the corpus of a run and its texts for validation, if it has any; see `prepare`."""
    if not config.model.module:
        prepare(config.data)
        open_validation(config, progress=True)
