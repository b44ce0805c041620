"""`shoal estimate`: memory and time of a run before it is launched."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

import shoal
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.cli.arguments import is_given, parse_run, split_run_file
from shoal.cli.commands import COMMANDS
from shoal.report.planning.estimate_lines import change_rows, estimate_facts, estimate_lines
from shoal.report.planning.other_software import software_lines
from shoal.report.planning.values import list_estimate_values, list_own_values
from shoal.spec.run_options import RunOptions

DEFAULT_MODEL = "llama-3-8b"


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
    if from_file and config.model.module and not options.model:
        used = {"cluster", "catalog", "dry_run"} | ({"rank", "steps", "measure"} if options.dry_run else {"json_"})
        others = [name for name in EstimateOptions.model_fields if name not in used]
        reject_unused(options, others, "a module of one's own is counted, with the settings of its file")
        if options.catalog:
            shoal.add_catalog(options.catalog)
        if options.dry_run:
            how = options.model_dump(include={"rank", "steps", "measure"})
            print(*shoal.dry_run_own_model(config, options.cluster, **how).lines(), sep="\n")
            return 0
        estimated = shoal.estimate_own_model(config, options.cluster)
        print(dumps(list_own_values(estimated)) if options.json_ else "\n".join(estimated.lines()))
        return 0 if estimated.fits else 1
    check_writable(options.out, "--out", ".svg" if options.sweep else ".html")
    if options.sweep:
        unused = ("tokens", "days", "budget", "price", "dry_run", "json_")
        reject_unused(options, unused, "a sweep compares steps")
    if options.dry_run:
        unused = ("tokens", "days", "budget", "price", "software", "json_")
        reject_unused(options, unused, "a dry run counts one rank's first steps by shoal, and prices no training")
    else:
        reject_unused(options, ("rank", "steps", "measure"), "only with --dry-run, which runs a rank's first steps")
    if options.catalog:
        shoal.add_catalog(options.catalog)
    model = options.model or (None if from_file else DEFAULT_MODEL)
    name = model or config.model.name
    run: dict[str, Any] = {
        "model": model, "config": from_file, "fill": not is_given("parallel", "dp", args),
        **options.model_dump(include={"cluster", "sequence_length", "global_batch", "precision", "optimizer"}),
    }  # fmt: skip
    listed, code = list[str](), 0
    if options.sweep:
        from shoal.report.planning.sweep_report import sweep_lines  # slow import

        run["software"] = options.software
        print(*sweep_lines(options.sweep, config.parallel, run, name, options.out), sep="\n")
        return 0
    if options.dry_run:
        counted = shoal.dry_run(config.parallel, **run, **options.model_dump(include={"rank", "steps", "measure"}))
        listed += counted.lines()
    else:
        estimate = shoal.estimate(config.parallel, **run, software=options.software)
        limits = options.model_dump(include={"tokens", "days", "budget", "price"})
        if from_file and is_given("train", "steps", args) and not (options.days or options.budget):
            limits["tokens"] = options.tokens or config.train.steps * estimate.run.tokens
        training = shoal.train_fully(estimate.run, estimate.step_seconds, **limits)
        facts, changes = estimate_facts(estimate, training), change_rows(estimate)
        listed += estimate_lines(estimate, facts, changes, name)
        if options.software != "shoal":
            listed += ["", *software_lines(estimate.run, "The layout")]
        code = 0 if estimate.fits else 1
    if options.out:
        from shoal.report.planning.estimate_page import write_memory_page, write_page  # slow import

        if options.dry_run:
            write_memory_page(options.out, counted.estimate, counted.counted, counted.measured)
        else:
            write_page(options.out, estimate, facts, changes, name)
        listed.append(f"written: {options.out}")
    if options.json_:
        listed = [dumps(list_estimate_values(name, estimate, training))]
    print("\n".join(listed))  # after the file: `| head` may end this process
    return code
