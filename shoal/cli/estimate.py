"""`shoal estimate`: memory and time of a run before it is launched."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

import shoal
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.base.terminal import wrap_lines
from shoal.cli.arguments import is_given, parse_run, split_run_file
from shoal.cli.commands import COMMANDS
from shoal.report.planning.estimate_lines import change_rows, estimate_facts, estimate_lines
from shoal.report.planning.other_software import software_lines
from shoal.report.planning.values import list_estimate_values, list_own_values
from shoal.spec.run_options import RunOptions

DEFAULT_MODEL = "llama-3-8b"
COUNTING = ("rank", "steps", "measure")  # options of a dry run alone


class EstimateOptions(RunOptions):
    days: PositiveFloat | None = None
    """Duration of the complete training, instead of its tokens."""

    budget: PositiveFloat | None = None
    """Cost of the complete training in dollars, instead of its tokens."""

    catalog: Path | None = None
    """A TOML file with accelerators, links, nodes and models of your own."""

    sweep: str = ""
    """Vary a number: tp=1,2,4,8 or nodes=1,8,64, or sequence-length, global-batch, zero, ...; --out draws it (.svg)."""

    dry_run: bool = False
    """Run the real model of one rank on fake tensors, and count its FLOPs, bytes and memory (default batch: two
    micro-batches for each stage)."""

    rank: NonNegativeInt = 0
    """With dry_run: rank to run."""

    steps: PositiveInt = 4
    """With dry_run: number of steps to run."""

    measure: bool = False
    """With dry_run: also start all ranks on this machine, and compare their memory."""

    json_: bool = False
    """Print one JSON object instead, in seconds, bytes and fractions."""

    out: Path | None = None
    """Write a page (.html), or the figure of a sweep (.svg)."""


def main(args: list[str]) -> int:
    """Estimate or count, print, and write the page; return the exit code, 1 if the run does not fit."""
    options, config = parse_run("estimate", EstimateOptions, args, COMMANDS["estimate"].config)
    from_file = config if split_run_file(args)[0] else None
    own = from_file is not None and bool(config.model.module) and not options.model
    _check(options, own)
    if options.catalog:
        shoal.add_catalog(options.catalog)
    if own:
        return _estimate_own(options, config)
    model = options.model or (None if from_file else DEFAULT_MODEL)
    run: dict[str, Any] = {
        "model": model, "config": from_file, "fill": not is_given("parallel", "dp", args),
        **options.model_dump(include={"cluster", "sequence_length", "global_batch", "precision", "optimizer"}),
    }  # fmt: skip
    name = model or config.model.name
    if options.sweep:
        from shoal.report.planning.sweep_report import sweep_lines  # slow import

        run["software"] = options.software
        print(*wrap_lines(sweep_lines(options.sweep, config.parallel, run, name, options.out)), sep="\n")
        return 0
    if options.dry_run:
        return _count(options, config.parallel, run)
    steps = config.train.steps if from_file and is_given("train", "steps", args) else None
    return _estimate(options, config.parallel, run, name, steps)


def _check(options: EstimateOptions, own: bool) -> None:
    """Raise UsageError if the answer would not use an option, or its page cannot be written."""
    if own:
        used = {"cluster", "catalog", "dry_run"} | ({"rank", "steps", "measure"} if options.dry_run else {"json_"})
        others = [name for name in EstimateOptions.model_fields if name not in used]
        return reject_unused(options, others, "a module of one's own is counted, with the settings of its file")
    check_writable(options.out, "--out", ".svg" if options.sweep else ".html")
    if options.sweep:
        unused = ("tokens", "days", "budget", "price", "dry_run", "json_")
        reject_unused(options, unused, "a sweep compares steps")
    if options.dry_run:
        unused = ("tokens", "days", "budget", "price", "software", "json_")
        why = "a dry run counts one rank's first steps by shoal, and prices no training"
        return reject_unused(options, unused, why)
    return reject_unused(options, COUNTING, "only with --dry-run, which runs a rank's first steps")


def _estimate_own(options: EstimateOptions, config: shoal.RunConfig) -> int:
    """Count a module of one's own, and price it."""
    if options.dry_run:
        how = options.model_dump(include={*COUNTING})
        print(*wrap_lines(shoal.dry_run_own_model(config, options.cluster, **how).lines()), sep="\n")
        return 0
    estimated = shoal.estimate_own_model(config, options.cluster)
    print(dumps(list_own_values(estimated)) if options.json_ else "\n".join(wrap_lines(estimated.lines())))
    return 0 if estimated.fits else 1


def _count(options: EstimateOptions, layout: shoal.Layout, run: dict[str, Any]) -> int:
    """Run the real code of one rank on fake tensors."""
    counted = shoal.dry_run(layout, **run, **options.model_dump(include={*COUNTING}))
    listed = wrap_lines(counted.lines())
    if options.out:
        from shoal.report.planning.estimate_page import write_memory_page  # slow import

        write_memory_page(options.out, counted.estimate, counted.counted, counted.measured)
        listed.append(f"written: {options.out}")
    print("\n".join(listed))  # after the file: `| head` may end this process
    return 0


def _estimate(options: EstimateOptions, layout: shoal.Layout, run: dict[str, Any], name: str, steps: int | None) -> int:
    """Estimate a step and the complete training, of this many steps if nothing else is given, and print all."""
    estimate = shoal.estimate(layout, **run, software=options.software)
    limits = options.model_dump(include={"tokens", "days", "budget", "price"})
    if steps is not None and not (options.days or options.budget):
        limits["tokens"] = options.tokens or steps * estimate.run.tokens
    training = shoal.train_fully(estimate.run, estimate.step_seconds, **limits)
    facts, changes = estimate_facts(estimate, training), change_rows(estimate)
    listed = [*estimate_lines(estimate, facts, changes, name)]
    if options.software != "shoal":
        listed += ["", *software_lines(estimate.run, "The layout")]
    if options.out:
        from shoal.report.planning.estimate_page import write_page  # slow import

        write_page(options.out, estimate, facts, changes, name, training.tokens)
        listed.append(f"written: {options.out}")
    if options.json_:
        listed = [dumps(list_estimate_values(name, estimate, training))]
    else:
        listed = wrap_lines(listed)
    print("\n".join(listed))  # after the file: `| head` may end this process
    return 0 if estimate.fits else 1
