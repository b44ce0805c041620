"""`shoal checkpoint`: verify that a checkpoint is undamaged, and list its tensors."""

from __future__ import annotations

import sys
from typing import Annotated

from rich.console import Console

import shoal
from shoal.base.options import POSITIONAL
from shoal.base.section import Section
from shoal.base.terminal import printable
from shoal.report.tables import text_table

PIPE_WIDTH = 160  # columns if the output is not a terminal, so that names are not broken


class CheckpointOptions(Section):
    path: Annotated[str, POSITIONAL]
    """Folder of a checkpoint, or its URL, such as s3://bucket/run/step-00000100."""


def verify(options: CheckpointOptions) -> int:
    """Read and check every byte; damage is an error."""
    shoal.verify_checkpoint(options.path)
    print(f"{printable(options.path)}: complete and undamaged")
    return 0


def inspect(options: CheckpointOptions) -> int:
    """Print a row for each tensor: name, dtype, global shape, bytes, and the numbers of boxes and files."""
    found = shoal.describe_checkpoint(options.path)
    rows = [
        (name, t.dtype, " x ".join(map(str, t.shape)) or "scalar", f"{t.bytes:,}", str(len(t.boxes)),
         str(len({box.file for box in t.boxes})))
        for name, t in found.tensors.items()
    ]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(text_table(("tensor", "dtype", "shape", "bytes", "boxes", "files"), rows, words=(0, 1), lines=True))
    console.print(
        f"step {found.step}: {len(found.tensors)} tensors, {found.bytes:,} bytes in {len(found.files)} files"
    )
    return 0
