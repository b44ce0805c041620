"""Prepare data: tokenise a corpus, train a tokenizer, and describe the data of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.files import expanded
from shoal.engine.data.corpus import check_read, open_corpus
from shoal.engine.data.megatron import write_megatron
from shoal.engine.data.open_stream import open_stream
from shoal.engine.data.readers import Skipped
from shoal.engine.data.shards import assign_documents, batch_documents
from shoal.engine.data.token_stream import SPLITS, StreamContents
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
    >>> config = shoal.RunConfig(data={"source": "text", "paths": ["corpus.txt"]})
    >>> shoal.train_tokenizer(config.data, vocab_size=300, out="fish.json").vocab_size <= 300
    True
    """
    check_read(data)
    documents = (
        text
        for source in data.sources().values()
        for text in _training_documents(source, data.validation_fraction)
    )
    return train_bpe(documents, vocab_size, expanded(Path(out), "--out"))


def _training_documents(source: DataConfig, validation_fraction: float) -> Iterator[str]:
    skipped = Skipped(source.unreadable == "stop", source.chat)
    batches = batch_documents(open_corpus(source).documents(skipped), skipped)
    for batch in assign_documents(batches, validation_fraction, divide=not source.chat):
        for document, _, split in batch:
            if not isinstance(document, str):
                raise UsageError("data.paths: a tokenizer is trained on text, but a document is a list of token ids."
                                 f"\n  Set data.field to a field with text; now it is '{source.read_field}'.")
            if split == "train":
                yield document


@dataclass(frozen=True)
class SplitContents:
    """One split: its stream, and the number of ids and of sequences in it."""

    stream: StreamContents
    tokens: int
    samples: int


@dataclass(frozen=True)
class DataContents:
    """Summary of the data of a run.

    Attributes:
        summary: what was read, and what was left out.
        splits: streams of the splits, by their name, and in a mixture by that of the source before it; none for
            synthetic data, drawn on use.
        sample_tokens: tokens of the first training sample of seed 0.
        sample_targets: number of these tokens that count in the loss.
        sample: text of this sample.
    """

    tokenizer: str
    summary: tuple[str, ...]
    splits: dict[str, SplitContents]
    sample_tokens: int
    sample_targets: int
    sample: str


def describe_data(data: DataConfig) -> DataContents:
    """Describe a corpus and its first training sample; tokenise it first if it is not in the cache.

    Raises:
        UsageError: naming the invalid input.

    >>> import shoal
    >>> config = shoal.RunConfig(data={"source": "synthetic", "sequence_length": 16})
    >>> shoal.describe_data(config.data).sample_tokens
    16
    """
    from shoal.engine.data.batches import open_dataset

    check_read(data)
    tokenizer = load_tokenizer(data.tokenizer)
    summary: list[str] = []
    splits: dict[str, SplitContents] = {}
    for name, source in data.sources().items() if data.reads != "synthetic" else ():
        for split in SPLITS:
            stream = open_stream(source, tokenizer, split, progress=True)
            samples = max(0, len(stream) - 1) // data.sequence_length
            splits[f"{name} {split}".strip()] = SplitContents(stream.contents, len(stream), samples)
        summary += stream.summary()
    sample = open_dataset(data, seed=0, split="train").batch([0])
    text = tokenizer.decode(sample.tokens[0].tolist())
    return DataContents(data.tokenizer, tuple(summary), splits, sample.tokens.shape[1], sample.unmasked(), text)


def export_megatron(data: DataConfig, out: str | Path) -> list[Path]:
    """Write the token ids of a corpus as files of Megatron: ``out-train`` and ``out-validation``, .bin and .idx each.

    Of a mixture, each source has files of its own: ``out-NAME-train``.

    Returns:
        The paths without suffix, of the splits that have ids.

    Raises:
        UsageError: naming the invalid input, or a file that exists already.

    >>> import shoal
    >>> from pathlib import Path
    >>> size = Path("notes.txt").write_text("one fish, two fish\\n" * 100)
    >>> config = shoal.RunConfig(data={"paths": ["notes.txt"]})
    >>> [path.name for path in shoal.export_megatron(config.data, "notes")]
    ['notes-train', 'notes-validation']
    """
    check_read(data)
    if data.reads == "synthetic":
        raise UsageError("data.source = 'synthetic' is drawn on use, and has no end.\n  Use another source.")
    if not Path(out).name:
        raise UsageError(f"out = '{out}' names no file.\n  Give the start of their names, such as corpus/notes.")
    out, tokenizer, written = Path(out), load_tokenizer(data.tokenizer), []
    for name, source in data.sources().items():
        if source.chat:
            raise UsageError("data.chat: files of Megatron do not say which ids count in the loss.\n  Leave chat out.")
        for split in SPLITS:
            if len(stream := open_stream(source, tokenizer, split, progress=True)):
                written.append(out.with_name("-".join(filter(None, (out.name, name, split)))))
                write_megatron(stream, written[-1])
    return written
