"""`shoal data`: train a tokenizer, and show the text as training reads it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

import shoal
from shoal.base.section import Section
from shoal.base.terminal import printable
from shoal.spec.config import RunConfig


class TokenizerOptions(Section):
    vocab_size: int = Field(8192, gt=0, le=2**24)
    """Vocabulary size, including the 256 bytes and the special tokens."""

    out: Path = Path("tokenizer.json")
    """File to write; set data.tokenizer to its path."""


class InspectOptions(Section):
    """Options of `shoal data inspect`: only the config section data."""


def train_tokenizer(options: TokenizerOptions, config: RunConfig) -> int:
    """Train a tokenizer, and print how to use it."""
    tokenizer = shoal.train_tokenizer(config.data, vocab_size=options.vocab_size, out=options.out)
    print(f"{tokenizer.path}: {tokenizer.vocab_size:,} tokens.  Use it with: --data.tokenizer {tokenizer.path}")
    return 0


def inspect(options: InspectOptions, config: RunConfig) -> int:
    """Print a row for each split of the corpus, then its first training sample; unsafe characters are escaped."""
    found = shoal.describe_data(config.data)
    if found.corpus:
        ids = f"{found.corpus.vocab_size:,} token ids ({found.tokenizer}), in {found.folder}"
        print(printable("\n".join([*found.corpus.summary(), ids, ""])))
        print(f"{'':12}{'documents':>12}{'tokens':>16}{'bytes/token':>14}{'shards':>8}{'samples':>12}")
        for name, split in found.corpus.splits.items():
            ratio, shards, samples = split.bytes / max(1, split.tokens), len(split.shards), found.samples[name]
            print(f"{name:12}{split.documents:>12,}{split.tokens:>16,}{ratio:>14.2f}{shards:>8}{samples:>12,}")
    print(f"\nsample 0 of seed 0: {found.sample_tokens} tokens, {found.sample_targets} in the loss\n")
    print(printable(found.sample))
    return 0
