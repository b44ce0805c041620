"""Timelines to draw: of any schedule, or of random lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from shoal.pipeline.program import Program, build_program
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.simulator import ActionTimes, MessageTimes, Timeline, simulate
from shoal.report.timeline.chart import Chart

SIZES = {"naive": (3, 4), "zb-auto": (3, 6), "dualpipe": (4, 8), "dualpipev": (4, 8)}
SHOWN = ("1f1b", "interleaved-1f1b", "zb-v", "dualpipe")  # one stage, several, halves of a backward, two copies


def program(name: str, ranks: int = 4, microbatches: int = 8, *, zero: int = 0) -> Program:
    ranks, microbatches = SIZES.get(name, (ranks, microbatches))
    return build_program(EVERY[name], ranks, microbatches, virtual_stages=2, zero=zero)


def played(name: str, ranks: int = 4, microbatches: int = 8) -> Timeline:
    times = ActionTimes(forward=2e-3, backward_input=2.5e-3, backward_weight=1.5e-3, reduce=2e-4, step=1e-3)
    return simulate(program(name, ranks, microbatches), times, MessageTimes(time=1e-4, latency=2e-5))


def chart(name: str = "1f1b", **sizes: int) -> Chart:
    return Chart(name, played(name, **sizes))


@st.composite
def charts(draw: st.DrawFn) -> Chart:
    """Of a pipeline of any width, with times drawn for each action."""
    ranks, microbatches = draw(st.integers(1, 70)), draw(st.integers(1, 12))
    plan = build_program(EVERY[draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))], ranks, microbatches)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1e-6, 1e-3, 1.0, 60.0]))
    stages = (plan.stages, plan.microbatches)
    lengths = (scale * random.choice([0.0, 0.01, 1.0, 3.0], stages) for _ in range(3))
    timeline = simulate(plan, ActionTimes(*lengths, step=scale), MessageTimes(latency=scale / 10))
    return Chart(draw(st.text(max_size=12)), timeline, seconds=draw(st.booleans()))
