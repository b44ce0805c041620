"""The automatic scheduler: the order of the halves for given times and a given memory.

A free rank decides what to do next by the rules of Qi et al. 2024, section 3.1: gradients of inputs first, since others
wait for them; forwards while there is room; gradients of weights where there would be a gap or no room. The rules have
a few settings. The orders of each are simulated, and so are the published orders that fit in the memory; the shortest
is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from shoal.base.errors import UsageError
from shoal.pipeline.program import Action, Program, StageDurations
from shoal.pipeline.schedules import one_f_one_b, zero_bubble
from shoal.pipeline.schedules.greedy import Choice, F, GreedyScheduler, I
from shoal.pipeline.schedules.placement import looped

ROUNDING = 1e-9


def zb_auto(
    ranks: int,
    microbatches: int,
    times: StageDurations | None = None,
    memory: int | Sequence[int] | None = None,
    placement: tuple[int, ...] | None = None,
    kept: float = 1.0,
) -> list[list[Action]]:
    """Each rank's order.

    Args:
        times: of the passes of one stage and of a message; by default all alike, and messages take none.
        memory: the most activations alive on a rank, or on each, counted in one stage's for one micro-batch; by
            default 1F1B's on its first rank.
        placement: the rank of each stage; by default one stage a rank.
        kept: share of an activation that is still alive between the halves of its backward (M_W / M_B; Qi et al. 2024,
            table 1: 32 / (34 + 5 a s / h) for a transformer layer).

    Raises:
        UsageError: a rank has less memory than its stages need for one micro-batch.
    """
    times, placement = times or StageDurations(), placement or looped(ranks, 1)
    held = [placement.count(rank) for rank in range(ranks)]
    limits = [memory] * ranks if isinstance(memory, int) else list(memory or [ranks * held[0]] * ranks)
    if len(limits) != ranks or any(limit < stages for limit, stages in zip(limits, held, strict=True)):
        raise UsageError(
            f"zb-auto: memory for {' '.join(map(str, limits))} activations on {ranks} pipeline ranks, which hold "
            f"{' '.join(map(str, held))} stages: each needs room for one of every stage that it holds, at least"
        )
    return min(
        _ways(microbatches, times, limits, placement, kept),
        key=lambda orders: _cost(Program(tuple(map(tuple, orders)), placement, microbatches), times),
    )


def as_1f1b(ranks: int, microbatches: int, virtual: int) -> list[list[Action]]:
    """With equal times and the memory that 1F1B needs on its first rank."""
    return zb_auto(ranks, microbatches)


def _ways(
    microbatches: int, times: StageDurations, limits: list[int], placement: tuple[int, ...], kept: float
) -> Iterator[list[list[Action]]]:
    """The orders of which the best is taken; the first of equals."""
    ranks = len(limits)
    memory = min(*limits, 2 * ranks - 1) if placement == looped(ranks, 1) else 0
    if memory >= ranks:
        halves = [partial(zero_bubble.zero_bubble_with_memory, memory=held) for held in (memory, ranks)]
        for order in (*halves, partial(one_f_one_b.one_f_one_b, virtual=1)):
            yield [order(rank, ranks, microbatches) for rank in range(ranks)]
    for patience, lead in product((0.0, 0.5, 1.0), (2, 1, microbatches)):
        scheduler = GreedyScheduler(microbatches, times, placement, kept)
        yield scheduler.run(_rules(scheduler, limits, patience, lead))


def _cost(program: Program, times: StageDurations) -> tuple[float, float]:
    """The longest time from a rank's first computation to its last, and the time of the whole step."""
    from shoal.pipeline.simulator import ActionTimes, MessageTimes, simulate  # which need numpy

    timeline = simulate(program, ActionTimes(*times[:3]), MessageTimes(latency=times.communication))
    return float(timeline.own_span.max()), timeline.compute_span


def _rules(scheduler: GreedyScheduler, limits: list[int], patience: float, lead: int) -> Choice:
    """Decide by the rules.

    Args:
        patience: a gap of less than this many weight halves is left empty, where it is known to end so soon.
        lead: how many micro-batches more than the next stage has begun a stage may have begun, beyond 1F1B's one.
    """

    def room(rank: int, place: int) -> bool:
        """Whether a rank may begin a forward of its stage at a place: the stages after it keep one activation each.

        So the oldest micro-batch always finds room on its way, and the step cannot lock up.
        """
        return scheduler.alive[rank] + len(scheduler.stages[rank]) - place <= limits[rank] + ROUNDING

    def choose(rank: int, now: float) -> Action | None:
        stages = scheduler.stages[rank]
        soonest = None
        for op, order in ((I, stages), (F, stages[::-1])):
            for stage in order:
                reached = scheduler.reached(op, stage)
                if reached is None:
                    continue
                if op is F and not (room(rank, stages.index(stage)) and not_too_far(stage)):
                    continue
                if reached <= now:
                    return Action(op, stage, scheduler.done[op, stage])
                soonest = reached if soonest is None else min(soonest, reached)
        if soonest is not None and soonest < now + patience * scheduler.times.weight:
            return None
        return scheduler.owed(rank)

    def not_too_far(stage: int) -> bool:
        if stage == len(scheduler.placement) - 1:
            return True
        return scheduler.done[F, stage] - scheduler.done[F, stage + 1] <= lead

    return choose
