"""Step profiles: start and end of each action of a step on every rank, in ``profile/`` of the run folder.

Each rank writes JSON lines, ``rank-*.jsonl``: a header with the program and the rank's buckets, then for each recorded
step three lists over the rank's actions (start, arrival of the awaited message, end) and its bucket reductions in the
order of their start. Times are in seconds on rank 0's clock. With a trace, torch's profiler writes
``trace-rank-*.json.gz``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from shoal.base.errors import UsageError
from shoal.base.files import read_text
from shoal.pipeline.program import Action, Op, Program

FOLDER = "profile"


class IncompleteProfileError(UsageError):
    """The files of a profile are not of all ranks of one start, which ended before each had written its own."""


class HeldBucket(NamedTuple):
    """A bucket of a rank.

    Attributes:
        bytes: gradients of the full bucket, padding included.
        shards, shard: number of its shards (1 if it is not sharded), and the one that this rank updates.
    """

    names: tuple[str, ...]
    bytes: int
    shards: int
    shard: int


@dataclass(frozen=True)
class RankProfile:
    """Recorded times of one rank: for each step, a time [s] for each action, including transfers.

    Attributes:
        reductions: for each step, the number of a bucket, the start of its reduction, and the time at which the rank
            had the result; empty in older profiles.
    """

    rank: int
    pp: int
    dp: int
    tp: int
    actions: tuple[Action, ...]
    steps: tuple[int, ...]
    begin: Sequence[Sequence[float]]
    arrived: Sequence[Sequence[float]]
    end: Sequence[Sequence[float]]
    buckets: tuple[HeldBucket, ...] = ()
    reductions: Sequence[Sequence[tuple[int, float, float]]] = ()


@dataclass(frozen=True)
class Profile:
    """Recorded times of all ranks of a run, in the order of global ranks, and the program that they ran."""

    program: Program
    layout: str
    ranks: tuple[RankProfile, ...]


TOLERANCE = 1e-3
"""Seconds by which the moments of an action may be out of order: clocks of devices are read with rounding."""

RENAMED = {"copies": "model_copies", "parts": "sequence_slices"}
"""Fields of a program under the names that older profiles have."""


def read_profile(folder: Path) -> Profile | None:
    """Read the profile of a run; None if it has none.

    Raises:
        IncompleteProfileError: a rank's file is missing, or of another start than the first rank's.
        UsageError: a file is damaged.
    """
    paths = sorted((folder / FOLDER).glob("rank-*.jsonl"))
    if not paths:
        return None
    try:
        return _profile(paths)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UsageError(
            f"{folder / FOLDER} cannot be read as a profile: {type(error).__name__}: {error}"
            "\n  Record it again (shoal train --profile), or remove the folder: the report does not need it."
        ) from None


def _read_rank(path: Path) -> tuple[dict[str, Any], RankProfile]:
    """Return what one rank recorded, and the header of its file."""
    header, *lines = map(json.loads, read_text(path).splitlines())  # written atomically, so never truncated
    actions = tuple(Action(Op(op), *map(int, numbers)) for op, *numbers in header["actions"])
    begin, arrived, end = times = tuple(
        [[float(time) for time in line[name]] for line in lines] for name in ("begin", "arrived", "end")
    )
    if any(len(step) != len(actions) for steps in times for step in steps):
        raise ValueError(f"{path.name} has steps without a time for each of its {len(actions)} actions")
    moments = zip(*(chain.from_iterable(each) for each in times), strict=True)
    if not all(-inf < b <= a + TOLERANCE and a <= e + TOLERANCE < inf for b, a, e in moments):
        raise ValueError(f"{path.name} has an action that ends before it begins")
    number, pp, dp, tp = (int(header[name]) for name in ("rank", "pp", "dp", "tp"))
    recorded = tuple(int(line["step"]) for line in lines)
    buckets = tuple(HeldBucket(tuple(names), *map(int, rest)) for names, *rest in header.get("buckets", []))
    reductions = [[(int(b), float(t), float(e)) for b, t, e in line.get("reductions", [])] for line in lines]
    return header, RankProfile(number, pp, dp, tp, actions, recorded, begin, arrived, end, buckets, reductions)


def _profile(paths: Sequence[Path]) -> Profile:
    headers, ranks = zip(*map(_read_rank, paths), strict=True)
    by_stage = {rank.pp: rank.actions for rank in ranks}
    values: dict[str, Any] = {
        RENAMED.get(name, name): tuple(v) if isinstance(v, list) else v for name, v in headers[0]["program"].items()
    }
    world = {(rank.pp, rank.dp, rank.tp) for rank in ranks}
    pp, dp, tp = (1 + max(place) for place in zip(*world, strict=True))
    stages = 1 + max(values["stage_rank"])
    recorded_by = {(header.get("start"), rank.steps) for header, rank in zip(headers, ranks, strict=True)}
    if len(world) != stages * dp * tp or len(recorded_by) > 1 or pp != stages:
        raise IncompleteProfileError(
            f"{paths[0].parent} is incomplete: it has {len(ranks)} of {stages} x {dp} x {tp} ranks, "
            f"of {len(recorded_by)} starts, as a start ended while its ranks wrote."
            "\n  Record it again (shoal train --profile)."
        )
    program = Program(tuple(by_stage[i] for i in range(stages)), **values)
    limits = (program.stages, program.microbatches, program.sequence_slices)
    for action in (action for rank in program.actions for action in rank):
        if any(not -1 <= value < limit for value, limit in zip(action[1:4], limits, strict=True)):
            raise ValueError(f"{action} is not of {limits[0]} stages, {limits[1]} micro-batches, {limits[2]} slices")
    return Profile(program, headers[0]["layout"], ranks)
