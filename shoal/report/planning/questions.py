"""Text of what `shoal plan` answers besides one search: fewest devices, other hardware, a training's limits, a map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shoal.base.units import show_bytes, show_metric, show_seconds
from shoal.planning.search.plan import Plan
from shoal.planning.search.planner import LayoutPlanner, TrainingAnswer
from shoal.report.planning.estimate_lines import training_facts
from shoal.report.planning.other_software import words
from shoal.report.planning.tables import best_mfu, search_progress
from shoal.report.tables import table_lines


def answer(planner: LayoutPlanner, question: str, limits: Mapping[str, float | None]) -> tuple[list[str], bool]:
    """Return the lines of an answer, and whether there is one.

    Args:
        question: fewest, what_if, budget or days.
        limits: tokens, days, budget and price, see `LayoutPlanner.train_within`.
    """
    with search_progress("asking") as progress:
        if question == "fewest":
            fewest = planner.fewest(progress)
            return [fewest_line(planner, fewest)], fewest is not None
        if question == "what_if":
            return what_if_lines(planner.what_if(progress)), True
        found = planner.train_within(**limits, progress=progress)
        return list(training_lines(planner, found)), found.found is not None


def map_models(planners: Sequence[LayoutPlanner], nodes: Sequence[int], out: Path | None) -> list[str]:
    """Find each model's best layout on each number of nodes; return the table, and write a figure to ``out``."""
    with search_progress("mapping") as progress:
        found = [planner.on_nodes(nodes, progress) for planner in planners]
    lines = map_lines(planners, nodes, found)
    if out:
        from shoal.report.planning.search_page import write_map  # slow import

        write_map(out, planners, nodes, found)
        lines.append(f"written: {out}")
    return lines


def fewest_line(planner: LayoutPlanner, plan: Plan | None) -> str:
    """Return the line with the fewest devices that hold the model."""
    name = planner.run.cluster.accelerator.name
    if plan is None:
        return f"{planner.model} does not fit on any tried number of {name}."
    return (
        f"{plan.run.cluster.size} x {name} is the smallest number that holds {planner.model}: "
        f"{show_seconds(plan.found.seconds)} a step, {show_bytes(plan.found.memory.reserved)} on the fullest rank, "
        f"{words(plan.found.layout)}"
    )


def what_if_lines(plans: Mapping[str, Plan | None]) -> list[str]:
    """Return a table of the fastest layout on each kind of hardware, compared with the first."""
    rows, first = [], None
    for what, plan in plans.items():
        if plan is None:
            rows.append([what, "does not fit", "", "", "", ""])
            continue
        found = plan.found
        first = first or found.seconds
        rows.append([
            what, show_seconds(found.seconds), f"{100 * (found.seconds / first - 1):+.1f} %",
            f"{100 * best_mfu(plan):.1f} %", show_bytes(found.memory.reserved), words(found.layout),
        ])  # fmt: skip
    return table_lines(["hardware", "step", "", "MFU", "memory", "fastest layout"], rows)


def training_lines(planner: LayoutPlanner, answer: TrainingAnswer) -> Iterator[str]:
    """Yield a complete training on each number of devices, and on the one found."""
    rows = []
    for plan in answer.plans:
        training = answer.training(plan)
        cost = training.dollars
        late, dear = answer.days and training.days > answer.days, answer.budget and cost and cost > answer.budget
        rows.append([
            f"{training.devices:,}", f"{training.days:,.1f}", f"${cost:,.0f}" if cost else "",
            show_metric(1e3 * (training.kilowatt_hours or 0), "Wh"), show_metric(1e3 * (training.kilowatts or 0), "W"),
            "too long" if late else "over budget" if dear else "", words(plan.found.layout),
        ])  # fmt: skip
    yield from table_lines(["devices", "days", "dollars", "energy", "power", "", "fastest layout"], rows)
    yield ""
    limit = f"{answer.days:g} days" if answer.days else f"${answer.budget:,.0f}"
    if not answer.found:
        short = "are too short" if answer.days else "does not pay"
        yield f"{limit} {short} for {answer.tokens:.3g} tokens on 1 to {planner.run.cluster.nodes:,} nodes."
        return
    training = answer.training(answer.found)
    which = "the fewest nodes that keep it" if answer.days else "the fastest that it pays"
    facts = (f"{name} {value}" for name, value in training_facts(answer.found.run, training))
    yield f"{limit}: {training.devices:,} devices, {which}: {'; '.join(facts)}."


def map_lines(
    planners: Sequence[LayoutPlanner], nodes: Sequence[int], found: Sequence[Sequence[Plan | None]]
) -> list[str]:
    """Return a table of the fastest layout ``found`` for each planner's model on each number of nodes."""
    rows = [
        [planner.model, f"{count * planner.run.cluster.per_node:,}",
         f"{100 * best_mfu(plan):.1f} %" if plan else "", words(plan.found.layout) if plan else "does not fit"]
        for planner, plans in zip(planners, found, strict=True)
        for count, plan in zip(nodes, plans, strict=True)
    ]  # fmt: skip
    return table_lines(["model", "devices", "MFU", "fastest layout"], rows)
