"""`shoal plan`: find the best layout on a cluster, the best number of devices, and the effect of other hardware."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import check_writable, read_toml, write_atomically
from shoal.base.options import reject_unused
from shoal.base.terminal import wrap_lines
from shoal.base.units import parse_counts
from shoal.report.planning import questions, tables
from shoal.report.planning.values import list_plan_values
from shoal.spec.layout import Layout
from shoal.spec.run_options import RunOptions


class PlanOptions(RunOptions):
    model: str | None = None
    """A model in the catalog (default: the file's, else llama-3-8b); with --map a comma-separated list."""

    fix: str = ""
    """Comma-separated layout fields with fixed values: tp=8,recompute=full, stage_layers=7/8/8/9."""

    explain: bool = False
    """Also show what each part of the listed steps takes, in seconds."""

    fewest: bool = False
    """Find the smallest number of the cluster's devices on which the model fits, instead."""

    budget: PositiveFloat | None = None
    """Dollars of the complete training: find the number of nodes, up to the cluster's, that is fastest within it."""

    days: PositiveFloat | None = None
    """Days of the complete training: how many tokens; with --tokens find the fewest nodes, with --budget both."""

    what_if: bool = False
    """Show the effect of other hardware (twice the network, half the memory, ...), instead."""

    map: str = ""
    """Comma-separated numbers of nodes: show the best layout of every model on each, instead."""

    catalog: Path | None = None
    """A TOML file with accelerators, links, nodes and models of your own."""

    json_: bool = False
    """Print one JSON object instead, in seconds, bytes and fractions."""

    toml: Path | None = None
    """Write the best layout as a TOML file for `shoal train`."""

    out: Path | None = None
    """Write a page (.html), or with --map a figure (.svg)."""


def run(options: PlanOptions, file: Path | None = None) -> int:
    """Search, print, and write the requested files; return the exit code, 1 if nothing fits.

    Args:
        file: a run's TOML file, whose layout is replaced.
    """
    check_writable(options.out, "--out", ".svg" if options.map else ".html")
    check_writable(options.toml, "--toml", new=True)
    asked = [name for name in ("fewest", "budget", "what_if", "map") if getattr(options, name)]
    if options.days and options.budget:  # of the largest cluster that they pay for
        reject_unused(options, ("tokens",), "--days and --budget determine them")
        asked.remove("budget")
    elif options.days and options.tokens:
        asked.append("days")
    if len(asked) > 1:
        names = "--fewest, --budget, --days, --what-if and --map"
        raise UsageError(f"{names} are questions of their own.\n  Ask one at a time.")
    if asked:
        question = f"--{asked[0].replace('_', '-')}"
        training = asked[0] in ("budget", "days")
        reject_unused(options, () if training else ("tokens", "price", "days"), f"{question} prices no training")
        unread = ("toml", "explain", "json_") if options.map else ("toml", "explain", "json_", "out")
        reject_unused(options, unread, f"{question} lists no layouts of one search")
    if options.software != "shoal":
        reject_unused(options, ("toml",), "`shoal train` runs what shoal is planned for")
    if options.catalog:
        shoal.add_catalog(options.catalog)
    config = shoal.load_config(file) if file else None
    limits = options.model_dump(include={"tokens", "days", "budget", "price"})
    given = options.model_dump(include={"global_batch", "sequence_length", "precision", "optimizer", "software"})
    models = options.model.split(",") if options.model and options.map else [options.model]
    planners = [
        shoal.LayoutPlanner(model, options.cluster, config=config, **given, fixed=options.fix) for model in models
    ]
    if config and "steps" in config.train.model_fields_set and not options.days:
        limits["tokens"] = options.tokens or config.train.steps * planners[0].run.tokens
    if not asked:
        return _search(options, planners[0], limits, read_toml(file) if file else None)
    if options.map:
        lines, answered = questions.map_models(planners, parse_counts(options.map, where="--map"), options.out), True
    else:
        lines, answered = questions.answer(planners[0], asked[0], limits)
    print("\n".join(wrap_lines(lines)))
    return 0 if answered else 1


def _search(
    options: PlanOptions, planner: shoal.LayoutPlanner, limits: dict[str, float | None], file: dict[str, Any] | None
) -> int:
    model = planner.model
    if file is not None and options.model:
        file["model"] = {"name": model, "vocab": planner.run.shape.vocab}
    if options.toml:
        tables.run_toml(model, planner.run, Layout(), file=file)  # rejects an unsupported model before the search
    if options.days and options.budget:
        planner.limit(options.days, options.budget, options.price)
        limits["budget"] = None
    with tables.search_progress("searching") as progress:
        plan = planner.plan(progress)
    estimates = [tables.build_estimate(plan, found) for found in plan.listed] if plan.best else []
    training = shoal.train_fully(plan.run, plan.found.seconds, **limits) if plan.best else None
    listed = tables.lines(model, plan, estimates, training, file)
    if options.toml and training:
        run = tables.run_toml(model, planner.run, plan.best[0].layout, training.tokens, file)
        write_atomically(options.toml, run)
        listed.append(f"written: {options.toml}")
    if options.out and training:
        from shoal.report.planning.search_page import write_page  # slow import

        write_page(options.out, model, plan, estimates, tables.reasons(plan, estimates), training, file)
        listed.append(f"written: {options.out}")
    if options.explain and plan.best:
        listed += tables.explain_lines(plan, estimates)
    if options.json_:
        listed = [dumps(list_plan_values(model, plan, estimates, training))]
    print("\n".join(listed))  # after the files: `| head` may end this process
    return 0 if plan.best else 1
