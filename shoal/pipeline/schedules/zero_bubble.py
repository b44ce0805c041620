"""Zero-bubble schedules: split the backward and fill gaps with weight-gradient halves."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipeline.program import Action, Op
from shoal.pipeline.schedules.one_f_one_b import interleave, split_rounds


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
    return _halves([range(microbatches)], [rank], ahead=ahead, behind=memory - 1 - ahead)


def interleaved(rank: int, ranks: int, microbatches: int, virtual: int) -> list[Action]:
    """Interleaved 1F1B with split backwards: ZB-H1's bubble over ``virtual``, and 1F1B's memory on every rank."""
    rounds, stages = split_rounds(ranks, microbatches), range(rank, ranks * virtual, ranks)
    return _halves(rounds, stages, ahead=(virtual - 1) * len(rounds[0]) + ranks - rank - 1, behind=rank)


def _halves(rounds: list[range], stages: Sequence[int], *, ahead: int, behind: int) -> list[Action]:
    """Alternate a forward, the input half of an earlier micro-batch and the weight half of a still earlier one."""
    back = [(stage, m) for r in rounds for stage in reversed(stages) for m in r]
    return interleave(
        (0, [Action(Op.FORWARD, stage, m) for r in rounds for stage in stages for m in r]),
        (ahead, [Action(Op.BACKWARD_INPUT, stage, m) for stage, m in back]),
        (ahead + behind, [Action(Op.BACKWARD_WEIGHT, stage, m) for stage, m in back]),
    )
