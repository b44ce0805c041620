"""What `shoal plan` prints of other questions than the best layouts: devices, money, hardware, a map by nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shoal.base.units import show_bytes, show_seconds
from shoal.planning.cost.flops import DAY
from shoal.planning.search.planner import BudgetAnswer, LayoutPlanner
from shoal.planning.search.search import Plan
from shoal.report.planning.tables import estimate_of, table, words


def mfu_of(plan: Plan) -> float:
    """Return the model FLOPs utilisation of the best layout."""
    return estimate_of(plan, plan.found).mfu


def fewest_line(planner: LayoutPlanner, plan: Plan | None) -> str:
    """The fewest devices that hold the model."""
    name = planner.run.cluster.accelerator.name
    if plan is None:
        return f"{planner.model} does not fit on any number of {name} that was tried."
    return (
        f"{plan.run.cluster.size} x {name} are the fewest that hold {planner.model}: "
        f"{show_seconds(plan.found.seconds)} a step, {show_bytes(plan.found.memory.reserved)} on the fullest, "
        f"{words(plan.found.layout)}"
    )


def what_if_lines(plans: Mapping[str, Plan | None]) -> list[str]:
    """The best layout on each kind of hardware, beside the first."""
    rows, first = [], None
    for what, plan in plans.items():
        if plan is None:
            rows.append([what, "does not fit", "", "", "", ""])
            continue
        found = plan.found
        first = first or found.seconds
        rows.append([
            what, show_seconds(found.seconds), f"{100 * (found.seconds / first - 1):+.1f} %",
            f"{100 * mfu_of(plan):.1f} %", show_bytes(found.memory.reserved), words(found.layout),
        ])  # fmt: skip
    return table(["hardware", "step", "", "MFU", "memory", "best layout"], rows)


def budget_lines(planner: LayoutPlanner, paid: BudgetAnswer) -> Iterator[str]:
    """What a training takes and costs on each number of devices, and what the budget pays for."""
    rows = []
    for plan in paid.plans:
        cost = paid.dollars(plan)
        rows.append([
            f"{plan.run.cluster.size:,}", f"{paid.seconds(plan) / DAY:,.1f}", f"${cost:,.0f}",
            "" if cost <= paid.budget else "over budget", words(plan.found.layout),
        ])  # fmt: skip
    yield from table(["devices", "days", "dollars", "", "best layout"], rows)
    yield ""
    if not paid.found:
        nodes = planner.run.cluster.nodes
        yield f"${paid.budget:,.0f} do not pay for {paid.tokens:.3g} tokens on 1 to {nodes:,} nodes."
        return
    days = paid.seconds(paid.found) / DAY
    size = paid.found.run.cluster.size
    yield f"${paid.budget:,.0f}: {size:,} devices, {days:,.1f} days for {paid.tokens:.3g} tokens."


def map_lines(
    planners: Sequence[LayoutPlanner], nodes: Sequence[int], found: Sequence[Sequence[Plan | None]]
) -> list[str]:
    """The best layout of every model on every number of nodes.

    Args:
        found: for each planner, for each number of nodes.
    """
    rows = [
        [planner.model, f"{count * planner.run.cluster.per_node:,}",
         f"{100 * mfu_of(plan):.1f} %" if plan else "", words(plan.found.layout) if plan else "does not fit"]
        for planner, plans in zip(planners, found, strict=True)
        for count, plan in zip(nodes, plans, strict=True)
    ]  # fmt: skip
    return table(["model", "devices", "MFU", "best layout"], rows)
