"""Configuration of injected faults and delays, for tests, experiments and benchmarks."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat

from shoal.base.section import Section


class TestingConfig(Section):
    """Injected faults: slow ranks, dead ranks and slow networks."""

    straggler: str = ""
    """Slow ranks, as comma-separated RANK=FACTOR: with 1=4, the forward and backward passes of rank 1 take 4 times as
    long (it sleeps). Each rank's computing and waiting time is shown at the end."""

    min_step_seconds: float = Field(default=0.0, ge=0, le=3600)
    """Minimum compute time per step in seconds (sleeps if faster). With more ranks than cores, ranks then behave as if
    each had its own machine."""

    kill: str = ""
    """Ranks that kill themselves (SIGKILL), as comma-separated RANK@STEP: shows which parallel.sync continues."""

    link_gbs: NonNegativeFloat = 0.0
    """Simulated network: maximum rate in GB/s at which a rank's data leaves it in a collective, by waiting (not for
    pipelines, nor for a parallel.sync that shares memory). 0 simulates none."""
