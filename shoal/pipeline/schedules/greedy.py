"""Greedy scheduling: each rank picks its next action whenever it is free."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from math import inf

from shoal.pipeline.program import Action, Op, StageDurations

F, I, W = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741
Choice = Callable[[int, float], Action | None]  # what a free rank does next, or None to wait for the next arrival


class GreedyScheduler:
    """State of a greedily scheduled step: what each rank has done and when results arrive. Backwards are split.

    The resulting orders are timed by `shoal.pipeline.simulator`.

    Args:
        times: times of the passes of one stage, and of a message.
        placement: the rank of each stage.
        kept: share of an activation that stays alive between the halves of its backward.
    """

    def __init__(self, microbatches: int, times: StageDurations, placement: tuple[int, ...], kept: float = 1.0):
        self.times, self.placement, self.microbatches = times, placement, microbatches
        ranks = range(1 + max(placement))
        self.stages = [[s for s, holder in enumerate(placement) if holder == rank] for rank in ranks]
        # Arrival times of the input of each stage's k-th forward or backward.
        self.arrived: dict[tuple[Op, int], list[float]] = {(op, s): [] for op in (F, I) for s in range(len(placement))}
        self.arrived[F, 0] = [0.0] * microbatches
        self.done = {(op, s): 0 for op in (F, I, W) for s in range(len(placement))}
        self.alive = [0.0 for _ in ranks]
        self.change = {F: 1.0, I: kept - 1.0, W: -kept}
        self.orders: list[list[Action]] = [[] for _ in ranks]

    def run(self, choose: Choice, most_idle: float = inf) -> list[list[Action]]:
        """Let the ranks choose until none can do anything more, and return their orders.

        Args:
            most_idle: stop with no orders as soon as a rank has idled longer since its first action.
        """
        lasting = {F: self.times.forward, I: self.times.input, W: self.times.weight}
        busy_until, idle = [0.0 for _ in self.orders], [0.0 for _ in self.orders]
        events = [(0.0, rank) for rank in range(len(self.orders))]
        while events:
            now, rank = heapq.heappop(events)
            action = choose(rank, now) if busy_until[rank] <= now else None
            if action is None:
                continue
            if self.orders[rank]:
                idle[rank] += now - busy_until[rank]
                if idle[rank] > most_idle:
                    return []
            end = busy_until[rank] = now + lasting[action.op]
            heapq.heappush(events, (end, rank))
            for arrival, other in self._do(rank, action, end):
                heapq.heappush(events, (arrival, other))
        return self.orders

    def _do(self, rank: int, action: Action, end: float) -> Iterator[tuple[float, int]]:
        op, stage, last = action.op, action.stage, len(self.placement) - 1
        self.orders[rank].append(action)
        self.done[op, stage] += 1
        self.alive[rank] += self.change[op]
        if op is F and stage == last:
            self.arrived[I, stage].append(end)
        elif op is F or (op is I and stage > 0):
            target = stage + 1 if op is F else stage - 1
            far = self.placement[target] != rank
            arrival = end + self.times.communication if far else end
            self.arrived[op, target].append(arrival)
            yield arrival, self.placement[target]

    def reached(self, op: Op, stage: int) -> float | None:
        """Return when the input of a stage's next pass arrives; None if unknown or if no pass is left."""
        turn = self.done[op, stage]
        return self.arrived[op, stage][turn] if turn < len(self.arrived[op, stage]) else None

    def owed(self, rank: int) -> Action | None:
        """Return the oldest pending weight half."""
        owing = [stage for stage in self.stages[rank] if self.done[W, stage] < self.done[I, stage]]
        if not owing:
            return None
        stage = min(owing, key=lambda stage: self.done[W, stage])
        return Action(W, stage, self.done[W, stage])


def fill_gaps(scheduler: GreedyScheduler, orders: list[list[Action]], memory: float) -> Choice:
    """Follow orders without weight halves; run weight halves in gaps or when ``memory`` is full."""
    place = [0] * len(orders)

    def choose(rank: int, now: float) -> Action | None:
        if place[rank] < len(orders[rank]):
            action = orders[rank][place[rank]]
            reached = scheduler.reached(action.op, action.stage)
            fits = action.op is not F or scheduler.alive[rank] + 1 <= memory
            if reached is not None and reached <= now and fits:
                place[rank] += 1
                return action
        return scheduler.owed(rank)

    return choose
