"""`shoal plan`: find the best layout on a cluster, the best number of devices, and the effect of other hardware."""

from __future__ import annotations

from json import dumps
from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import check_writable, write_atomically
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import parse_counts
from shoal.report.planning import questions, tables
from shoal.report.planning.values import list_plan_values
from shoal.spec.layout import Layout


class PlanOptions(Section):
    model: str = "llama-3-8b"
    """A model in the catalog; with --map a comma-separated list."""

    cluster: str = "8xH100"
    """8xH100, 64x8xH100-IB400, v5p-4096, as in `shoal estimate`."""

    global_batch: str | None = None
    """Sequences per step (1024), or tokens with K or M (4M is 4 x 1024 x 1024; default: about 4M)."""

    sequence_length: PositiveInt | None = None
    """Tokens per sequence (default: the longest that the model was trained for)."""

    precision: str = "bf16"
    """Number formats, with the names of `shoal train`: bf16, fp32, ..."""

    optimizer: str = "adamw"
    """The update rule."""

    software: str = "shoal"
    """The software that trains, as in `shoal estimate`; its own config of the best layout is printed where known."""

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

    tokens: PositiveFloat | None = None
    """Tokens of the complete training, such as 15e12 (default: 20 per parameter)."""

    price: PositiveFloat | None = None
    """Price in dollars per device and hour (default: the catalog's list price)."""

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


def run(options: PlanOptions) -> int:
    """Search, print, and write the requested files; return the exit code, 1 if nothing fits."""
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
    limits = options.model_dump(include={"tokens", "days", "budget", "price"})
    given = options.model_dump(include={"global_batch", "sequence_length", "precision", "optimizer", "software"})
    models = options.model.split(",") if options.map else [options.model]
    planners = [shoal.LayoutPlanner(model, options.cluster, **given, fixed=options.fix) for model in models]
    if not asked:
        return _search(options, planners[0], limits)
    if options.map:
        lines, answered = questions.map_models(planners, parse_counts(options.map, where="--map"), options.out), True
    else:
        lines, answered = questions.answer(planners[0], asked[0], limits)
    print("\n".join(lines))
    return 0 if answered else 1


def _search(options: PlanOptions, planner: shoal.LayoutPlanner, limits: dict[str, float | None]) -> int:
    if options.toml:
        tables.run_toml(options.model, planner.run, Layout())  # rejects an unsupported model before the search
    if options.days and options.budget:
        planner.limit(options.days, options.budget, options.price)
        limits["budget"] = None
    with tables.search_progress("searching") as progress:
        plan = planner.plan(progress)
    estimates = [tables.build_estimate(plan, found) for found in plan.listed] if plan.best else []
    training = shoal.train_fully(plan.run, plan.found.seconds, **limits) if plan.best else None
    listed = tables.lines(options.model, plan, estimates, training)
    if options.toml and training:
        run = tables.run_toml(options.model, planner.run, plan.best[0].layout, training.tokens)
        write_atomically(options.toml, run)
        listed.append(f"written: {options.toml}")
    if options.out and training:
        from shoal.report.planning.search_page import write_page  # slow import

        write_page(options.out, options.model, plan, estimates, tables.reasons(plan, estimates), training)
        listed.append(f"written: {options.out}")
    if options.explain and plan.best:
        listed += tables.explain_lines(plan, estimates)
    if options.json_:
        listed = [dumps(list_plan_values(options.model, plan, estimates, training))]
    print("\n".join(listed))  # after the files: `| head` may end this process
    return 0 if plan.best else 1
