"""The output of `shoal plan auto`: weights, collectives, the splits by hand, and the best of these as a run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.base.units import show_bytes, show_seconds
from shoal.engine.sharding.plan import Resharding, ShardingPlan
from shoal.planning.auto.search import OperatorPlan, StagedPlan
from shoal.planning.run import EstimatedRun
from shoal.planning.search.space import fits
from shoal.report.planning.tables import run_toml
from shoal.report.tables import table_lines
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout

WEIGHT_COLUMNS = ["weight", "kept", "multiplied as", "optimizer state"]


def lines(name: str, precision: str, microbatches: int, found: OperatorPlan | StagedPlan) -> list[str]:
    """List a plan of the module ``name``."""
    if isinstance(found, StagedPlan):
        return _stage_lines(name, precision, microbatches, found)
    return [*_plan_lines(name, precision, microbatches, found)]


def _plan_lines(name: str, precision: str, microbatches: int, found: OperatorPlan) -> Iterator[str]:
    plan = found.plan
    count = sum(op.numel for op in plan.graph.parameters)
    yield f"{name}: {count:,} parameters, {len(plan.graph.ops):,} operators; {precision}, AdamW"
    yield found.machine.describe()
    yield (f"as a mesh {plan.mesh}: {show_seconds(plan.seconds)} a micro-batch"
           + (f" of {microbatches}" if microbatches > 1 else "")
           + f", {show_seconds(plan.communication)} of it communication; "
           f"{show_bytes(plan.memory)} of weights and states, {show_bytes(plan.saved)} of activations"
           + ("" if plan.proven else "; the best found within the time limit"))  # fmt: skip
    yield ""
    yield from table_lines(WEIGHT_COLUMNS, list(_weight_rows(plan)))
    yield ""
    rows = list(_resharding_rows(plan))
    if rows:
        yield from table_lines(["", "tensor", "collective", "from", "to", "sent by a device", "time"], rows)
    else:
        yield "Nothing is communicated."
    yield ""
    headings = ["split", "micro-batch", "communication", "weights and states", ""]
    yield from table_lines(headings, list(_baseline_rows(found)))


def _weight_rows(plan: ShardingPlan) -> Iterator[list[str]]:
    """Make rows of `WEIGHT_COLUMNS`, one for a weight that is split in the same way in all layers."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, (kept, used, state) in plan.weight_shardings().items():
        key = (re.sub(r"\.\d+\.", ".*.", name), str(kept), str(used), "frozen" if state is None else str(state))
        found.setdefault(key, []).append(name)
    several = {pattern: sum(key[0] == pattern for key in found) > 1 for pattern, *_ in found}
    for (pattern, *ways), names in found.items():
        yield [", ".join(names) if several[pattern] else pattern, *ways]


def _resharding_rows(plan: ShardingPlan) -> Iterator[list[str]]:
    """Make one row for collectives of the same kind, of tensors of one shape."""
    found: dict[tuple[str, ...], list[Resharding]] = {}
    for resharding in plan.reshardings:
        shape = "x".join(map(str, plan.graph.ops[resharding.name].shape)) or "scalar"
        moves = resharding.moves
        key = (resharding.phase, shape, " then ".join(map(str, moves)), str(moves[0].before), str(moves[-1].after))
        found.setdefault(key, []).append(resharding)
    for (phase, shape, what, before, after), every in found.items():
        times = f"{len(every)} x " if len(every) > 1 else ""
        sent, seconds = sum(one.sent for one in every), sum(one.seconds for one in every)
        yield [phase, times + shape, what, before, after, show_bytes(sent), show_seconds(seconds)]


def _baseline_rows(found: OperatorPlan) -> Iterator[list[str]]:
    plan = found.plan
    yield ["found", show_seconds(plan.seconds), show_seconds(plan.communication), show_bytes(plan.memory), ""]
    for name, other, _, proven in found.baselines:
        if other is None:
            yield [name, "does not fit" if proven else "time limit reached", "", "", ""]
        else:
            more = f"{max(0.0, 100 * (other.seconds / plan.seconds - 1)):+.1f} %"
            yield [name, show_seconds(other.seconds), show_seconds(other.communication), show_bytes(other.memory), more]


def for_train(
    model: str, shape: ModelShape, sequence_length: int, batch: int, precision: str,
    found: OperatorPlan | StagedPlan, sequences: int,
) -> Iterator[str]:  # fmt: skip
    """Write the best split by hand that `shoal train` accepts as the TOML of a run; nothing beside stages.

    Args:
        batch: sequences per step.
        sequences: per micro-batch, over all devices.
    """
    if isinstance(found, StagedPlan):
        return
    plan, run = found.plan, EstimatedRun(shape, Layout(), found.machine, sequence_length, batch, precision)
    taken: list[tuple[str, ShardingPlan, Layout]] = []
    for baseline in found.baselines:
        if baseline.plan and baseline.layout and sequences % baseline.layout.dp == 0:
            layout = baseline.layout.model_copy(update={"micro_batch": sequences // baseline.layout.dp})
            if fits(run, layout):
                taken.append((baseline.name, baseline.plan, layout))
    if not taken:
        yield "`shoal train` accepts none of these that fit, with this micro-batch."
        return
    name, best, layout = min(taken, key=lambda each: each[1].seconds)
    longer = max(0.0, 100 * (best.seconds / plan.seconds - 1))
    same = best.weight_shardings() == plan.weight_shardings()
    beside = "all weights are split as in the plan found" if same else f"{longer:.1f} % longer than the plan found"
    yield f"The best of these for `shoal train`, {name}: {beside}."
    yield ""
    yield from run_toml(model, run, layout).splitlines()


def _stage_lines(name: str, precision: str, microbatches: int, found: StagedPlan) -> list[str]:
    """List a plan in stages."""
    single = show_seconds(found.single_seconds) if found.single_seconds < float("inf") else "it does not fit"
    listed = [
        f"{name}: {found.layers} layers of operators; {precision}, AdamW",
        found.machine.describe(),
        f"{len(found.stages)} stages, {microbatches} micro-batches: {show_seconds(found.seconds)} a step; "
        f"without stages {single}",
    ]
    for number, (stage, assigned) in enumerate(zip(found.stages, found.assigned, strict=True)):
        mesh = stage.plan.mesh
        devices = f"device {stage.rank}" + (f" to {stage.rank + mesh.ranks - 1}" * (mesh.ranks > 1))
        layers = f"layers {assigned.first} to {assigned.last - 1}"
        listed += ["", f"stage {number}: {layers} on {devices}, mesh {mesh or '1'}: {show_seconds(assigned.seconds)} "
                   f"a micro-batch, {show_bytes(stage.plan.memory)} of weights and states"]  # fmt: skip
        listed += table_lines(WEIGHT_COLUMNS, list(_weight_rows(stage.plan)))
    return listed
