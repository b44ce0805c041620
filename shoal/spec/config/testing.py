"""Faults and delays that a run is given on purpose: for tests, experiments and benchmarks."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat

from shoal.base.section import Section


class TestingConfig(Section):
    """Slow ranks, dead ranks and slow networks on purpose, to see what a run does about them."""

    straggler: str = ""
    """Slow ranks, as RANK=FACTOR with commas: with 1=4 the forwards and backwards of rank 1 take 4 times as long, by
    sleeping. Each rank's time spent computing and waiting is shown at the end."""

    pace: float = Field(default=0.0, ge=0, le=3600)
    """Minimum seconds of the forwards and backwards of a step, by sleeping: more ranks than cores then behave as if
    each had its own machine."""

    dead: str = ""
    """Ranks that kill themselves (SIGKILL), as RANK@STEP with commas: to see which parallel.sync continues."""

    link_gbs: NonNegativeFloat = 0.0
    """Simulated network: GB/s at which a rank's part of a collective leaves it at most, by waiting (not for pipelines,
    nor for a parallel.sync that shares memory). 0 simulates none."""
