"""Text report of `shoal plan`: the layouts found, why each is slower than the first, the config, and other answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tomli_w

from shoal.base.errors import UsageError
from shoal.base.terminal import progress_bar, red, wrap_lines
from shoal.base.units import show_bytes, show_seconds
from shoal.planning.cost.memory.stage import StageMemory
from shoal.planning.estimable import model_section
from shoal.planning.estimate import NAMES, Estimate, StepEstimate
from shoal.planning.full_training import FullTraining
from shoal.planning.run import EstimatedRun
from shoal.planning.search.kinds import TIE
from shoal.planning.search.plan import Plan, PricedLayout, Progressing
from shoal.planning.software_estimate import estimate_run
from shoal.report.planning.estimate_lines import training_facts
from shoal.report.planning.other_software import software_lines, words
from shoal.report.tables import table_lines
from shoal.spec.layout import Layout

ABOUT = {
    "matrix products": "products of the layers and of the head, forward and backward",
    "attention": "scores, softmax and weighted values, forward and backward",
    "element by element": "norms, activations, residuals, loss: bound by the memory's bandwidth",
    "recomputation": "forwards that run again in the backward",
    "tensor parallelism": "sums and gathers of activations over tp ranks that products do not hide",
    "context parallelism": "keys and values (or heads) that travel between cp ranks",
    "expert parallelism": "tokens that travel to their experts and back",
    "gathers and reductions": "parameters gathered and gradients reduced over replicas, as far as exposed",
    "optimizer": "the update: reads and writes of states",
    "allocator": "memory that torch's allocator returns to the device and asks for again, where all of it is reserved",
    "launches": "kernels that the host launches too late",
    "messages between stages": "activations and gradients sent from stage to stage, as far as waited for",
    "bubble": "waiting for other pipeline stages",
}  # of each of `NAMES`


def lines(
    model: str, plan: Plan, estimates: Sequence[StepEstimate], training: FullTraining | None,
    file: Mapping[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Return the report of a search for a model, given the estimates of its results, and the complete training; for
    the run of a file also its tables."""
    run = plan.run
    head = [
        f"{model}: {run.shape.parameters():,} parameters, {run.precision}, {run.optimizer}",
        f"{run.cluster.describe()}; {run.global_batch:,} sequences of {run.sequence_length:,} tokens a step",
        "",
    ]
    if not plan.best or training is None:
        limit = show_bytes(StageMemory(run).capacity)
        fewest = "  `shoal plan --fewest` finds the number of devices that it needs."
        return [red(f"No searched layout fits in {limit}."), fewest, *nearby_lines(plan), "", *head]
    every = zip(plan.listed, estimates, reasons(plan, estimates), strict=True)
    rows = [
        [found.role, show_seconds(found.seconds), f"{100 * estimate.mfu:.1f} %", show_bytes(found.memory.reserved),
         words(found.layout), reason]
        for found, estimate, reason in every
    ]  # fmt: skip
    low, high = map(show_seconds, estimates[0].interval)
    least, most = map(show_bytes, estimates[0].memory_interval)
    best = replace(run, layout=plan.found.layout)
    heading, *config = layout_lines(model, best, training.tokens, "The recommended", file)
    searched = (
        f"{plan.branches - plan.pruned:,} of {plan.branches:,} combinations of mesh, micro-batch and pipeline bounded, "
        f"{len(plan.players)} program{'s' * (len(plan.players) > 1)}, {plan.played:,} layouts simulated"
        if plan.players else f"{plan.played:,} layouts of {run.software.name} priced"
    )
    text = [
        *head, *table_lines(["", "step", "MFU", "memory", "layout", "against the recommended"], rows), "",
        f"80 % intervals of the recommended: step {low} to {high}, memory {least} to {most} of "
        f"{show_bytes(estimates[0].capacity)}. Steps within {100 * TIE:.0f} % of each other are ties; of these the "
        "simplest is recommended.",
        f"Accuracy of such a time: {estimates[0].accuracy().describe()}.",
        *nearby_lines(plan), "",
        *(f"{name}: {value}" for name, value in training_facts(run, training)), "",
        f"{searched}: {plan.seconds:.1f} s",
    ]
    return [*wrap_lines(text), "", heading, "", *config]


def layout_lines(
    model: str, run: EstimatedRun, tokens: float, what: str, file: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a heading, and the layout as config of the software that trains, or why it has none.

    Args:
        tokens: of the complete training.
        what: what the layout is, which begins the heading.
    """
    if run.software.name != "shoal":
        return list(software_lines(run, what))
    try:
        return [f"{what}, for shoal train:", *run_toml(model, run, run.layout, tokens, file).splitlines()]
    except UsageError as error:
        return [f"{what}:", str(error)]


def nearby_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for each faster run nearby, or that fits: what changes, what it gains, and its layout."""
    run, rate = plan.run, plan.tokens_per_second
    for other in plan.nearby:
        if (batch := other.run.global_batch) != run.global_batch:
            what = f"--global-batch {batch} ({100 * (batch / run.global_batch - 1):+.1f} %)"
        else:
            what = f"--cluster {other.run.cluster.name} ({run.cluster.size - other.run.cluster.size:,} devices fewer)"
        gain = f"{100 * (other.tokens_per_second / rate - 1):.0f} % more" if rate else f"{other.tokens_per_second:,.0f}"
        yield f"{'Faster' if rate else 'Fits'}: {what}: {gain} tokens per second, {words(other.found.layout)}."


def build_estimate(plan: Plan, found: PricedLayout) -> StepEstimate:
    """Build the full estimate of a layout found by a search, from its simulated program."""
    layout = found.layout
    run = replace(plan.run, layout=layout)
    player = plan.players.get((layout.pp, run.microbatches, layout.schedule, layout.virtual_stages))
    if player is None:
        return estimate_run(run)
    columns = player.columns
    program = replace(columns.program, layers=layout.stage_layers or (), actions=((),) * layout.pp)
    return Estimate(run, replace(columns, program=program), plan.known)


def best_mfu(plan: Plan) -> float:
    """Return the model FLOPs utilisation of the best layout."""
    return build_estimate(plan, plan.found).mfu


def reasons(plan: Plan, estimates: Sequence[StepEstimate]) -> list[str]:
    """Return, for each listed layout, whether it fits, and what takes longer and what less than in the first."""
    best = estimates[0].breakdown
    found = [f"tokens per second {plan.run.tokens / plan.best[0].seconds:,.0f}"]
    for rival, estimate in zip(plan.listed[1:], estimates[1:], strict=True):
        other = estimate.breakdown
        more = {name: other[name] - best[name] for name in best}
        enough = [name for name in more if abs(more[name]) > 1e-3 * plan.best[0].seconds]
        ranked = sorted(enough, key=lambda name: -abs(more[name]))[:2]
        change = ", ".join(f"{name} {'+' if more[name] > 0 else '-'}{show_seconds(abs(more[name]))}" for name in ranked)
        bytes_more = round(rival.memory.reserved - plan.best[0].memory.reserved)
        if not change and bytes_more:
            change = f"memory {'+' if bytes_more > 0 else '-'}{show_bytes(abs(bytes_more))}"
        verdict = "" if estimate.fits else "may not fit in" if estimate.may_fit else "does not fit in"
        needs = f"{verdict} {show_bytes(estimate.capacity)}; " if verdict else ""
        found.append(f"{needs}{100 * (rival.seconds / plan.best[0].seconds - 1):+.1f} %: {change or 'the same'}")
    return found


def explain_lines(plan: Plan, estimates: Sequence[StepEstimate]) -> list[str]:
    """Return a table of what each part of the listed steps takes on the busiest pipeline rank."""
    parts = [name for name in NAMES if any(e.breakdown[name] > 1e-4 * e.step_seconds for e in estimates)]
    rows = [[name, *(show_seconds(e.breakdown[name]) for e in estimates), ABOUT[name]] for name in parts]
    rows.append(["step", *(show_seconds(e.step_seconds) for e in estimates), "seconds from one update to the next"])
    return ["", *table_lines(["seconds of a step", *(found.role for found in plan.listed), "what it is"], rows)]


def run_toml(
    model: str | Mapping[str, Any], run: EstimatedRun, layout: Layout, tokens: float | None = None,
    file: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Return a run's TOML with the planned layout and the model's own vocabulary.

    Args:
        model: name in the catalog, or the config section that creates the model.
        tokens: of the complete training, which determine the steps.
        file: tables of the file whose run was planned; only its layout, and what was planned otherwise, is changed.

    Raises:
        UsageError: the model is user-defined, and no config produces it.
    """
    defaults = Layout()
    parallel = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in layout if value is not None and value != getattr(defaults, name)
    }
    steps = {} if tokens is None else {"steps": max(1, round(tokens / run.tokens))}
    found: dict[str, dict[str, Any]] = {
        "data": {"sequence_length": run.sequence_length},
        "train": steps | {"global_batch": run.global_batch, "precision": run.precision},
        "optimizer": {"name": run.optimizer},
    }
    if file is not None:
        changed = {name: {**file.get(name, {}), **section} for name, section in found.items()}
        return tomli_w.dumps({**file, **changed, "parallel": parallel})
    section = model_section(model, run.shape) if isinstance(model, str) else {**model}
    return tomli_w.dumps({"model": section, "parallel": parallel, **found})


@contextmanager
def search_progress(what: str) -> Iterator[Progressing]:
    """Show a progress bar of a search on stderr."""
    with progress_bar(what) as show:

        def progress(done: int, total: int, plan: Plan) -> None:
            best = f", best {show_seconds(plan.best[0].seconds)}" if plan.best else ""
            show(done / total, f"{done}/{total}{best}")

        yield progress
