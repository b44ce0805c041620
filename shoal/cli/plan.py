"""`shoal plan`: which layout to take on a cluster, how many devices to take, and what other hardware would change."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import parse_counts
from shoal.report.planning import tables
from shoal.report.planning.search_progress import search_progress
from shoal.spec.layout import Layout


class PlanOptions(Section):
    model: str = "llama-3-8b"
    """A model of the catalog; with --map several, with commas."""

    cluster: str = "8xH100"
    """8xH100, 64x8xH100-IB400, v5p-4096, as `shoal estimate` takes it."""

    global_batch: str = "4M"
    """Of a step: sequences (1024), or tokens with K or M (4M is 4 x 1024 x 1024)."""

    seq: PositiveInt = 4096
    """Tokens of a sequence."""

    precision: str = "bf16"
    """A name of the number formats, as `shoal train` takes it: bf16, fp32, ..."""

    optimizer: str = "adamw"
    """The update rule."""

    fix: str = ""
    """Fields of the layout that are given, with commas: tp=8,recompute=full, stage_layers=7/8/8/9."""

    top: PositiveInt = 10
    """Layouts to list."""

    fewest: bool = False
    """The fewest devices of the cluster's kind on which it fits, instead."""

    budget: PositiveFloat | None = None
    """Dollars: the number of nodes, up to the cluster's, that is fastest for them, instead."""

    tokens: PositiveFloat | None = None
    """Of the whole training, for --budget (default: 20 for each parameter)."""

    price: PositiveFloat | None = None
    """Dollars for a device and hour (default: the catalog's list price)."""

    what_if: bool = False
    """What other hardware would change: twice the network, half the memory, ..., instead."""

    map: str = ""
    """Numbers of nodes, with commas: the best layout of every model on each, instead."""

    catalog: Path | None = None
    """A TOML file with accelerators, links, nodes and models of your own."""

    toml: Path | None = None
    """Write the best as a run that `shoal train` takes."""

    out: Path | None = None
    """Write a page (.html), or with --map a figure (.svg)."""


def run(options: PlanOptions) -> int:
    """Search, print, and write what was asked for; return the exit code, 1 if nothing fits."""
    check_writable(options.out, "--out", ".svg" if options.map else ".html")
    check_writable(options.toml, "--toml", new=True)
    asked = [name for name in ("fewest", "budget", "what_if", "map") if getattr(options, name)]
    if len(asked) > 1:
        raise UsageError("--fewest, --budget, --what-if and --map are questions of their own.\n  Ask one at a time.")
    if not options.budget:
        reject_unused(options, ("tokens", "price"), "only with --budget, which counts dollars of a whole training")
    if asked:
        unread = ("top", "toml") if options.map else ("top", "toml", "out")
        reject_unused(options, unread, f"--{asked[0].replace('_', '-')} lists no layouts of one search")
    if options.catalog:
        shoal.add_catalog(options.catalog)
    planners = [
        shoal.LayoutPlanner(
            model, options.cluster, global_batch=options.global_batch, sequence_length=options.seq,
            precision=options.precision, optimizer=options.optimizer, fixed=options.fix,
        )
        for model in (options.model.split(",") if options.map else [options.model])
    ]  # fmt: skip
    if options.map:
        return _map(options, planners)
    return _ask(options, planners[0]) if asked else _search(options, planners[0])


def _search(options: PlanOptions, planner: shoal.LayoutPlanner) -> int:
    if options.toml:
        tables.run_toml(options.model, planner.run, Layout())  # or is refused before anything is sought
    with search_progress("searching") as progress:
        plan = planner.plan(options.top, progress)
    estimates = [tables.estimate_of(plan, found) for found in plan.best]
    print("\n".join(tables.lines(options.model, plan, estimates)))
    if not plan.best:
        return 1
    if options.toml:
        options.toml.write_text(tables.run_toml(options.model, planner.run, plan.best[0].layout))
        print(f"written: {options.toml}")
    if options.out:
        from shoal.report.planning.search_page import write_page  # which draws

        write_page(options.out, plan, estimates, tables.reasons(plan, estimates))
        print(f"written: {options.out}")
    return 0


def _ask(options: PlanOptions, planner: shoal.LayoutPlanner) -> int:
    with search_progress("asking") as progress:
        if options.fewest:
            fewest = planner.fewest(progress)
            print(tables.fewest_line(planner, fewest))
            return 0 if fewest else 1
        if options.budget:
            paid = planner.within_budget(options.budget, options.tokens, options.price, progress)
            print("\n".join(tables.budget_lines(planner, paid)))
            return 0 if paid.found else 1
        print("\n".join(tables.what_if_lines(planner.what_if(progress))))
        return 0


def _map(options: PlanOptions, planners: list[shoal.LayoutPlanner]) -> int:
    nodes = parse_counts(options.map, where="--map")
    with search_progress("mapping") as progress:
        found = [planner.on_nodes(nodes, progress) for planner in planners]
    print("\n".join(tables.map_lines(planners, nodes, found)))
    if options.out:
        from shoal.report.planning.search_page import write_map

        write_map(options.out, planners, nodes, found)
        print(f"written: {options.out}")
    return 0
