"""Contents of a corpus and of a checkpoint, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from shoal.report.tables import text_table

if TYPE_CHECKING:
    from shoal.engine.checkpoint.manifest import Manifest
    from shoal.engine.data.prepare import DataContents


def data_lines(found: DataContents) -> list[str]:
    """Return the corpus as a table with a row for each split, then the sample; unprintable characters are replaced."""
    lines = _corpus_lines(found) if found.corpus else []
    text = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in found.sample)
    heading = f"sample 0 of seed 0: {found.sample_tokens} tokens, {found.sample_targets} in the loss"
    return [*lines, "", heading, "", text]


def _corpus_lines(found: DataContents) -> list[str]:
    assert found.corpus is not None
    lines = [
        found.corpus.corpus,
        f"{found.corpus.vocab_size:,} token ids ({found.tokenizer}), in {found.folder}",
        "",
        f"{'':12}{'documents':>12}{'tokens':>16}{'bytes/token':>14}{'shards':>8}{'samples':>12}",
    ]
    for name, split in found.corpus.splits.items():
        ratio, shards, samples = split.bytes / max(1, split.tokens), len(split.shards), found.samples[name]
        lines.append(
            f"{name:12}{split.documents:>12,}{split.tokens:>16,}{ratio:>14.2f}{shards:>8}{samples:>12,}"
        )
    return lines


def checkpoint_table(found: Manifest) -> Table:
    """Return a table of the tensors: name, dtype, global shape, bytes, and the numbers of boxes and files."""
    rows = [
        (name, t.dtype, " x ".join(map(str, t.shape)) or "scalar", f"{t.bytes:,}", str(len(t.boxes)),
         str(len({box.file for box in t.boxes})))
        for name, t in found.tensors.items()
    ]
    return text_table(("tensor", "dtype", "shape", "bytes", "boxes", "files"), rows, words=(0, 1), lines=True)
