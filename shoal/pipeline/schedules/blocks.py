"""Less memory than 1F1B, over a V: one micro-batch's passes, placed once and repeated (Qi et al. 2024b, section 4).

An activation lives from its forward to its weight half. Over a V, a rank whose stage on the way down keeps one long
has one on the way up that it keeps short, so all ranks keep as much. How fast micro-batches travel sets how much.
"""

from __future__ import annotations

from functools import cache
from itertools import count, product

from shoal.pipeline.program import Action, Op, StageDurations
from shoal.pipeline.schedules.greedy import Play, fill
from shoal.pipeline.schedules.placement import vee_shaped

INTERVAL = 6  # passes of a micro-batch on a rank: two stages, three passes each; so often comes another
DOWN, UP = 0, 1


def v_min(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """V-Min: a third of 1F1B's memory; a micro-batch never waits."""
    return _repeated(rank, ranks, microbatches, (1, 1, 1, 1))


def v_half(ranks: int, microbatches: int, virtual: int) -> list[list[Action]]:
    """V-Half: half of 1F1B's memory; a micro-batch waits for one pass at each rank on its way up.

    The weight halves leave their places in the block to fill the gaps at the step's beginning and end.
    """
    orders = [
        [action for action in _repeated(rank, ranks, microbatches, (1, 2, 1, 2)) if action.op is not Op.BACKWARD_WEIGHT]
        for rank in range(ranks)
    ]
    tried = (_filled(orders, microbatches, memory) for memory in count(ranks + 2))
    return next(filled for filled in tried if all(len(order) == INTERVAL * microbatches for order in filled))


def _filled(orders: list[list[Action]], microbatches: int, memory: int) -> list[list[Action]]:
    """Orders with weight halves in their gaps; not to the end where a rank waits for memory that is never free."""
    ranks = len(orders)
    play = Play(ranks, microbatches, StageDurations(), vee_shaped(ranks, 2))
    play.run(fill(play, orders, memory))
    return play.orders


def _repeated(rank: int, ranks: int, microbatches: int, paces: tuple[int, int, int, int]) -> list[Action]:
    stages = (rank, 2 * ranks - 1 - rank)
    begins = sorted(
        (begin + INTERVAL * m, op, m, stages[side])
        for m in range(microbatches) for (op, side), begin in _block(ranks, paces)[rank].items()
    )
    return [Action(op, stage, m) for _, op, m, stage in begins]


@cache
def _block(ranks: int, paces: tuple[int, int, int, int]) -> list[dict[tuple[Op, int], int]]:
    """For each rank, when the first micro-batch's passes begin, if a pass takes 1.

    Args:
        paces: from one rank to the next: of a forward down and up, and of the gradient down and up.

    The turns at the ends of the V wait for as short as they can, so that no two passes of the repeated block meet.
    """
    for waits in sorted(product(range(INTERVAL), repeat=3), key=lambda waits: (sum(waits), waits)):
        block = [_begins(rank, ranks, paces, waits) for rank in range(ranks)]
        if all(len({begin % INTERVAL for begin in begins.values()}) == len(begins) for begins in block):
            return [_with_weights(begins) for begins in block]
    raise AssertionError(f"no block of {ranks} ranks has room for paces {paces}")


def _begins(rank: int, ranks: int, paces: tuple[int, ...], waits: tuple[int, ...]) -> dict[tuple[Op, int], int]:
    begin, begins = 0, {}
    legs = ((Op.FORWARD, DOWN), (Op.FORWARD, UP), (Op.BACKWARD_INPUT, UP), (Op.BACKWARD_INPUT, DOWN))
    for (op, side), pace, wait, back in zip(legs, paces, (*waits, 0), (False, True, False, True), strict=True):
        begins[op, side] = begin + pace * (ranks - 1 - rank if back else rank)
        begin += pace * (ranks - 1) + 1 + wait
    return begins


def _with_weights(begins: dict[tuple[Op, int], int]) -> dict[tuple[Op, int], int]:
    """The weight halves take the next gap after their input halves."""
    free = set(range(INTERVAL)) - {begin % INTERVAL for begin in begins.values()}
    for side in (UP, DOWN):
        after = begins[Op.BACKWARD_INPUT, side] + 1
        begins[Op.BACKWARD_WEIGHT, side] = min(after + (gap - after) % INTERVAL for gap in free)
        free.discard(begins[Op.BACKWARD_WEIGHT, side] % INTERVAL)
    return begins
