"""What ``shoal data`` does: tokenise a corpus, train a tokenizer, and look at the text as training will see it."""

from __future__ import annotations

from pathlib import Path

from shoal.base.files import expanded
from shoal.engine.data.corpus import check_read, open_corpus
from shoal.engine.data.shards import SPLITS, CacheManifest, open_shards, split_of
from shoal.engine.data.tokenizer import load_tokenizer, train_bpe
from shoal.spec.config import DataConfig


def prepare(config: DataConfig, *, progress: bool = True) -> None:
    """Tokenise the corpus of ``config`` if that has not been done, and check every shard.

    For the process that starts the ranks: it shows the progress once, and finds bad input before any rank exists.

    Raises:
        UsageError: whatever is wrong with the input, by name.
    """
    from shoal.engine.data.batches import open_dataset  # which needs torch

    for split in SPLITS:
        open_dataset(config, seed=0, split=split, progress=progress)


def train_tokenizer(config: DataConfig, vocab_size: int, out: Path) -> None:
    """Train a byte-level BPE on the training documents of ``config`` and save it as ``out``.

    Raises:
        UsageError: the corpus cannot be read, ``out`` exists, or ``vocab_size`` is too small.
    """
    check_read(config)
    documents = (
        text
        for text in open_corpus(config).documents()
        if split_of(text.encode(), config.validation_fraction) == "train"
    )
    out = expanded(out, "--out")
    tokenizer = train_bpe(documents, vocab_size, out)
    print(f"{out}: {tokenizer.vocab_size:,} tokens.  Use it with: --data.tokenizer {out}")


def inspect(config: DataConfig) -> None:
    """Print what the corpus holds and its first training sample as text, tokenising it first where needed.

    Raises:
        UsageError: whatever is wrong with the input, by name.
    """
    from shoal.engine.data.batches import open_dataset

    check_read(config)
    tokenizer = load_tokenizer(config.tokenizer)
    if config.source != "synthetic":
        folder = open_shards(config, tokenizer, progress=True)
        manifest = CacheManifest.read(folder)
        print(f"{manifest.corpus}\n{manifest.vocab_size:,} token ids ({config.tokenizer}), in {folder}\n")
        print(f"{'':12}{'documents':>12}{'tokens':>16}{'bytes/token':>14}{'shards':>8}{'samples':>12}")
        for split in SPLITS:
            info = manifest.splits[split]
            samples = max(0, info.tokens - 1) // config.sequence_length
            ratio = info.bytes / max(1, info.tokens)
            print(f"{split:12}{info.documents:>12,}{info.tokens:>16,}{ratio:>14.2f}{len(info.shards):>8}{samples:>12,}")
    sample = open_dataset(config, seed=0, split="train").batch([0])
    print(f"\nsample 0 of seed 0: {sample.tokens.shape[1]} tokens, {sample.unmasked()} in the loss\n")
    text = tokenizer.decode(sample.tokens[0].tolist())
    print("".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text))
