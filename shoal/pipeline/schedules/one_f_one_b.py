"""1F1B (one forward, one backward) with one stage per rank, and interleaved 1F1B with several."""

from __future__ import annotations

from itertools import pairwise

from shoal.pipeline.program import Action, Op


def one_f_one_b(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """1F1B: warm up, then alternate one forward and one backward, then drain.

    Keeps at most ``ranks - rank`` micro-batches alive; GPipe keeps all of them. The bubble is the same.
    """
    warmup = min(ranks - rank - 1, microbatches)
    order = [Action(Op.FORWARD, rank, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        order += [Action(Op.FORWARD, rank, warmup + m), Action(Op.BACKWARD, rank, m)]
    return order + [Action(Op.BACKWARD, rank, m) for m in range(microbatches - warmup, microbatches)]


def interleaved(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Interleaved 1F1B: alternate between the rank's stages, each running about as many micro-batches as ranks."""
    if virtual == 1:
        return one_f_one_b(rank, ranks, microbatches, virtual)
    rounds, stages = split_rounds(ranks, microbatches), range(rank, ranks * virtual, ranks)
    ahead = 2 * (ranks - rank - 1) + (virtual - 1) * len(rounds[0])  # forwards before the first backward
    return interleave(
        (0, [Action(Op.FORWARD, stage, m) for r in rounds for stage in stages for m in r]),
        (ahead, [Action(Op.BACKWARD, stage, m) for r in rounds for stage in reversed(stages) for m in r]),
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
