"""What a run does about failures."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat

from shoal.config.section import Section


class FailoverConfig(Section):
    """How a run survives the loss of ranks and nodes; docs/failover.md."""

    # ---- restarts ----

    restarts: NonNegativeInt = 3
    """Restarts in a row of a run that does not get further than it was before; 0 never restarts it."""

    silence_seconds: PositiveFloat = 10.0
    """A rank that for so long neither gave a sign of life nor used its processor is lost. One that was stopped
    (SIGSTOP) is lost after 2 seconds."""

    stall_seconds: PositiveFloat = 20.0
    """A run of which no rank gets on for this long and three times its slowest step is stuck. Before its first step,
    while it validates and while it saves, it has nine minutes."""

    replan: bool = True
    """Restart on fewer devices where some are lost, and on all of them when they are back, with the layout nearest to
    parallel; without it a run that lacks devices ends."""

    # ---- the state in host memory ----

    memory_every: NonNegativeInt = 0
    """Steps between copies of the state in host memory, from which a restart goes on: at most so many are lost. 0 keeps
    none."""

    memory_folder: Path = Path("/dev/shm")
    """Where each host has a file system in memory (tmpfs)."""

    node_ranks: NonNegativeInt = 0
    """Ranks that make up a node, whose state another node has a copy of: the first so many are the first node, and so
    on. 0 takes the ranks of each host."""
