"""Prepare data: tokenise a corpus, train a tokenizer, and describe the data of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.base.files import expanded
from shoal.engine.data.corpus import check_read, open_corpus
from shoal.engine.data.readers import Skipped
from shoal.engine.data.shards import SPLITS, CacheManifest, Split, assign_split, open_shards
from shoal.engine.data.tokenizer import FileTokenizer, load_tokenizer, train_bpe
from shoal.spec.config import DataConfig


def prepare(config: DataConfig, *, progress: bool = True) -> None:
    """Tokenise the corpus of ``config`` if it is not in the cache, and check every shard.

    Called by the process that starts the ranks: it shows the progress once, and finds bad input before any rank
    exists.

    Raises:
        UsageError: naming the invalid input.
    """
    from shoal.engine.data.batches import open_dataset  # imports torch

    for split in SPLITS:
        open_dataset(config, seed=0, split=split, progress=progress)


def train_tokenizer(
    data: DataConfig, *, vocab_size: int = 8192, out: str | Path = "tokenizer.json"
) -> FileTokenizer:
    """Train a byte-level BPE tokenizer on the training documents of a corpus, and save it.

    Args:
        data: selects the corpus, as in `RunConfig.data`.
        vocab_size: vocabulary size, including the 256 bytes and the special tokens.
        out: the file to write, which must not exist; set ``data.tokenizer`` of a run to its path.

    Raises:
        UsageError: the corpus cannot be read, ``out`` exists, or ``vocab_size`` is too small.

    >>> import shoal
    >>> from pathlib import Path
    >>> size = Path("corpus.txt").write_text("one fish, two fish, red fish, blue fish " * 50)
    >>> config = shoal.RunConfig.model_validate({"data": {"source": "text", "paths": ["corpus.txt"]}})
    >>> shoal.train_tokenizer(config.data, vocab_size=300, out="fish.json").vocab_size <= 300
    True
    """
    check_read(data)
    documents = (
        text
        for text in open_corpus(data).documents(Skipped(stop=data.unreadable == "stop"))
        if assign_split(text.encode(), data.validation_fraction) == "train"
    )
    return train_bpe(documents, vocab_size, expanded(Path(out), "--out"))


@dataclass(frozen=True)
class DataContents:
    """Summary of the data of a run.

    Attributes:
        corpus, folder: content of the cache folder of token ids, and its path; None for synthetic data, drawn on use.
        samples: sequences in each split of the corpus.
        sample_tokens: tokens of the first training sample of seed 0.
        sample_targets: number of these tokens that count in the loss.
        sample: text of this sample.
    """

    tokenizer: str
    corpus: CacheManifest | None
    folder: Path | None
    samples: dict[Split, int]
    sample_tokens: int
    sample_targets: int
    sample: str


def describe_data(data: DataConfig) -> DataContents:
    """Describe a corpus and its first training sample; tokenise it first if it is not in the cache.

    Raises:
        UsageError: naming the invalid input.

    >>> import shoal
    >>> config = shoal.RunConfig.model_validate({"data": {"source": "synthetic", "sequence_length": 16}})
    >>> shoal.describe_data(config.data).sample_tokens
    16
    """
    from shoal.engine.data.batches import open_dataset

    check_read(data)
    tokenizer = load_tokenizer(data.tokenizer)
    corpus, folder, samples = None, None, {}
    if data.reads != "synthetic":
        folder = open_shards(data, tokenizer, progress=True)
        corpus = CacheManifest.read(folder)
        samples = {split: max(0, corpus.splits[split].tokens - 1) // data.sequence_length for split in SPLITS}
    sample = open_dataset(data, seed=0, split="train").batch([0])
    text = tokenizer.decode(sample.tokens[0].tolist())
    return DataContents(data.tokenizer, corpus, folder, samples, sample.tokens.shape[1], sample.unmasked(), text)
