"""What `shoal plan auto` prints: weights, collectives, the splits by hand beside them, the best of these as a run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.base.units import show_bytes, show_seconds
from shoal.labs.autoshard.intra.ilp import SECONDS
from shoal.labs.autoshard.plan import ShardingPlan
from shoal.labs.autoshard.search import OperatorPlan, StagedPlan
from shoal.planning.run import EstimatedRun
from shoal.planning.search.space import fits
from shoal.report.planning.tables import run_toml
from shoal.report.tables import table_lines
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout

LYING = ["weight", "kept", "multiplied as", "optimizer state"]


def lines(name: str, precision: str, microbatches: int, found: OperatorPlan) -> Iterator[str]:
    """The listing of a plan of the module of that name."""
    plan = found.plan
    count = sum(op.numel for op in plan.graph.parameters)
    yield f"{name}: {count:,} parameters, {len(plan.graph.ops):,} operators; {precision}, AdamW"
    yield found.machine.describe()
    yield (f"as a mesh {plan.mesh}: {show_seconds(plan.seconds)} a micro-batch"
           + (f" of {microbatches}" if microbatches > 1 else "")
           + f", {show_seconds(plan.communication)} of it communication; "
           f"{show_bytes(plan.memory)} of weights and states, {show_bytes(plan.saved)} of activations"
           + ("" if plan.proven else "; the best that was found in time"))  # fmt: skip
    yield ""
    yield from table_lines(LYING, list(weights(plan)))
    yield ""
    rows = list(_moves(plan))
    if rows:
        yield from table_lines(["", "tensor", "collective", "from", "to", "sent by a device", "time"], rows)
    else:
        yield "Nothing is communicated."
    yield ""
    yield from table_lines(["split", "micro-batch", "communication", "weights and states", ""], list(_rivals(found)))


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def weights(plan: ShardingPlan) -> Iterator[list[str]]:
    """Rows of `LYING`: weights that are split alike in all layers in one."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, (kept, used, state) in plan.weights().items():
        key = (_pattern(name), str(kept), str(used), "frozen" if state is None else str(state))
        found.setdefault(key, []).append(name)
    several = {pattern: sum(key[0] == pattern for key in found) > 1 for pattern, *_ in found}
    for (pattern, *ways), names in found.items():
        yield [", ".join(names) if several[pattern] else pattern, *ways]


def _moves(plan: ShardingPlan) -> Iterator[list[str]]:
    """Collectives of the same kind, of tensors of one shape, in one row."""
    found: dict[tuple[str, ...], list] = {}
    for move in plan.found:
        op = plan.graph.ops[move.name]
        shape = "x".join(map(str, op.shape)) or "scalar"
        what = " then ".join(str(t.move) for t in move.transfers)
        key = (move.phase, shape, what, str(move.transfers[0].before), str(move.transfers[-1].after))
        found.setdefault(key, []).append(move)
    for (phase, shape, what, before, after), moves in found.items():
        times = f"{len(moves)} x " if len(moves) > 1 else ""
        sent, seconds = sum(m.sent for m in moves), sum(m.seconds for m in moves)
        yield [phase, times + shape, what, before, after, show_bytes(sent), show_seconds(seconds)]


def _rivals(found: OperatorPlan) -> Iterator[list[str]]:
    plan = found.plan
    yield ["found", show_seconds(plan.seconds), show_seconds(plan.communication), show_bytes(plan.memory), ""]
    for name, other, _, proven in found.others:
        if other is None:
            yield [name, "does not fit" if proven else "not found in time", "", "", ""]
        else:
            more = f"{max(0.0, 100 * (other.seconds / plan.seconds - 1)):+.1f} %"
            yield [name, show_seconds(other.seconds), show_seconds(other.communication), show_bytes(other.memory), more]


def for_train(
    model: str, shape: ModelShape, sequence_length: int, batch: int, precision: str, found: OperatorPlan,
    sequences: int,
) -> Iterator[str]:  # fmt: skip
    """The best split by hand that `shoal train` takes, as a run.

    Args:
        model: of the catalog; ``shape`` is what was planned of it.
        batch: sequences of a step.
        sequences: of a micro-batch, of all devices together.
    """
    plan, run = found.plan, EstimatedRun(shape, Layout(), found.machine, sequence_length, batch, precision)
    taken: list[tuple[str, ShardingPlan, Layout]] = []
    for other in found.others:
        if other.plan and other.layout and sequences % other.layout.dp == 0:
            layout = other.layout.model_copy(update={"micro_batch": sequences // other.layout.dp})
            if fits(run, layout):
                taken.append((other.name, other.plan, layout))
    if not taken:
        yield "`shoal train` takes none of these that fit, with this micro-batch."
        return
    name, best, layout = min(taken, key=lambda each: each[1].seconds)
    longer = max(0.0, 100 * (best.seconds / plan.seconds - 1))
    same = best.weights() == plan.weights()
    beside = "all weights lie as was found" if same else f"takes {longer:.1f} % longer than what was found"
    yield f"The best of these for `shoal train`, {name}: {beside}."
    yield ""
    yield from run_toml(model, run, layout).splitlines()


def stage_lines(name: str, precision: str, microbatches: int, found: StagedPlan) -> list[str]:
    """The listing of a plan in stages."""
    single = show_seconds(found.single_seconds) if found.single_seconds < float("inf") else "it does not fit"
    said = [
        f"{name}: {found.layers} layers of operators; {precision}, AdamW",
        found.machine.describe(),
        f"{len(found.stages)} stages, {microbatches} micro-batches: {show_seconds(found.seconds)} a step; "
        f"without stages {single}",
    ]
    for number, stage in enumerate(found.stages):
        mesh = stage.plan.mesh
        devices = f"device {stage.rank}" + (f" to {stage.rank + mesh.ranks - 1}" * (mesh.ranks > 1))
        said += ["", f"stage {number}: layers {stage.first} to {stage.last - 1} on {devices}, mesh {mesh or '1'}: "
                  f"{show_seconds(stage.seconds)} a micro-batch, "
                  f"{show_bytes(stage.plan.memory)} of weights and states"]  # fmt: skip
        said += table_lines(LYING, list(weights(stage.plan)))
    return said


def nothing_fits(what: str, capacity: str, proven: bool) -> str:
    """What is said where no plan was found."""
    if proven:
        return f"No {what} needs as little as {capacity} on a device."
    return f"Time was up ({SECONDS:.0f} s each) before any {what} within {capacity} a device was found."
