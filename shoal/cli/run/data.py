"""`shoal data`: train a tokenizer, and look at the text as training will see it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

import shoal
from shoal.base.section import Section
from shoal.spec.config import RunConfig


class TokenizerOptions(Section):
    vocab_size: int = Field(8192, gt=0, le=2**24)
    """Token ids, the 256 bytes and the special tokens included."""

    out: Path = Path("tokenizer.json")
    """The file to write; name it in data.tokenizer."""


class InspectOptions(Section):
    """It has none besides those of the data."""


def train_tokenizer(options: TokenizerOptions, config: RunConfig) -> int:
    """Train a tokenizer, and say how it is used."""
    tokenizer = shoal.train_tokenizer(config.data, vocab_size=options.vocab_size, out=options.out)
    print(f"{tokenizer.file}: {tokenizer.vocab_size:,} tokens.  Use it with: --data.tokenizer {tokenizer.file}")
    return 0


def inspect(options: InspectOptions, config: RunConfig) -> int:
    """Print what the corpus holds, and its first training sample as text."""
    found = shoal.describe_data(config.data)
    from shoal.report.run.tables import data_lines

    print("\n".join(data_lines(found)))
    return 0
