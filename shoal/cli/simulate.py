"""`shoal simulate`: play schedules side by side, draw them, and compare them with what the papers say."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import show_seconds
from shoal.pipeline import program as pipeline
from shoal.pipeline.from_layout import VIRTUAL
from shoal.pipeline.program import Program
from shoal.pipeline.schedules import ASYNCHRONOUS, SCHEDULES
from shoal.pipeline.schedules.auto import zb_auto
from shoal.pipeline.schedules.file import load_csv
from shoal.pipeline.schedules.placement import looped
from shoal.pipeline.simulator import published
from shoal.pipeline.simulator.columns import Columns, of_program, of_schedule
from shoal.pipeline.simulator.disturbance import Disturbance
from shoal.pipeline.simulator.engine import simulate
from shoal.pipeline.simulator.theory import THEORY, EqualStages
from shoal.pipeline.simulator.timeline import Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.terminal import show
from shoal.report.timeline.write import check_name, write
from shoal.spec.catalog import tables

KNOWN = SCHEDULES | ASYNCHRONOUS
AUTOMATIC = {"zb-auto": 1.0, "zb-1p": 1.0, "zb-2p": 2.0}
"""Names of the automatic schedule, with the memory that each gives it, in that of 1F1B."""
ALIASES = {
    "interleaved": "interleaved-1f1b",
    "pipedream-flush": "1f1b",
    "zero-bubble": "zb-h1",
    "breadth-first": "looped-bfs",
}
PRICED = {
    "forward", "backward_input", "backward_weight", "pair", "comm", "latency", "reduce", "step", "kept_for_weight",
    "csv", "memory", "slices",
}
"""What goes without saying where times are estimated."""
PRICING = {"model", "catalog", "micro_batch", "sequence_length", "precision"}
"""What only such times need."""
SLICES = 4
"""Slices of a sequence where the schedule passes on slices and nothing is said."""


class SimulateOptions(Section):
    schedule: str | None = None
    """The schedule to play (default 1f1b); names as in a layout, or zb-1p and zb-2p: the automatic one with once and
    twice the memory of 1f1b."""

    pp: PositiveInt = 4
    """Pipeline ranks."""

    microbatches: PositiveInt = 8
    """Micro-batches of the step."""

    virtual_stages: PositiveInt | None = None
    """Stages on each rank, for the schedules that leave it open (default 2)."""

    slices: PositiveInt | None = None
    """Slices of each sequence, passed on one by one (default 4 for terapipe, 1 for others)."""

    dp: PositiveInt = 1
    """Replicas of the pipeline; those that do not differ are played once."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks of each replica's pipeline rank; they move together."""

    forward: NonNegativeFloat = 1.0
    """Time of one micro-batch's forward through all that a rank holds of one copy of the model (T_F), in any unit."""

    backward_input: NonNegativeFloat = 1.0
    """Time of the first half of its backward, the gradient of the input (T_B)."""

    backward_weight: NonNegativeFloat = 1.0
    """Time of its second half, the gradients of the weights (T_W)."""

    pair: PositiveFloat | None = None
    """Time of a forward and a backward computed at once (F&B of dualpipe); without it one follows the other."""

    comm: NonNegativeFloat = 0.0
    """Time of a message on its link; those of one link go one after another."""

    latency: NonNegativeFloat = 0.0
    """Time from a message's end on its link to its arrival."""

    blocking: bool = False
    """A message also occupies its sender."""

    reduce: NonNegativeFloat = 0.0
    """Time of a stage's gradient reduction after its last backward."""

    step: NonNegativeFloat = 0.0
    """Time of the optimizer."""

    seconds: bool = False
    """The times are seconds, and are shown so."""

    model: str | None = None
    """With --cluster: the times are those of `shoal estimate`, of this model (default llama-3-8b); in seconds."""

    cluster: str | None = None
    """Price the passes on this cluster of pp x dp x tp accelerators: 8xH100; 4xhere with --catalog."""

    catalog: Path | None = None
    """With --cluster: a file of accelerators, links and nodes, as `shoal calibrate` writes one of this machine."""

    micro_batch: PositiveInt = 1
    """With --cluster: sequences of a micro-batch."""

    sequence_length: PositiveInt | None = None
    """With --cluster: tokens of a sequence (default: the longest that the model was trained for)."""

    precision: str = "bf16"
    """With --cluster: fp32, bf16 or another precision of a run."""

    memory: PositiveFloat | None = None
    """Activations that zb-auto may keep on each rank, in those that 1f1b keeps on its first."""

    kept_for_weight: NonNegativeFloat = 1.0
    """Share of an activation that is still alive between the two halves of its backward (M_W / M_B)."""

    straggler: tuple[str, ...] = ()
    """Ranks that compute slower: RANK=FACTOR ..., counted over pp x dp x tp from outer to inner."""

    slow_link: tuple[str, ...] = ()
    """Links that are slower, both ways: A-B=FACTOR ... of two such ranks."""

    jitter: NonNegativeFloat = 0.0
    """Standard deviation of every computation's time, as a share of it."""

    seed: NonNegativeInt = 0
    """Of the jitter."""

    compare: str = ""
    """More schedules, side by side: 1f1b,zb-h1,..."""

    csv: Path | None = None
    """Play the schedule of this file, in the format of torch.distributed.pipelining: a row for each rank. It says how
    many ranks and micro-batches there are."""

    out: Path | None = None
    """Write the timelines to this file: a page (.html), a figure (.svg, .png) or a Perfetto trace (.json, .json.gz)."""

    check: Path | None = None
    """Instead: compare with the printed bubble rates in this folder's zero_bubble.csv, row by row."""


@dataclass(frozen=True)
class PlayedSchedule:
    """A schedule that was played, and the step as its closed forms see it, where all stages take the same."""

    name: str
    timeline: Timeline
    step: EqualStages | None = None


def run(options: SimulateOptions) -> int:
    """Play, print, draw; the exit code.

    Raises:
        UsageError: an unknown schedule, one that the sizes do not allow, or a rank, link or file that does not exist.
    """
    console = Console()
    if options.check:
        others = [name for name in SimulateOptions.model_fields if name != "check"]
        reject_unused(options, others, "--check compares what its own table describes")
        lines, error = published.table(published.read(options.check))
        console.print("\n".join(lines), highlight=False)
        console.print(f"mean absolute error: {error:.3f} points (hundredths of the step)")
        return 0
    if options.out:
        check_name(options.out)
    disturbance = Disturbance(
        stragglers={rank: factor for (rank,), factor in _factors("straggler", options.straggler, "RANK=FACTOR")},
        slow_links={(a, b): factor for (a, b), factor in _factors("slow-link", options.slow_link, "A-B=FACTOR")},
        jitter=options.jitter,
        seed=options.seed,
    )
    given = [options.schedule or ("" if options.csv else "1f1b"), *options.compare.split(",")]
    names = list(dict.fromkeys(known(name) for name in given if name))
    _check_used(options, names)
    if options.cluster:
        from shoal.planning.schedule_times import priced  # which prices with all of the planner

        if options.catalog:
            tables.add(options.catalog)
        found = [(name, priced(name, options)) for name in names]
        options = options.model_copy(update={"seconds": True})
        played = [
            PlayedSchedule(name, simulate(one.columns, one.times, one.links, disturbance=disturbance,
                                  dp=options.dp, tp=options.tp))
            for name, one in found
        ]
        _show(console, played, options)
        for name, one in found:
            console.print(f"{name}: shoal estimate says {show_seconds(one.step_seconds)} a step", highlight=False)
        return 0
    played = []
    if options.csv:
        program = _read(options.csv)
        options = options.model_copy(update={"pp": program.ranks, "microbatches": program.microbatches})
        played.append(_play(options.csv.stem, of_program(program), options, disturbance))
    played += [_play(name, _columns(name, options), options, disturbance) for name in names]
    _show(console, played, options)
    return 0


def known(name: str) -> str:
    """The schedule that a name means; hyphens, underscores and capitals do not matter.

    >>> known("ZBV"), known("interleaved")
    ('zb-v', 'interleaved-1f1b')

    Raises:
        UsageError: there is none.
    """
    names = {*KNOWN, *AUTOMATIC}
    plain = {_plain(known): known for known in names} | {_plain(a): known for a, known in ALIASES.items()}
    if _plain(name) not in plain:
        near = [plain[match] for match in difflib.get_close_matches(_plain(name), plain, n=1)]
        raise UsageError(f"there is no schedule '{name}'; {did_you_mean(near[0] if near else name, names)}")
    return plain[_plain(name)]


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())


def _factors(option: str, given: Sequence[str], form: str) -> list[tuple[tuple[int, ...], float]]:
    """``3=1.5`` and ``0-1=2``: the ranks and their factor."""
    ranks = "-".join([r"(\d+)"] * (1 + form.count("-")))
    example = form.replace("RANK", "3").replace("A-B", "0-1").replace("FACTOR", "1.5")
    found = []
    for text in ",".join(given).split(",") if given else []:
        match = re.fullmatch(rf"{ranks}=(\d+\.?\d*|\.\d+)", text.strip())
        if match is None:
            raise UsageError(f"--{option} {text}: give {form}, as {example}")
        *who, factor = match.groups()
        found.append((tuple(map(int, who)), float(factor)))
    return found


def _read(file: Path) -> Program:
    try:
        return load_csv(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise UsageError(f"--csv {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--csv {file}: it is no text") from None


def _check_used(options: SimulateOptions, names: Sequence[str]) -> None:
    """Refuse what would be ignored."""
    if not options.forward + options.backward_input + options.backward_weight:
        raise UsageError("--forward, --backward-input and --backward-weight are all 0: there is nothing to play")
    if options.slow_link and not (options.comm + options.latency or options.cluster):
        raise UsageError("--slow-link: messages take no time, so no link is slow; give --comm or --latency too")
    fields = SimulateOptions.model_fields
    given = {name for name, field in fields.items() if getattr(options, name) != field.default}
    for name in sorted(given & PRICED if options.cluster else given & PRICING):
        option = f"--{name.replace('_', '-')} {getattr(options, name)}"
        raise UsageError(
            f"{option}: with --cluster, times are those of the estimate.\n  Leave one of them out."
            if options.cluster else f"{option}: only with --cluster, whose times are those of the estimate"
        )
    if not (options.comm + options.latency or options.cluster):
        reject_unused(options, ("blocking",), "messages take no time; give --comm or --latency too")
    if not options.jitter:
        reject_unused(options, ("seed",), "only of --jitter")
    if options.csv:
        reject_unused(options, ("pp", "microbatches"), "--csv says how many there are")
    if not set(names) - set(AUTOMATIC):
        reject_unused(options, ("slices",), "nothing that is played cuts sequences at will")
    choosable = [name for name, schedule in KNOWN.items() if schedule.virtual is None]
    for option, given, users in (
        ("virtual-stages", options.virtual_stages, choosable),
        ("memory", options.memory, ["zb-auto"]),
        ("pair", options.pair, ["dualpipe", "dualpipev"]),
    ):
        if given is not None and not set(users) & set(names):
            raise UsageError(f"--{option} {given}: only for {', '.join(users)}, not {', '.join(names) or options.csv}")


# ---- one schedule ----------------------------------------------------------------------------------------------------


def _columns(name: str, options: SimulateOptions) -> Columns:
    p, m = options.pp, options.microbatches
    if name in AUTOMATIC:
        memory = max(1, round((options.memory or AUTOMATIC[name]) * p))
        times = pipeline.StageDurations(options.forward, options.backward_input, options.backward_weight, options.comm)
        orders = zb_auto(p, m, times, memory=memory, kept=min(1.0, options.kept_for_weight))
        return of_program(Program(tuple(map(tuple, orders)), looped(p, 1), m))
    schedule = KNOWN[name]
    virtual = schedule.virtual or options.virtual_stages or VIRTUAL
    if reason := schedule.refuses(p, m, virtual):
        raise UsageError(f"--pp {p} --microbatches {m}: {reason}")
    return of_schedule(schedule, p, m, virtual, options.slices or (SLICES if name == "terapipe" else 1))


def _play(name: str, columns: Columns, options: SimulateOptions, disturbance: Disturbance) -> PlayedSchedule:
    """Play it. What a rank holds of one copy of the model is the same for all schedules, so a stage's share differs."""
    program = columns.program
    share = options.pp / program.depth
    forward, first, second = (
        share * time for time in (options.forward, options.backward_input, options.backward_weight)
    )
    pair = None if options.pair is None else share * options.pair
    times = ActionTimes(forward, first, second, pair=pair, reduce=options.reduce, step=options.step)
    links = MessageTimes(options.comm, options.latency, blocking=options.blocking)
    timeline = simulate(columns, times, links, disturbance=disturbance, dp=options.dp, tp=options.tp)
    virtual = program.stages // options.pp
    return PlayedSchedule(
        name, timeline, EqualStages(options.pp, options.microbatches, virtual, forward, first, second, pair)
    )


# ---- on the screen ---------------------------------------------------------------------------------------------------


def _show(console: Console, played: Sequence[PlayedSchedule], options: SimulateOptions) -> None:
    charts = [_chart(one, options) for one in played]
    show(console, charts)
    ideal = not (options.comm or options.latency or options.jitter or options.straggler or (options.slices or 1) > 1)
    for line in [_theory(one) for one in played if ideal and one.step and one.name in THEORY]:
        console.print(line, highlight=False)
    if options.out:
        lead = f"{options.pp} pipeline ranks, {options.microbatches} micro-batches, simulated."
        write(options.out, charts, title="Pipeline schedules", lead=lead)
        console.print(f"written: {options.out}", highlight=False)


def _chart(one: PlayedSchedule, options: SimulateOptions) -> Chart:
    timeline = one.timeline
    share = options.pp / timeline.columns.program.depth
    facts = {
        "slowest rank's bubble": f"{100 * timeline.bubble_of_slowest_rank:.1f} %",
        "alive, in micro-batches": f"{share * timeline.peak_live.max():.3g}",
    }
    if len(timeline.replicas) > 1:
        facts["replicas that differ"] = f"{len(timeline.replicas)} of {timeline.replicas.sum()}"
    slowest = int(np.argmax(timeline.own_span.max(axis=1)))
    return Chart(one.name, timeline, kind=slowest, seconds=options.seconds, facts=facts)


def _theory(one: PlayedSchedule) -> str:
    """What the closed forms say of a step, beside what was found."""
    theory, step, timeline = THEORY[one.name], one.step, one.timeline
    if not theory.holds(step):
        return f"{one.name}: the closed form needs {theory.needs} ({theory.source})"
    idle = float((timeline.idle if theory.flushed else timeline.stall).max())
    alive = timeline.peak_live.max()
    return (
        f"{one.name}: simulated: idle {idle:.4g}, {alive:.4g} alive; "
        f"by the closed form: {theory.idle(step):.4g}, {theory.alive(step)} ({theory.source})"
    )
