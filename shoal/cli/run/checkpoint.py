"""`shoal checkpoint`: verify that a checkpoint is undamaged, and list its tensors."""

from __future__ import annotations

import sys
from typing import Annotated

from rich.console import Console

import shoal
from shoal.base.options import POSITIONAL
from shoal.base.section import Section

PIPE_WIDTH = 160
"""Columns if the output is not a terminal, so that names are not broken."""


class CheckpointOptions(Section):
    path: Annotated[str, POSITIONAL]
    """Folder of a checkpoint, or its URL, such as s3://bucket/run/step-00000100."""


def verify(options: CheckpointOptions) -> int:
    """Read and check every byte; damage is an error."""
    shoal.verify_checkpoint(options.path)
    print(f"{options.path}: complete and undamaged")
    return 0


def inspect(options: CheckpointOptions) -> int:
    """Print one row per tensor."""
    found = shoal.describe_checkpoint(options.path)
    from shoal.report.run.tables import checkpoint_table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(checkpoint_table(found))
    console.print(
        f"step {found.step}: {len(found.tensors)} tensors, {found.bytes:,} bytes in {len(found.files)} files"
    )
    return 0
