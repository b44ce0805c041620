"""GPipe (all forwards, then all backwards), and the naive and breadth-first schedules."""

from __future__ import annotations

from shoal.pipeline.program import Action, Op


def naive(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Layer split without pipelining: each micro-batch finishes its backward before the next one starts."""
    return [Action(op, rank, m) for m in range(microbatches) for op in (Op.FORWARD, Op.BACKWARD)]


def gpipe(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """GPipe: all forwards, then all backwards. Keeps the activations of every micro-batch alive."""
    return breadth_first(rank, ranks, microbatches, 1)


def breadth_first(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Looped breadth-first: each stage runs every micro-batch before the rank's next stage starts.

    The bubble is as small as the interleaved schedule's, but all micro-batches stay alive. A stage's weights are used
    in one contiguous block, so ZeRO-3 could gather them once for all micro-batches.
    """
    stages = range(rank, ranks * virtual, ranks)
    return [Action(Op.FORWARD, stage, m) for stage in stages for m in range(microbatches)] + [
        Action(Op.BACKWARD, stage, m) for stage in reversed(stages) for m in range(microbatches)
    ]
