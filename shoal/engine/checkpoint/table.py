"""A checkpoint on the screen: what it holds, without reading the tensors."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.engine.checkpoint.manifest import describe, read_manifest
from shoal.engine.checkpoint.storage import Place

_PIPE_WIDTH = 160  # columns where there is no terminal, so that no name is broken


def inspect(path: Place) -> None:
    """Print one row for each tensor: name, dtype, whole shape, bytes, and the boxes and files that hold it.

    Raises:
        CheckpointError: not a checkpoint, or its manifest is damaged.
    """
    manifest, rows = read_manifest(path), describe(path)
    table = Table("tensor", "dtype")
    for column in ("shape", "bytes", "boxes", "files"):
        table.add_column(column, justify="right")
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        table.add_row(
            escape(row["name"]), row["dtype"], shape, f"{row['bytes']:,}", str(row["boxes"]), str(row["files"])
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(table)
    total = sum(row["bytes"] for row in rows)
    console.print(f"step {manifest.step}: {len(rows)} tensors, {total:,} bytes in {len(manifest.files)} files")
