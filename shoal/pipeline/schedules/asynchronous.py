"""Asynchronous pipeline schedules: a stage updates its weights while micro-batches are in flight.

Passes are in 1F1B's order. Schedules differ in when the optimizer steps and which weight version a pass uses. A
micro-batch uses the same version in its backward as in its forward. Version v of a stage is its weights after v updates
since the program began; a STEP names the version that it creates. Each trainer step drains the pipeline at its end, so
a step with a single update is identical to 1F1B.
"""

from __future__ import annotations

from shoal.pipeline.program import Action, Op
from shoal.pipeline.schedules.looped_schedules import one_f_one_b


def pipedream(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """PipeDream with weight stashing: update after every micro-batch; each forward uses the newest weights.

    W(m+1) = W(m) - rate x gradient at W(max(0, m - (ranks - rank - 1))): the first stage has the largest delay, the
    last has none. A rank keeps as many versions as micro-batches are in flight: ``ranks - rank``.
    """
    order = one_f_one_b(rank, ranks, microbatches, virtual)
    if microbatches == 1:
        return order
    actions: list[Action] = []
    newest, used = 0, {}
    for action in order:
        if action.op is Op.FORWARD:
            used[action.microbatch] = newest
        actions.append(action._replace(version=used[action.microbatch]))
        if action.op is Op.BACKWARD:
            newest += 1
            actions.append(Action(Op.STEP, rank, version=newest))
    return actions


def pipedream_2bw(rank: int, ranks: int, microbatches: int, virtual: int, every: int = 0) -> list[Action]:
    """PipeDream-2BW: update after every ``every`` micro-batches, with a delay of one update on every stage.

    W(u+1) = W(u) - rate x gradient at W(max(0, u - 1)). Two versions suffice: with ``every >= ranks``, no micro-batch
    of update u - 1 is still in flight when the first of update u + 1 starts.

    Args:
        every: micro-batches per update (default: the number of ranks); the last update takes the remainder.
    """
    order = one_f_one_b(rank, ranks, microbatches, virtual)
    groups = update_groups(microbatches, every or ranks)
    if len(groups) == 1:
        return order
    update = {m: u for u, group in enumerate(groups) for m in group}
    actions: list[Action] = []
    for action in order:
        u = update[action.microbatch]
        actions.append(action._replace(version=max(0, u - 1)))
        if action.op is Op.BACKWARD and action.microbatch == groups[u][-1]:
            actions.append(Action(Op.STEP, rank, version=u + 1))
    return actions


def update_groups(microbatches: int, every: int) -> list[range]:
    """Return the micro-batches of each update: ``every`` each; the last update also takes the remainder.

    >>> update_groups(7, 3), update_groups(2, 3)
    ([range(0, 3), range(3, 7)], [range(0, 2)])
    """
    starts = [0, *(u * every for u in range(1, microbatches // every))]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], microbatches], strict=True)]
