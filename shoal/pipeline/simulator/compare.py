"""Schedules by name, played side by side with the same times for one copy of the model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import UsageError, did_you_mean
from shoal.pipeline.from_layout import VIRTUAL
from shoal.pipeline.program import Program, StageDurations, build_program
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.schedules.auto import zb_auto
from shoal.pipeline.schedules.file import load_csv
from shoal.pipeline.schedules.placement import looped
from shoal.pipeline.simulator.disturbance import Disturbance
from shoal.pipeline.simulator.engine import simulate
from shoal.pipeline.simulator.theory import EqualStages
from shoal.pipeline.simulator.timeline import Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes

AUTOMATIC = {"zb-auto": 1.0, "zb-1p": 1.0, "zb-2p": 2.0}
"""Names of the automatic schedule, with the memory that each gives it, in that of 1F1B."""
ALIASES = {
    "interleaved": "interleaved-1f1b",
    "pipedream-flush": "1f1b",
    "zero-bubble": "zb-h1",
    "breadth-first": "looped-bfs",
}
SLICES = 4
"""Slices of a sequence where the schedule passes on slices and nothing is said."""


@dataclass(frozen=True)
class PlayedSchedule:
    """A schedule that was played.

    Attributes:
        name: of the schedule, or of its file.
        timeline: the step.
        step: as closed forms see it; None where they do not cover it: messages that take time, noise, slices.
        estimated_seconds: of the step, where its times are estimates. It is longer than the timeline where ranks take
            turns on fewer cores, or where hosts need longer to launch the step.
    """

    name: str
    timeline: Timeline
    step: EqualStages | None = None
    estimated_seconds: float | None = None


def compare_schedules(
    schedules: Sequence[str] = ("1f1b",), *, file: str | Path | None = None, pp: int = 4, microbatches: int = 8,
    virtual_stages: int | None = None, slices: int | None = None, dp: int = 1, tp: int = 1, forward: float = 1.0,
    backward_input: float = 1.0, backward_weight: float = 1.0, pair: float | None = None, comm: float = 0.0,
    latency: float = 0.0, blocking: bool = False, reduce: float = 0.0, step: float = 0.0, memory: float | None = None,
    kept_for_weight: float = 1.0, stragglers: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None, jitter: float = 0.0, seed: int = 0,
) -> list[PlayedSchedule]:  # fmt: skip
    """Play one step of several pipeline schedules with the same times, in one unit of your choice.

    Args:
        schedules: their names as in a layout; also zb-1p and zb-2p, the automatic schedule with once and twice the
            memory of 1f1b. Hyphens, underscores and capitals do not matter.
            Each is played once.
        file: a schedule in the format of torch.distributed.pipelining, which is played first. It says how many
            pipeline ranks and micro-batches there are.
        pp: pipeline ranks.
        microbatches: of the step.
        virtual_stages: stages on each rank, for the schedules that leave it open (default: 2).
        slices: of each sequence, passed on one by one (default: 4 for terapipe, 1 for others).
        dp: replicas of the pipeline.
        tp: tensor-parallel ranks of each pipeline rank; they move together.
        forward: time of one micro-batch's forward through all that a rank holds of one copy of the model.
        backward_input: time of the first half of its backward, the gradient of the input.
        backward_weight: time of its second half, the gradients of the weights.
        pair: time of a forward and a backward computed at once (default: one after the other).
        comm: time of a message on its link.
        latency: from a message's end on its link to its arrival.
        blocking: whether a message also occupies its sender.
        reduce: time of a stage's gradient reduction.
        step: time of the optimizer.
        memory: activations that zb-auto may keep on each rank, in those that 1f1b keeps on its first.
        kept_for_weight: share of an activation that is alive between the two halves of its backward.
        stragglers: from a rank, counted over pp x dp x tp, to the factor on its computing times.
        slow_links: from two such ranks to the factor on the messages between them, both ways.
        jitter: standard deviation of every computation's time, as a share of it.
        seed: of the jitter.

    Raises:
        UsageError: an unknown schedule, sizes that it does not allow, an argument that none of the schedules reads, or
            a rank, a link or a file that does not exist.

    >>> import shoal
    >>> for played in shoal.compare_schedules(["1f1b", "zb-h1"], pp=4, microbatches=8):
    ...     print(played.name, played.timeline.step_time)
    1f1b 33.0
    zb-h1 27.0
    """
    names = list(dict.fromkeys(schedule_name(name) for name in schedules))
    check_arguments(names, str(file), virtual_stages=virtual_stages, slices=slices, memory=memory, pair=pair)
    if not forward + backward_input + backward_weight:
        raise UsageError("--forward, --backward-input and --backward-weight are all 0: there is nothing to play")
    if slow_links and not comm + latency:
        raise UsageError("--slow-link: messages take no time, so no link is slow; give --comm or --latency too")
    disturbance = Disturbance(stragglers or {}, slow_links or {}, jitter, seed)
    links = MessageTimes(comm, latency, blocking=blocking)
    durations = StageDurations(forward, backward_input, backward_weight, comm)
    closed = not (comm or latency or jitter or stragglers or (slices or 1) > 1)
    read = [] if file is None else [_read(Path(file))]
    for _, program in read:
        pp, microbatches = program.ranks, program.microbatches

    def programs() -> Iterator[tuple[str, Program]]:
        yield from read
        for name in names:
            yield name, _program(name, pp, microbatches, virtual_stages, slices, durations, memory, kept_for_weight)

    found = []
    for name, program in programs():
        # What a rank holds of one copy of the model is the same for all schedules, so a stage's share differs.
        share = pp / program.depth
        equal = EqualStages(
            pp, microbatches, program.stages // pp, share * forward, share * backward_input,
            share * backward_weight, None if pair is None else share * pair,
        )  # fmt: skip
        times = ActionTimes(equal.f, equal.b, equal.w, pair=equal.pair, reduce=reduce, step=step)
        timeline = simulate(program, times, links, disturbance=disturbance, dp=dp, tp=tp)
        found.append(PlayedSchedule(name, timeline, equal if closed else None))
    return found


def schedule_name(name: str) -> str:
    """Return the schedule that a name means; hyphens, underscores and capitals do not matter.

    >>> schedule_name("ZBV"), schedule_name("interleaved")
    ('zb-v', 'interleaved-1f1b')

    Raises:
        UsageError: there is none.
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
    """Refuse arguments that none of the schedules reads.

    Args:
        names: from `schedule_name`.
        file: of a schedule, for the message where there is no name.

    Raises:
        UsageError: naming the argument, and the schedules that would read it.
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
    try:
        return file.stem, load_csv(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise UsageError(f"--csv {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--csv {file}: it is no text") from None


def _program(
    name: str, pp: int, microbatches: int, virtual_stages: int | None, slices: int | None, times: StageDurations,
    memory: float | None, kept_for_weight: float,
) -> Program:  # fmt: skip
    if name in AUTOMATIC:
        room = max(1, round((memory or AUTOMATIC[name]) * pp))
        orders = zb_auto(pp, microbatches, times, memory=room, kept=min(1.0, kept_for_weight))
        return Program(tuple(map(tuple, orders)), looped(pp, 1), microbatches)
    schedule = EVERY[name]
    virtual = schedule.virtual or virtual_stages or VIRTUAL
    if reason := schedule.refuses(pp, microbatches, virtual):
        raise UsageError(f"--pp {pp} --microbatches {microbatches}: {reason}")
    sliced = slices or (SLICES if name == "terapipe" else 1)
    return build_program(
        schedule, pp, microbatches, virtual_stages=virtual, sequence_slices=sliced, transfers=False
    )
