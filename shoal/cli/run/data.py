"""`shoal data`: train a tokenizer, and show the text as training reads it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

import shoal
from shoal.base.section import Section
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
    """Print a summary of the corpus, and its first training sample as text."""
    found = shoal.describe_data(config.data)
    from shoal.report.run.tables import data_lines

    print("\n".join(data_lines(found)))
    return 0
