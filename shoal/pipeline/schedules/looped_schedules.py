"""Schedules on looped stages: naive, GPipe, breadth-first, 1F1B and zero bubble.

Zero-bubble schedules split the backward and fill gaps with weight-gradient halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shoal.pipeline.program import Action, Op


def naive(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Layer split without pipelining: each micro-batch finishes its backward before the next one starts."""
    return [Action(op, rank, m) for m in range(microbatches) for op in (Op.FORWARD, Op.BACKWARD)]


def breadth_first(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Looped breadth-first: each stage runs every micro-batch before the rank's next stage starts; GPipe on one stage.

    The bubble is as small as the interleaved schedule's, but all micro-batches stay alive. A stage's weights are used
    in one contiguous block, so ZeRO-3 could gather them once for all micro-batches.
    """
    stages = range(rank, ranks * virtual, ranks)
    return [Action(Op.FORWARD, stage, m) for stage in stages for m in range(microbatches)] + [
        Action(Op.BACKWARD, stage, m) for stage in reversed(stages) for m in range(microbatches)
    ]


def one_f_one_b(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """1F1B: warm up, then alternate one forward and one backward, then drain.

    Keeps at most ``ranks - rank`` micro-batches alive; GPipe keeps all of them. The bubble is the same.
    """
    warmup = min(ranks - rank - 1, microbatches)
    order = [Action(Op.FORWARD, rank, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        order += [Action(Op.FORWARD, rank, warmup + m), Action(Op.BACKWARD, rank, m)]
    return order + [Action(Op.BACKWARD, rank, m) for m in range(microbatches - warmup, microbatches)]


def interleaved_1f1b(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Interleaved 1F1B: alternate between the rank's stages, each running about as many micro-batches as ranks."""
    if virtual == 1:
        return one_f_one_b(rank, ranks, microbatches, virtual)
    rounds, stages = split_rounds(ranks, microbatches), range(rank, ranks * virtual, ranks)
    ahead = 2 * (ranks - rank - 1) + (virtual - 1) * len(rounds[0])  # forwards before the first backward
    return interleave(
        (0, [Action(Op.FORWARD, stage, m) for r in rounds for stage in stages for m in r]),
        (ahead, [Action(Op.BACKWARD, stage, m) for r in rounds for stage in reversed(stages) for m in r]),
    )


def zb_h1(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """ZB-H1: 1F1B's memory and a third of its bubble."""
    return zero_bubble_with_memory(rank, ranks, microbatches, memory=ranks)


def zb_h2(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """ZB-H2: no bubble, with nearly twice 1F1B's memory."""
    return zero_bubble_with_memory(rank, ranks, microbatches, memory=2 * ranks - 1)


def zero_bubble_with_memory(rank: int, ranks: int, microbatches: int, *, memory: int) -> list[Action]:
    """Interpolate from ZB-H1 (``memory`` = p) to ZB-H2 (2p - 1); each extra activation fills one gap.

    Every rank keeps ``memory`` activations alive: first by early forwards, and at the end by delayed weight halves,
    which fill the gaps there.
    """
    later = ranks - rank - 1
    ahead = later + min(later, memory - ranks)
    return _split_backwards([range(microbatches)], [rank], ahead=ahead, delay=memory - 1 - ahead)


def interleaved_zb(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Interleaved 1F1B with split backwards: ZB-H1's bubble over ``virtual``, and 1F1B's memory on every rank."""
    rounds, stages = split_rounds(ranks, microbatches), range(rank, ranks * virtual, ranks)
    return _split_backwards(rounds, stages, ahead=(virtual - 1) * len(rounds[0]) + ranks - rank - 1, delay=rank)


def _split_backwards(rounds: list[range], stages: Sequence[int], *, ahead: int, delay: int) -> list[Action]:
    """Alternate a forward, the input half of an earlier micro-batch and the weight half of a still earlier one."""
    back = [(stage, m) for r in rounds for stage in reversed(stages) for m in r]
    return interleave(
        (0, [Action(Op.FORWARD, stage, m) for r in rounds for stage in stages for m in r]),
        (ahead, [Action(Op.BACKWARD_INPUT, stage, m) for stage, m in back]),
        (ahead + delay, [Action(Op.BACKWARD_WEIGHT, stage, m) for stage, m in back]),
    )


def split_rounds(ranks: int, microbatches: int) -> list[range]:
    """Return the groups of micro-batches that a rank's stages process alternately: p per group, or slightly more.

    If p does not divide the number, the remainder is spread over the groups, with longer groups first. So no rank waits
    for a micro-batch to return, and the last stage always has the input of its backward.
    """
    rounds = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, rounds)  # micro-batches per round; number of rounds with one more
    begins = [r * size + min(r, longer) for r in range(rounds + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]


def interleave(*passes: tuple[int, list[Action]]) -> list[Action]:
    """Alternate between kinds of passes, each kind starting at its own turn."""
    turns = max(late + len(actions) for late, actions in passes)
    columns = [[None] * late + actions + [None] * (turns - late - len(actions)) for late, actions in passes]
    return [action for turn in zip(*columns, strict=True) for action in turn if action is not None]
