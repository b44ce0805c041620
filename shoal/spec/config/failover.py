"""What a run does about failures."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from shoal.base.section import Section


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

    # ---- silent trouble ----

    check_replicas_every: NonNegativeInt = 0
    """Steps between comparisons of what replicas hold, which is then compared at the start too; 0 never does."""

    spike_factor: NonNegativeFloat = 0.0
    """A loss or gradient norm that is so many (robust) standard deviations above its recent median is a spike, and
    told; 0 looks for none."""

    spike_window: int = Field(default=64, ge=8)
    """Steps that the median is of."""

    spike_rollbacks: NonNegativeInt = 0
    """How often a run may answer a spike by going back to the state before and leaving out the batches since; 0 only
    tells of it."""

    spike_margin: NonNegativeInt = 0
    """Steps that the state to go back to must lie before the one with the spike."""

    stragglers_every: NonNegativeInt = 0
    """Steps between reports of the rank that computes longest; 0 makes none."""

    reexecute_every: NonNegativeInt = 0
    """Steps between those that are computed twice, to find devices that compute wrong; 0 computes none twice."""

    reexecute_on: Literal["same", "replica"] = "same"
    """Where the second time is: the same rank, or the next replica, which also finds a rank that is always wrong."""
