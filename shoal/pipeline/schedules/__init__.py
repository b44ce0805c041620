"""Pipeline schedules: the order of forwards and backwards on each rank.

Each schedule is a function that follows its paper's figure. With one stage, every schedule of m micro-batches is
gradient accumulation.
"""

from __future__ import annotations

from shoal.pipeline.program import Schedule
from shoal.pipeline.schedules import asynchronous, auto, dualpipe, v_schedules
from shoal.pipeline.schedules import looped_schedules as loop
from shoal.pipeline.schedules.placement import looped, per_rank_schedule, v_placement
from shoal.spec.schedules import ASYNCHRONOUS

CONTROLLABLE_MEMORY = "Qi et al. 2024b (controllable memory), section 4"

EVERY: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        per_rank_schedule("naive", "a layer split with one micro-batch in flight", loop.naive, looped),
        per_rank_schedule("gpipe", "Huang et al. 2019, figure 2c", loop.breadth_first, looped),
        per_rank_schedule("looped-bfs", "Lamy-Poirier 2023, figure 4d", loop.breadth_first, looped, virtual=None),
        per_rank_schedule("1f1b", "Narayanan et al. 2021, figure 4 (PipeDream-Flush)", loop.one_f_one_b, looped),
        per_rank_schedule(
            "interleaved-1f1b", "Narayanan et al. 2021, section 2.2", loop.interleaved_1f1b, looped, virtual=None
        ),
        per_rank_schedule("zb-h1", "Qi et al. 2024, figure 3 above", loop.zb_h1, looped),
        per_rank_schedule("zb-h2", "Qi et al. 2024, figure 3 below", loop.zb_h2, looped),
        per_rank_schedule(
            "interleaved-zb", "Qi et al. 2024, figure 3, on interleaved stages", loop.interleaved_zb, looped,
            virtual=None,
        ),
        per_rank_schedule("zb-v", "Qi et al. 2024, section 6", v_schedules.zb_v, v_placement, virtual=2),
        Schedule("v-half", CONTROLLABLE_MEMORY, v_schedules.v_half, v_placement, virtual=2),
        per_rank_schedule("v-min", CONTROLLABLE_MEMORY, v_schedules.v_min, v_placement, virtual=2),
        Schedule("zb-auto", "Qi et al. 2024, section 3.1", lambda p, m, virtual: auto.zb_auto(p, m), looped),
        per_rank_schedule(
            "dualpipe", "DeepSeek-AI 2024, figure 5", dualpipe.dualpipe, v_placement,
            virtual=2, model_copies=2, refuses=dualpipe.refuses,
        ),
        per_rank_schedule("dualpipev", "Qi et al. 2025 (cut-in-half)", dualpipe.dualpipe_v, v_placement, virtual=2),
        per_rank_schedule(
            "terapipe", "Li et al. 2021, figure 1d (GPipe's order, in slices)", loop.breadth_first, looped
        ),
        per_rank_schedule("pipedream", "Narayanan et al. 2019, figure 8, section 3.3", asynchronous.pipedream, looped),
        per_rank_schedule("pipedream-2bw", "Narayanan et al. 2021b, section 3.1", asynchronous.pipedream_2bw, looped),
    )
}

SCHEDULES = {name: schedule for name, schedule in EVERY.items() if name not in ASYNCHRONOUS}
"""Schedules that compute the step of one device."""
