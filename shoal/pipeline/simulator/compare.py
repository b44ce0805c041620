"""Comparison of named schedules, simulated with the same times per copy of the model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import PositiveInt

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import read_text
from shoal.pipeline.from_layout import VIRTUAL
from shoal.pipeline.program import Program, StageDurations, build_program
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.schedules.auto import zb_auto
from shoal.pipeline.schedules.file import load_csv
from shoal.pipeline.schedules.placement import looped
from shoal.pipeline.simulator.engine import Disturbance, check_size, simulate
from shoal.pipeline.simulator.theory import EqualStages
from shoal.pipeline.simulator.timeline import Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes

AUTOMATIC = {"zb-auto": 1.0, "zb-1p": 1.0, "zb-2p": 2.0}
"""Names of the automatic schedule, with the memory limit of each in units of 1F1B's."""
ALIASES = {
    "interleaved": "interleaved-1f1b",
    "pipedream-flush": "1f1b",
    "zero-bubble": "zb-h1",
    "breadth-first": "looped-bfs",
}
SLICES = 4
"""Default number of slices per sequence for schedules that slice."""


@dataclass(frozen=True)
class PlayedSchedule:
    """Result of simulating one schedule.

    Attributes:
        name: name of the schedule or of its file.
        timeline: the simulated step.
        step: parameters for the closed forms; None where these do not apply (message times, noise or slices).
        estimated_seconds: estimated step time, if the times are estimates. Exceeds the timeline's where ranks share
            fewer cores, or where hosts take longer to launch the step.
    """

    name: str
    timeline: Timeline
    step: EqualStages | None = None
    estimated_seconds: float | None = None


def compare_schedules(
    schedules: str | Sequence[str] = "1f1b", *, file: str | Path | Program | None = None, pp: PositiveInt = 4,
    microbatches: PositiveInt = 8, virtual_stages: int | None = None, slices: int | None = None, dp: PositiveInt = 1,
    tp: PositiveInt = 1, forward: float = 1.0,
    backward_input: float = 1.0, backward_weight: float = 1.0, pair: float | None = None, comm: float = 0.0,
    latency: float = 0.0, blocking: bool = False, reduce: float = 0.0, step: float = 0.0, memory: float | None = None,
    kept_for_weight: float = 1.0, stragglers: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None, jitter: float = 0.0, seed: int = 0,
) -> list[PlayedSchedule]:  # fmt: skip
    """Simulate one step of several pipeline schedules with the same times, in any one unit.

    Args:
        schedules: a name as in a layout, or several; also zb-1p and zb-2p, the automatic schedule with once and twice
            the memory of 1f1b. Hyphens, underscores and capitals do not matter. Duplicates are ignored.
        file: a schedule in the format of torch.distributed.pipelining, or a program, simulated first. It sets the
            number of pipeline ranks and micro-batches.
        pp: pipeline ranks.
        microbatches: micro-batches per step.
        virtual_stages: stages per rank, for schedules that leave it open (default: 2).
        slices: slices of each sequence, sent separately (default: 4 for terapipe, 1 for others); of terapipe alone
            if it is one of the schedules.
        dp: replicas of the pipeline.
        tp: tensor-parallel ranks of each pipeline rank, which run in lockstep.
        forward: time of one micro-batch's forward through a rank's share of one copy of the model.
        backward_input: time of the first half of its backward, the gradient of the input.
        backward_weight: time of its second half, the gradients of the weights.
        pair: time of a forward and a backward computed together (default: the sum of both).
        comm: time of a message on its link.
        latency: time from a message's end on its link to its arrival.
        blocking: whether a message also occupies its sender.
        reduce: time of a stage's gradient reduction.
        step: time of the optimizer.
        memory: activation memory of zb-auto per rank, relative to that of 1f1b's first rank.
        kept_for_weight: share of an activation that stays alive between the two halves of its backward.
        stragglers: map from a rank, counted over pp x dp x tp, to the factor on its computing times.
        slow_links: map from two such ranks to the factor on the messages between them, in both directions.
        jitter: relative standard deviation of every computation's time.
        seed: random seed of the jitter.

    Raises:
        UsageError: an unknown schedule, unsupported sizes, an argument that no schedule reads, or
            a rank, a link or a file that does not exist.

    >>> import shoal
    >>> for played in shoal.compare_schedules(["1f1b", "zb-h1"], pp=4, microbatches=8):
    ...     print(played.name, played.timeline.step_time)
    1f1b 33.0
    zb-h1 27.0
    """
    names = schedule_names(schedules)
    check_arguments(names, str(file), virtual_stages=virtual_stages, slices=slices, memory=memory, pair=pair)
    if not forward + backward_input + backward_weight:
        raise UsageError("--forward, --backward-input and --backward-weight are all 0: there is nothing to play")
    if slow_links and not comm + latency:
        raise UsageError("--slow-link: messages take no time, so no link is slow; give --comm or --latency too")
    disturbance = Disturbance(stragglers or {}, slow_links or {}, jitter, seed)
    links = MessageTimes(comm, latency, blocking=blocking)
    durations = StageDurations(forward, backward_input, backward_weight, comm)
    closed = not (comm or latency or jitter or stragglers or (slices or 1) > 1)
    read = [] if file is None else [("program", file) if isinstance(file, Program) else _read(Path(file))]
    for _, program in read:
        pp, microbatches = program.ranks, program.microbatches

    check_size(pp, microbatches, dp, disturbance, (virtual_stages or VIRTUAL) * (slices or 1))

    def programs() -> Iterator[tuple[str, Program]]:
        yield from read
        for name in names:
            cut = slices if name == "terapipe" or "terapipe" not in names else None
            yield name, _program(name, pp, microbatches, virtual_stages, cut, durations, memory, kept_for_weight)

    found = []
    for name, program in programs():
        # A rank's share of one model copy is the same for all schedules, so each stage's share differs.
        share = pp / program.depth
        equal = EqualStages(
            pp, microbatches, program.stages // pp, share * forward, share * backward_input,
            share * backward_weight, None if pair is None else share * pair,
        )  # fmt: skip
        times = ActionTimes(equal.f, equal.b, equal.w, pair=equal.pair, reduce=reduce, step=step)
        timeline = simulate(program, times, links, disturbance=disturbance, dp=dp, tp=tp)
        found.append(PlayedSchedule(name, timeline, equal if closed else None))
    return found


def schedule_names(given: str | Sequence[str]) -> list[str]:
    """Return the canonical name of a schedule, or of several, each once; see `schedule_name` for the errors."""
    return list(dict.fromkeys(schedule_name(name) for name in ([given] if isinstance(given, str) else given)))


def schedule_name(name: str) -> str:
    """Return the canonical name of a schedule, ignoring hyphens, underscores and case.

    >>> schedule_name("ZBV"), schedule_name("interleaved")
    ('zb-v', 'interleaved-1f1b')

    Raises:
        UsageError: no schedule has this name.
    """
    names = {*EVERY, *AUTOMATIC}
    plain = {_plain(known): known for known in names} | {_plain(a): known for a, known in ALIASES.items()}
    if _plain(name) not in plain:
        near = [plain[match] for match in difflib.get_close_matches(_plain(name), plain, n=1)]
        raise UsageError(f"there is no schedule '{name}'; {did_you_mean(near[0] if near else name, names)}")
    return plain[_plain(name)]


def check_arguments(
    names: Collection[str], file: str = "", *, virtual_stages: int | None = None, slices: int | None = None,
    memory: float | None = None, pair: float | None = None,
) -> None:  # fmt: skip
    """Reject arguments that no schedule reads.

    Args:
        names: from `schedule_name`.
        file: schedule file, named in the message if no schedule is.

    Raises:
        UsageError: the message names the argument and the schedules that read it.
    """
    if slices is not None and not set(names) - set(AUTOMATIC):
        raise UsageError(f"--slices {slices}: nothing that is played cuts sequences at will.\n  Leave it out.")
    for option, given, users in (
        ("virtual-stages", virtual_stages, [name for name, schedule in EVERY.items() if schedule.virtual is None]),
        ("memory", memory, ["zb-auto"]),
        ("pair", pair, ["dualpipe", "dualpipev"]),
    ):
        if given is not None and not set(users) & set(names):
            raise UsageError(f"--{option} {given}: only for {', '.join(users)}, not {', '.join(names) or file}")


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())


def _read(file: Path) -> tuple[str, Program]:
    return file.stem, load_csv(read_text(file), str(file))


def _program(
    name: str, pp: int, microbatches: int, virtual_stages: int | None, slices: int | None, times: StageDurations,
    memory: float | None, kept_for_weight: float,
) -> Program:  # fmt: skip
    if name in AUTOMATIC:
        limit = max(1, round((memory or AUTOMATIC[name]) * pp))
        orders = zb_auto(pp, microbatches, times, memory=limit, kept=min(1.0, kept_for_weight))
        return Program(tuple(map(tuple, orders)), looped(pp, 1), microbatches)
    schedule = EVERY[name]
    virtual = schedule.virtual or virtual_stages or VIRTUAL
    if reason := schedule.refuses(pp, microbatches, virtual):
        raise UsageError(f"--pp {pp} --microbatches {microbatches}: {reason}")
    sliced = slices or (SLICES if name == "terapipe" else 1)
    return build_program(
        schedule, pp, microbatches, virtual_stages=virtual, sequence_slices=sliced, transfers=False
    )
