"""`shoal data`: train a tokenizer, and show the text as training reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

import shoal
from shoal.base.files import expanded
from shoal.base.section import Section
from shoal.base.terminal import printable, quote
from shoal.spec.config import RunConfig


class TokenizerOptions(Section):
    vocab_size: int = Field(8192, gt=0, le=2**24)
    """Vocabulary size, including the 256 bytes and the special tokens."""

    out: Path = Path("tokenizer.json")
    """File to write; set data.tokenizer to its path."""


class TokenExportOptions(Section):
    out: Path
    """Start of the names of the files: OUT-train.bin, .idx, OUT-validation.bin and .idx."""

    to: Literal["megatron"] = "megatron"
    """Format: .bin and .idx files of token ids, as Megatron-LM reads them."""


class InspectOptions(Section):
    """Options of `shoal data inspect`: only the config section data."""


def train_tokenizer(options: TokenizerOptions, config: RunConfig) -> int:
    """Train a tokenizer, and print how to use it."""
    tokenizer = shoal.train_tokenizer(config.data, vocab_size=options.vocab_size, out=options.out)
    print(f"{tokenizer.path}: {tokenizer.vocab_size:,} tokens.  Use it with: "
          f"--data.tokenizer {quote(tokenizer.path)}")
    return 0


def export(options: TokenExportOptions, config: RunConfig) -> int:
    """Write the token ids of a corpus, and print how to train on them."""
    for path in shoal.export_megatron(config.data, expanded(options.out, "--out")):
        print(printable(f"{path}.bin and .idx.  Read them with: --data.paths {quote(f'{path}.idx')}"))
    return 0


def inspect(options: InspectOptions, config: RunConfig) -> int:
    """Print a row for each split of the corpus, then its first training sample; unsafe characters are escaped."""
    found = shoal.describe_data(config.data)
    if found.splits:
        print(printable("\n".join([*found.summary, f"tokenizer: {found.tokenizer}", ""])))
        width = max(12, *(len(name) + 1 for name in found.splits))
        print(f"{'':{width}}{'documents':>12}{'tokens':>16}{'bytes/token':>14}{'files':>8}{'samples':>12}")
        for name, split in found.splits.items():
            stream, tokens = split.stream, split.tokens
            ratio = "" if stream.bytes is None else f"{stream.bytes / max(1, tokens):.2f}"
            row = f"{stream.documents:>12,}{tokens:>16,}{ratio:>14}{stream.files:>8}{split.samples:>12,}"
            print(f"{name:{width}}{row}")
    print(f"\nsample 0 of seed 0: {found.sample_tokens} tokens, {found.sample_targets} in the loss\n")
    print(printable(found.sample))
    return 0
