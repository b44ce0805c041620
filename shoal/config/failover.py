"""What a run does about failures."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt

from shoal.config.section import Section


class FailoverConfig(Section):
    """How a run survives the loss of ranks and nodes; docs/failover.md."""

    # ---- the state in host memory ----

    memory_every: NonNegativeInt = 0
    """Steps between copies of the state in host memory, from which a restart goes on: at most so many are lost. 0 keeps
    none."""

    memory_folder: Path = Path("/dev/shm")
    """Where each host has a file system in memory (tmpfs)."""

    node_ranks: NonNegativeInt = 0
    """Ranks that make up a node, whose state another node has a copy of: the first so many are the first node, and so
    on. 0 takes the ranks of each host."""
