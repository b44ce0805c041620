"""Checkpoints that any layout can save and any other can load: see docs/checkpoint.md."""

from shoal.engine.checkpoint.load import load, newest_good, verify
from shoal.engine.checkpoint.manifest import CheckpointError, Committed, list_checkpoints, newest
from shoal.engine.checkpoint.save import Checkpointer

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Committed",
    "list_checkpoints",
    "load",
    "newest",
    "newest_good",
    "verify",
]
