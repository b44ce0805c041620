"""DualPipe: two streams of micro-batches from both ends of the pipeline overlap forwards with backwards."""

from __future__ import annotations

from collections import deque

from shoal.pipeline.program import Action
from shoal.pipeline.schedules.placement import MicroBatchCursor


def dualpipe(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """DualPipe: half of the micro-batches go down the ranks through one copy of the model, half up through another."""
    half = microbatches // 2
    down, up = MicroBatchCursor(rank, range(half)), MicroBatchCursor(2 * ranks - 1 - rank, range(half, microbatches))
    near, far = (down, up) if rank < ranks // 2 else (up, down)
    return _both_ways(near, far, min(rank, ranks - 1 - rank), ranks // 2, max(microbatches - half, ranks))


def dualpipe_v(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """DualPipeV: half of DualPipe's ranks; the second stream is the first one returning from the turn of the V."""
    near, far = MicroBatchCursor(rank, microbatches), MicroBatchCursor(2 * ranks - 1 - rank, microbatches)
    return _both_ways(near, far, rank, ranks, max(microbatches, 2 * ranks))


def refuses(ranks: int, microbatches: int, virtual: int) -> str:
    """Return why DualPipe does not support these sizes, or ""; it needs even ranks and two micro-batches."""
    if ranks % 2:
        near = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        return f"dualpipe needs an even number of pipeline ranks, not {ranks}; take {near}, or dualpipev for any number"
    if microbatches < 2:
        return f"dualpipe needs a micro-batch for each of its two copies, not {microbatches} in all; take 2, or zb-v"
    return ""


def _both_ways(near: MicroBatchCursor, far: MicroBatchCursor, place: int, half: int, full: int) -> list[Action]:
    """Build the eight phases of a rank at position ``place`` between the outer end (0) and the middle (``half`` - 1).

    Args:
        near: the stage whose micro-batches come from the outer end.
        far: the stage whose micro-batches come from the middle.
        full: micro-batches of each.
    """
    order: list[Action] = []
    owed: deque[MicroBatchCursor] = deque()  # weight halves, oldest first

    def split(stage: MicroBatchCursor) -> list[Action]:
        owed.append(stage)
        return stage("I")

    def weight() -> list[Action]:
        return owed.popleft()("W")

    for _ in range(2 * (half - place - 1)):
        order += near("F")
    for _ in range(place + 1):
        order += near("F") + far("F")
    for _ in range(half - place - 1):
        order += split(far) + weight() + far("F")
    for _ in range(full - 2 * half + place + 1):  # the steady state; DualPipe overlaps the two passes of each pair
        order += near("F") + far("B") + far("F") + near("B")
    for _ in range(half - place - 1):
        order += far("B") + far("F") + near("B")
    for turn in range(2 * (place + 1)):
        stage = near if turn % 2 else far
        order += split(stage) if turn >= place + 1 else stage("B")  # the second half is split
    for _ in range(half - place - 1):
        order += weight() + split(near)
    for _ in range(place + 1):
        order += weight()
    return order
