"""V-shaped schedules: each rank holds one stage on the way down and one on the way up (Qi et al. 2024, 2024b).

V-Half and V-Min need less memory than 1F1B: one micro-batch's passes form a block that is repeated (Qi et al. 2024b,
section 4). An activation lives from its forward to its weight half. A rank that keeps its first stage's activation for
long keeps its second stage's briefly, so all ranks use equal memory. The speed at which micro-batches travel determines
this memory.
"""

from __future__ import annotations

from functools import cache
from itertools import count, product

from shoal.pipeline.program import Action, Op, StageDurations
from shoal.pipeline.schedules.greedy import GreedyScheduler, fill_gaps
from shoal.pipeline.schedules.placement import MicroBatchCursor, v_placement

INTERVAL = 6  # passes per micro-batch on a rank (two stages, three passes each), and the period of the blocks
DOWN, UP = 0, 1


def zb_v(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """ZB-V: no bubble with 1F1B's memory. The first rank has the last stage, so its backward can start immediately."""
    down, up = MicroBatchCursor(rank, microbatches), MicroBatchCursor(2 * ranks - 1 - rank, microbatches)
    full = max(microbatches, 2 * ranks - 1)  # micro-batches needed to fill the pipeline
    order = []
    for _ in range(2 * (ranks - rank) - 1):
        order += down("F")
    for _ in range(rank):
        order += up("F") + down("F")
    for _ in range(ranks - rank):
        order += up("FIW")
    for _ in range(full - ranks):
        order += down("FIW") + up("FIW")
    for _ in range(rank):
        order += down("I") + up("I")
    for _ in range(ranks - rank):
        order += down("IW")
    return order + up("W" * rank) + down("W" * rank)


def v_min(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """V-Min: a third of 1F1B's memory; a micro-batch never waits."""
    return _repeated(rank, ranks, microbatches, (1, 1, 1, 1))


def v_half(ranks: int, microbatches: int, virtual: int) -> list[list[Action]]:
    """V-Half: half of 1F1B's memory; a micro-batch waits for one pass at each rank on its way up.

    Weight halves move out of the block to fill the gaps at the step's beginning and end.
    """
    orders = [
        [action for action in _repeated(rank, ranks, microbatches, (1, 2, 1, 2)) if action.op is not Op.BACKWARD_WEIGHT]
        for rank in range(ranks)
    ]
    tried = (_filled(orders, microbatches, memory) for memory in count(ranks + 2))
    return next(filled for filled in tried if all(len(order) == INTERVAL * microbatches for order in filled))


def _filled(orders: list[list[Action]], microbatches: int, memory: int) -> list[list[Action]]:
    """Fill gaps with weight halves; the orders are incomplete if a rank waits for memory that is never freed."""
    scheduler = GreedyScheduler(microbatches, StageDurations(), v_placement(len(orders), 2))
    return scheduler.run(fill_gaps(scheduler, orders, memory))


def _repeated(rank: int, ranks: int, microbatches: int, paces: tuple[int, int, int, int]) -> list[Action]:
    stages = (rank, 2 * ranks - 1 - rank)
    begins = sorted(
        (begin + INTERVAL * m, op, m, stages[side])
        for m in range(microbatches) for (op, side), begin in _block(ranks, paces)[rank].items()
    )
    return [Action(op, stage, m) for _, op, m, stage in begins]


@cache
def _block(ranks: int, paces: tuple[int, int, int, int]) -> list[dict[tuple[Op, int], int]]:
    """Return, for each rank, the start times of the first micro-batch's passes, if every pass takes 1.

    Args:
        paces: delay from one rank to the next of a forward down and up, and of the gradient down and up.

    The waits at the turns of the V are the shortest that avoid collisions between passes of repeated blocks.
    """
    for waits in sorted(product(range(INTERVAL), repeat=3), key=lambda waits: (sum(waits), waits)):
        block = [_begins(rank, ranks, paces, waits) for rank in range(ranks)]
        if all(len({begin % INTERVAL for begin in begins.values()}) == len(begins) for begins in block):
            return [_with_weights(begins) for begins in block]
    raise AssertionError(f"no block of {ranks} ranks fits the paces {paces}")


def _begins(rank: int, ranks: int, paces: tuple[int, ...], waits: tuple[int, ...]) -> dict[tuple[Op, int], int]:
    begin, begins = 0, {}
    legs = ((Op.FORWARD, DOWN), (Op.FORWARD, UP), (Op.BACKWARD_INPUT, UP), (Op.BACKWARD_INPUT, DOWN))
    for (op, side), pace, wait, back in zip(legs, paces, (*waits, 0), (False, True, False, True), strict=True):
        begins[op, side] = begin + pace * (ranks - 1 - rank if back else rank)
        begin += pace * (ranks - 1) + 1 + wait
    return begins


def _with_weights(begins: dict[tuple[Op, int], int]) -> dict[tuple[Op, int], int]:
    """Add each weight half in the first gap after its input half."""
    free = set(range(INTERVAL)) - {begin % INTERVAL for begin in begins.values()}
    for side in (UP, DOWN):
        after = begins[Op.BACKWARD_INPUT, side] + 1
        begins[Op.BACKWARD_WEIGHT, side] = min(after + (gap - after) % INTERVAL for gap in free)
        free.discard(begins[Op.BACKWARD_WEIGHT, side] % INTERVAL)
    return begins
