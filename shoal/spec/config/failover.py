"""Configuration of failure detection and recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from shoal.base.section import Section


class FailoverConfig(Section):
    """Recovery from the loss of ranks and nodes; see docs/failover.md."""

    # ---- restarts ----

    restarts: NonNegativeInt = 3
    """Consecutive restarts without progress after which a run ends; 0 never restarts it."""

    heartbeat_timeout_seconds: PositiveFloat = 10.0
    """Seconds without heartbeat or CPU use after which a rank is declared dead (2 seconds if stopped by SIGSTOP)."""

    progress_timeout_seconds: PositiveFloat = 20.0
    """Seconds without progress on any rank, and at least three times the slowest step, after which a run is declared
    stuck. Before the first step, during validation and while saving the limit is nine minutes."""

    replan: bool = True
    """Restart on fewer devices after a loss, and on all of them when they return, with the layout nearest to parallel.
    Without it, a run that lacks devices ends."""

    # ---- checkpoints in host memory ----

    memory_every: NonNegativeInt = 0
    """Steps between copies of the state in host memory. A restart resumes from the newest copy, so at most this many
    steps are lost. 0 makes none."""

    memory_folder: Path = Path("/dev/shm")
    """Folder on each host in an in-memory file system (tmpfs)."""

    node_ranks: NonNegativeInt = 0
    """Ranks per node, numbered in order; another node keeps a copy of a node's state. 0 takes each host's ranks."""

    # ---- silent failures ----

    check_replicas_every: NonNegativeInt = 0
    """Steps between comparisons of the replicas' states, also compared at the start; 0 never compares them."""

    spike_factor: NonNegativeFloat = 0.0
    """Report a spike when the loss or gradient norm exceeds its running median by this many robust standard
    deviations; 0 turns the check off."""

    spike_window: int = Field(default=64, ge=8)
    """Number of steps in the running median."""

    spike_rollbacks: NonNegativeInt = 0
    """Maximum number of rollbacks. A rollback returns to a state before the spike and skips the batches since then; 0
    only reports spikes."""

    spike_margin: NonNegativeInt = 0
    """Minimum number of steps between the state to roll back to and the spike."""

    stragglers_every: NonNegativeInt = 0
    """Steps between reports of the rank that computes longest; 0 makes none."""

    reexecute_every: NonNegativeInt = 0
    """Steps between steps that are computed twice to detect devices that compute wrong results; 0 repeats none."""

    reexecute_on: Literal["same", "replica"] = "same"
    """Rank of the second computation: the same, or the next replica, which also detects a rank that is always wrong."""
