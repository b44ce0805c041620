"""Programs from layouts: find and check the schedule, check the run, and build the programs of steps and validation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shoal.base.errors import UsageError
from shoal.pipeline.partition import balance_layers
from shoal.pipeline.program import Action, Op, Program, Schedule, add_transfers, build_program
from shoal.pipeline.schedules import EVERY, SCHEDULES
from shoal.pipeline.schedules.asynchronous import pipedream_2bw
from shoal.pipeline.schedules.placement import per_rank_schedule
from shoal.spec.catalog import ModelShape
from shoal.spec.compatibility.features import CheckedRun
from shoal.spec.compatibility.sizes import check_float8_sizes, check_layout, check_relaxed_sizes
from shoal.spec.compatibility.table import check_compatibility
from shoal.spec.compatibility.unread import check_unread
from shoal.spec.config import RunConfig
from shoal.spec.layout import FILE, Layout
from shoal.spec.schedules import ASYNCHRONOUS, SLICED

VIRTUAL = 2
"""Default number of stages per rank for schedules that leave it open."""


def find_schedule(layout: Layout) -> Schedule:
    """Return the schedule that a layout names.

    Raises:
        UsageError: it names a file that does not hold a schedule.
    """
    if layout.schedule.startswith(FILE):
        from shoal.pipeline.schedules.file import schedule_from_csv  # proves the schedule correct

        return schedule_from_csv(layout.schedule.removeprefix(FILE))
    schedule = EVERY[layout.schedule]
    if layout.update_every:
        order = partial(pipedream_2bw, every=layout.update_every)
        return per_rank_schedule(schedule.name, schedule.source, order, schedule.placement)
    return schedule


def virtual_stages(layout: Layout) -> int:
    """Return the number of stages on each pipeline rank."""
    return find_schedule(layout).virtual or layout.virtual_stages or VIRTUAL


def build_layout_program(
    layout: Layout, microbatches: int, slices: int = 0, *, transfers: bool = True, paired: bool = False
) -> Program:
    """Build the program of one step.

    Args:
        slices: number of slices per sequence (`choose_slices`), 0 for unsliced.
        transfers, paired: see `build_program`.
    """
    program = build_program(
        find_schedule(layout), layout.pp, microbatches,
        virtual_stages=virtual_stages(layout), zero=layout.zero, sequence_slices=max(1, slices), transfers=transfers,
        paired=paired,
    )
    return replace(program, layers=layout.stage_layers or ())


def choose_slices(layout: Layout, shape: ModelShape, *, microbatches: int, sequence_length: int) -> tuple[int, ...]:
    """Return the tokens of each slice that the layout's schedule cuts a sequence into; empty if it does not slice."""
    if layout.schedule not in SLICED:
        return ()
    from shoal.pipeline.sequence_slices import best_slices, even_slices, flops, places  # imports numpy

    if layout.sequence_slices == "auto":
        least = _least_slice(layout)
        *cuts, _ = places(sequence_length // least * least, least)
        return best_slices([*cuts, sequence_length], flops(shape), layout.pp, microbatches)
    if isinstance(layout.sequence_slices, int):
        return even_slices(sequence_length, layout.sequence_slices, layout.sequence_shards)
    return layout.sequence_slices


def build_forwards(program: Program, microbatches: int) -> Program:
    """Build a forward-only program of some micro-batches, with the placement of another program.

    Micro-batches run in groups of one per rank, and each group runs through all of a rank's stages (Narayanan et al.
    2021, figure 4). This is the largest group for which a rank never waits for itself.
    """
    ranks = program.ranks
    program = Program(((),) * ranks, program.stage_rank, microbatches, model_copies=program.model_copies)
    orders = []
    for rank in range(ranks):
        forwards = [Action(Op.FORWARD, s, m) for s in program.rank_stages(rank) for m in program.stage_microbatches(s)]
        first = {action: program.stage_microbatches(action.stage).start for action in forwards}
        orders.append(sorted(
            forwards, key=lambda a: ((a.microbatch - first[a]) // ranks, a.stage % program.depth, a.microbatch)
        ))
    return add_transfers(replace(program, actions=tuple(map(tuple, orders))))


def check_run(config: RunConfig, shape: ModelShape, *, ranks: int | None = None) -> None:
    """Validate a run's config against its model; used by `shoal train`, `estimate`, `plan` and `verify`.

    Args:
        shape: the config's model.
        ranks: number of processes, if already fixed (torchrun, SLURM, ``--ranks``).

    Raises:
        UsageError: the message names the field, its value, the reason and the nearest remedy.
    """
    if config.model.module:
        config, shape = _without_layers(config, shape)
    layout, batch, length = config.parallel, config.train.global_batch, config.data.sequence_length
    check_layout(layout, shape, global_batch=batch, sequence_length=length, ranks=ranks)
    check_schedule(layout, shape, batch, sequence_length=length)
    check_compatibility(_with_program(config, shape, layout.microbatches(batch)))
    check_float8_sizes(config, shape)
    check_relaxed_sizes(config)
    check_unread(config)


def _without_layers(config: RunConfig, shape: ModelShape) -> tuple[RunConfig, ModelShape]:
    """Return a run whose module has layers of its own: tables split them, and its loss shows the length of samples."""
    layout = config.parallel
    if layout.dp * layout.tp % layout.ep:
        raise UsageError(f"parallel.ep = {layout.ep} does not divide dp {layout.dp} x tp {layout.tp}, whose ranks hold "
                         "the experts.\n  Choose a number of ranks that does.")
    sizes = dict.fromkeys(("hidden", "heads", "kv_heads", "ffn"), layout.tp)
    changed = config.replace(data={"sequence_length": layout.tp}, parallel={"ep": 1, "etp": None})
    return changed, shape.model_copy(update=sizes)


def _with_program(config: RunConfig, shape: ModelShape, microbatches: int) -> CheckedRun:
    """Return the run with data from its pipeline program, which is built only if a rule needs it."""
    layout = config.parallel
    if config.train.compile:
        return CheckedRun(config, shape, splits_backward=splits_backward(build_layout_program(layout, microbatches)))
    if layout.schedule in ASYNCHRONOUS and config.optimizer.clip_norm:
        return CheckedRun(config, shape, updates=build_layout_program(layout, microbatches).updates)
    return CheckedRun(config, shape)


def check_schedule(
    layout: Layout, shape: ModelShape, global_batch: int, *, sequence_length: int | None = None
) -> None:
    """Reject a layout whose schedule does not fit its ranks, layers, micro-batches or slices.

    Args:
        sequence_length: tokens per sequence, if known.

    Raises:
        UsageError: the message names the field, its value and valid values.
    """
    schedule, virtual = find_schedule(layout), virtual_stages(layout)
    if layout.virtual_stages is not None and layout.virtual_stages != virtual:
        choices = [name for name, schedule in SCHEDULES.items() if schedule.virtual is None]
        raise UsageError(
            f"parallel.virtual_stages = {layout.virtual_stages}, but {layout.schedule} has {virtual} on each rank."
            f"\n  Leave virtual_stages out, or take one of {', '.join(choices)}."
        )
    depth = len(schedule.placement(layout.pp, virtual)) // schedule.model_copies
    if depth > shape.layers:
        raise UsageError(
            f"parallel.pp = {layout.pp} with {layout.schedule}: {shape.layers} layers cannot fill {depth} stages, each "
            f"needs at least one.\n  Use pp x virtual_stages <= {shape.layers}, or model.layers >= {depth}."
        )
    _check_stage_layers(layout, shape, depth)
    microbatches = layout.microbatches(global_batch)
    reason = schedule.refuses(layout.pp, microbatches, virtual)
    if reason:
        raise UsageError(
            f"parallel.schedule = {layout.schedule} with pp {layout.pp} and {microbatches} "
            f"micro-batch{'es' * (microbatches > 1)}: {reason}{_near(schedule, layout, microbatches, virtual)}"
        )
    _check_slices(layout, sequence_length)
    if layout.update_every is not None and layout.update_every < layout.pp:
        raise UsageError(
            f"parallel.update_every = {layout.update_every} is less than pp {layout.pp}: micro-batches of more than "
            f"two updates would be in flight, but pipedream-2bw keeps two versions.\n  Use update_every >= {layout.pp}."
        )


def _check_stage_layers(layout: Layout, shape: ModelShape, depth: int) -> None:
    sizes = layout.stage_layers
    if sizes is not None and (len(sizes) != depth or sum(sizes) != shape.layers):
        even = ", ".join(str(len(layers)) for layers in balance_layers(shape, depth))
        raise UsageError(
            f"parallel.stage_layers = {list(sizes)}: {len(sizes)} stages with {sum(sizes)} layers, but pp {layout.pp} "
            f"with {layout.schedule} has {depth} stages, and the model {shape.layers} layers."
            f"\n  Without stage_layers they are {even}."
        )


def _check_slices(layout: Layout, sequence_length: int | None) -> None:
    slices = layout.sequence_slices
    if slices == "auto" or sequence_length is None:
        return
    multiple, least = layout.sequence_shards, _least_slice(layout)
    share = f", each a multiple of tp {multiple} as sequence parallelism needs" if multiple > 1 else ""
    if layout.cp > 1:
        share += f", each at least {least} for cp {layout.cp}"
    if isinstance(slices, int):
        if slices > sequence_length // least:
            raise UsageError(
                f"parallel.sequence_slices = {slices}: {sequence_length} tokens make at most "
                f"{sequence_length // least} slices{share}.\n  Use sequence_slices <= {sequence_length // least}."
            )
    elif sum(slices) != sequence_length or any(tokens % multiple or tokens < least for tokens in slices):
        raise UsageError(
            f"parallel.sequence_slices = {list(slices)}: {' + '.join(map(str, slices))} = {sum(slices)} must be "
            f"data.sequence_length = {sequence_length}{share}.\n  Give their number instead, or auto."
        )


def _least_slice(layout: Layout) -> int:
    """Return the minimum tokens per slice such that every rank has a part of it."""
    return layout.sequence_shards * (2 * layout.cp if layout.cp > 1 else 1)


def splits_backward(program: Program) -> bool:
    """Return whether the program splits any backward into halves."""
    return any(action.op is Op.BACKWARD_INPUT for actions in program.actions for action in actions)


def _near(schedule: Schedule, layout: Layout, microbatches: int, virtual: int) -> str:
    """Return the nearest numbers of micro-batches that this schedule supports."""
    per_pass = layout.dp * layout.micro_batch
    fits = [m for m in range(1, 4 * layout.pp + microbatches) if not schedule.refuses(layout.pp, m, virtual)]
    if not fits:
        return ""
    near = sorted(fits, key=lambda m: abs(m - microbatches))[:2]
    return f"\n  Nearest train.global_batch that fits: {' or '.join(str(m * per_pass) for m in sorted(near))}."
