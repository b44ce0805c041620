"""Automatic scheduler: orders forwards and backward halves for given times and memory.

A free rank chooses its next action by the rules of Qi et al. 2024, section 3.1: input gradients first, since other
ranks wait for them; forwards while memory allows; weight gradients to fill a gap or to free memory. The rules have a
few settings. The scheduler simulates the order of each setting and every published order that fits in memory, and
returns the shortest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import inf

from shoal.base.errors import UsageError
from shoal.pipeline.program import Action, Program, StageDurations
from shoal.pipeline.schedules.greedy import Choice, F, GreedyScheduler, I
from shoal.pipeline.schedules.looped_schedules import one_f_one_b, zero_bubble_with_memory
from shoal.pipeline.schedules.placement import looped

ROUNDING = 1e-9


def zb_auto(
    ranks: int, microbatches: int, times: StageDurations | None = None, memory: int | None = None, kept: float = 1.0
) -> list[list[Action]]:
    """Return each rank's order, with one stage per rank.

    Args:
        times: times of the passes of a stage and of a message (default: equal passes and free messages).
        memory: maximum activations alive on a rank, in units of one stage's activation for one micro-batch (default:
            that of 1F1B's first rank).
        kept: share of an activation that stays alive between the halves of its backward (M_W / M_B; Qi et al. 2024,
            table 1: 32 / (34 + 5 a s / h) for a transformer layer).

    Raises:
        UsageError: the memory does not hold one micro-batch.
    """
    times, memory = times or StageDurations(), ranks if memory is None else memory
    if memory < 1:
        raise UsageError(f"zb-auto: memory for {memory} activations, but each pipeline rank needs memory for one")
    best: list[list[Action]] = []
    least = (inf, inf)  # no span yet
    for orders in _published(ranks, microbatches, memory):
        if (cost := _cost(orders, times)) < least:
            best, least = orders, cost
    computing = microbatches * (times.forward + times.input + times.weight)
    for patience, lead in product((0.0, 0.5, 1.0), (2, 1, microbatches)):
        scheduler = GreedyScheduler(microbatches, times, looped(ranks, 1), kept)
        most_idle = (least[0] - computing) * (1 + ROUNDING) + ROUNDING  # with more, a rank's span exceeds the least
        orders = scheduler.run(_rules(scheduler, memory, patience, lead), most_idle)
        if orders and (cost := _cost(orders, times)) < least:
            best, least = orders, cost
    return best


def _published(ranks: int, microbatches: int, memory: int) -> Iterator[list[list[Action]]]:
    """Yield the published orders that fit in memory."""
    if memory >= ranks:
        most = min(memory, 2 * ranks - 1)
        halves = [partial(zero_bubble_with_memory, memory=held) for held in (most, ranks)]
        for order in (*halves, partial(one_f_one_b, virtual=1)):
            yield [order(rank, ranks, microbatches) for rank in range(ranks)]


def _cost(orders: list[list[Action]], times: StageDurations) -> tuple[float, float]:
    """Return the longest span of a rank from its first to its last computation, and the time of the full step."""
    from shoal.pipeline.simulator import ActionTimes, MessageTimes, simulate  # imports numpy

    microbatches = 1 + max(action.microbatch for action in orders[0])
    program = Program(tuple(map(tuple, orders)), looped(len(orders), 1), microbatches)
    timeline = simulate(program, ActionTimes(*times[:3]), MessageTimes(latency=times.communication))
    return float(timeline.own_span.max()), timeline.compute_span


def _rules(scheduler: GreedyScheduler, memory: int, patience: float, lead: int) -> Choice:
    """Return the choice function of the rules.

    Args:
        patience: leave a gap empty if it is known to end within this many weight halves.
        lead: how many micro-batches a stage may start ahead of the next stage, beyond 1F1B's one.
    """
    done, last = scheduler.done, len(scheduler.orders) - 1

    def may_begin(rank: int) -> bool:
        fits = scheduler.alive[rank] + 1 <= memory + ROUNDING
        return fits and (rank == last or done[F, rank] - done[F, rank + 1] <= lead)

    def choose(rank: int, now: float) -> Action | None:
        soonest = inf
        for op in (I, F):
            reached = scheduler.reached(op, rank)
            if reached is not None and (op is I or may_begin(rank)):
                if reached <= now:
                    return Action(op, rank, done[op, rank])
                soonest = min(soonest, reached)
        if soonest < now + patience * scheduler.times.weight:
            return None
        return scheduler.owed(rank)

    return choose
