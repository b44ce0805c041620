"""Number of ZeRO-3 gathers of each bucket per step: `shoal.engine.parallel.zero.zero3_hooks` without tensors.

The buckets of a unit (the embedding, a layer, the final norm and head) are gathered before use, together with the next
units' buckets. They are freed after the unit's forward, unless its backward comes next, and after its backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipeline.program import BACKWARDS, FORWARDS, Action, Op
from shoal.spec.layout import Layout


def gathers_of(
    layout: Layout, units: Sequence[Sequence[int]], actions: Sequence[Action], stage: int
) -> list[int]:
    """Return how often each bucket of a stage is gathered per step.

    Args:
        units: for each unit of the stage, the numbers of the buckets it needs.
        actions: actions of the rank.
        stage: one of its stages.
    """
    mine = [action for action in actions if action.stage == stage]
    keep = len(units) if not layout.reshard_after_forward else int(_backward_follows(mine))
    kept = range(len(units) - keep, len(units))
    there: set[int] = set()
    found, version = [0] * (1 + max(bucket for unit in units for bucket in unit)), None

    def use(several: Sequence[int]) -> None:
        for bucket in {bucket for unit in several for bucket in units[unit]} - there:
            found[bucket] += 1
            there.add(bucket)

    for action in actions:
        if action.op is Op.STEP:  # the shards have changed
            there.clear()
        if action.stage != stage or action.op not in FORWARDS | BACKWARDS:
            continue
        if action.version != version:  # other weights are used from here on
            version = action.version
            there.clear()
        for unit in range(len(units)) if action.op in FORWARDS else range(len(units))[::-1]:
            if action.op in FORWARDS:
                ahead = range(unit, min(unit + layout.prefetch + 1, len(units)))
                use(ahead)
                if unit not in kept:
                    there -= set(units[unit]) - {bucket for other in ahead[1:] for bucket in units[other]}
            else:
                use(range(unit, max(-1, unit - layout.prefetch - 1), -1))
                first_used = set(units[unit]) - {bucket for other in range(unit) for bucket in units[other]}
                there -= first_used
    return found


def _backward_follows(actions: Sequence[Action]) -> bool:
    """Return whether the micro-batch's backward comes before the stage's next forward."""
    order = [action.op for action in actions if action.op in FORWARDS | BACKWARDS]
    return all((op in FORWARDS) == (i % 2 == 0) for i, op in enumerate(order))
