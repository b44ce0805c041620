"""A step played in time, of which every rank decides as it goes what it does next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from shoal.pipeline.program import Action, Op, StageDurations

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741
Choice = Callable[[int, float], Action | None]  # what a rank that is free does now, or nothing until more has arrived


class Play:
    """A step that is being played: what each rank has done, and what has reached it by when."""

    def __init__(
        self, ranks: int, microbatches: int, times: StageDurations, placement: tuple[int, ...], kept: float = 1.0
    ):
        self.times, self.placement, self.microbatches = times, placement, microbatches
        self.lasting = {F: times.forward, B: times.input + times.weight, I: times.input, W: times.weight}
        self.stages = [[s for s, holder in enumerate(placement) if holder == rank] for rank in range(ranks)]
        last = len(placement) - 1
        # When what the k-th forward or backward of a stage needs has reached it.
        self.arrived: dict[tuple[Op, int], list[float]] = {(op, s): [] for op in (F, I) for s in range(last + 1)}
        self.arrived[F, 0] = [0.0] * microbatches
        self.done = {(op, s): 0 for op in (F, I, W) for s in range(last + 1)}
        self.alive = [0.0] * ranks
        self.change = {F: 1.0, B: -1.0, I: kept - 1.0, W: -kept}
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]

    def run(self, choose: Choice) -> tuple[float, float]:
        """Play to the end.

        Returns:
            the longest time from a rank's first computation to its last, and the time of the whole step.
        """
        ranks = range(len(self.stages))
        busy_until = [0.0] * len(ranks)
        begun: list[float | None] = [None] * len(ranks)
        events = [(0.0, rank) for rank in ranks]
        while events:
            now, rank = heapq.heappop(events)
            if busy_until[rank] > now:
                continue
            action = choose(rank, now)
            if action is None:
                continue
            end = busy_until[rank] = now + self.lasting[action.op]
            begun[rank] = now if begun[rank] is None else begun[rank]
            heapq.heappush(events, (end, rank))
            for arrival, other in self._do(rank, action, end):
                heapq.heappush(events, (arrival, other))
        longest = max(end - (begin or 0.0) for begin, end in zip(begun, busy_until, strict=True))
        return longest, max(busy_until)

    def _do(self, rank: int, action: Action, end: float) -> Iterator[tuple[float, int]]:
        stage, last = action.stage, len(self.placement) - 1
        self.orders[rank].append(action)
        for half in (I, W) if action.op is B else (action.op,):
            self.done[half, stage] += 1
        self.alive[rank] += self.change[action.op]
        if action.op is F and stage == last:
            self.arrived[I, stage].append(end)
        if action.op is W or (action.op is F and stage == last) or (action.op is not F and stage == 0):
            return
        op, target = (F, stage + 1) if action.op is F else (I, stage - 1)
        far = self.placement[target] != rank
        arrival = end + self.times.communication if far else end
        self.arrived[op, target].append(arrival)
        yield arrival, self.placement[target]

    def reached(self, op: Op, stage: int) -> float | None:
        """When the next pass of a stage has all that it needs; None while that is not known, or when none is left."""
        turn = self.done[op, stage]
        return self.arrived[op, stage][turn] if turn < len(self.arrived[op, stage]) else None

    def owed(self, rank: int) -> Action | None:
        """The weight half that has waited longest."""
        owing = [stage for stage in self.stages[rank] if self.done[W, stage] < self.done[I, stage]]
        if not owing:
            return None
        stage = min(owing, key=lambda stage: self.done[W, stage])
        return Action(W, stage, self.done[W, stage])


def follow(play: Play, orders: list[list[Action]]) -> Choice:
    """Do what an order says, as soon as it can be done."""

    def choose(rank: int, now: float) -> Action | None:
        place = len(play.orders[rank])
        if place == len(orders[rank]):
            return None
        action = orders[rank][place]
        if action.op is W:
            return action
        reached = play.reached(F if action.op is F else I, action.stage)
        return action if reached is not None and reached <= now else None

    return choose


def fill(play: Play, orders: list[list[Action]], memory: float) -> Choice:
    """Do what an order without weight halves says, and those where it leaves a gap or ``memory`` is full."""
    place = [0] * len(orders)

    def choose(rank: int, now: float) -> Action | None:
        if place[rank] < len(orders[rank]):
            action = orders[rank][place[rank]]
            reached = play.reached(action.op, action.stage)
            room = action.op is not F or play.alive[rank] + 1 <= memory
            if reached is not None and reached <= now and room:
                place[rank] += 1
                return action
        return play.owed(rank)

    return choose
