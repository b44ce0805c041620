"""Pipeline schedules: for one rank, its forwards and backwards in order.

Each is a function of (rank, stages, microbatches) that reads like its paper's figure. One stage with m micro-batches is
gradient accumulation, by either schedule.
"""

from __future__ import annotations

from shoal.pipeline.program import Action, Op


def gpipe(rank: int, stages: int, microbatches: int) -> list[Action]:
    """GPipe: all forwards, then all backwards (Huang et al. 2019, figure 2c). Keeps every micro-batch alive."""
    return [Action(Op.FORWARD, rank, m) for m in range(microbatches)] + [
        Action(Op.BACKWARD, rank, m) for m in range(microbatches)
    ]


def one_f_one_b(rank: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B: warm up, then one forward and one backward in turn, then drain (Narayanan et al. 2021, figure 4).

    Keeps at most ``stages - rank`` micro-batches alive, against all of them for GPipe. The bubble is the same.
    """
    warmup = min(stages - rank - 1, microbatches)
    order = [Action(Op.FORWARD, rank, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        order += [Action(Op.FORWARD, rank, warmup + m), Action(Op.BACKWARD, rank, m)]
    return order + [Action(Op.BACKWARD, rank, m) for m in range(microbatches - warmup, microbatches)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
