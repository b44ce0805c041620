"""`shoal plan`: which layout to take on a cluster, how many devices to take, and what other hardware would change."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_place
from shoal.base.options import reject_unused
from shoal.base.section import Section, validate
from shoal.base.units import show_bytes, show_seconds
from shoal.cli.estimate import OPTIMIZERS
from shoal.planning.cost.flops import DAY
from shoal.planning.estimable import check_device, check_trained, model_section
from shoal.planning.run import EstimatedRun
from shoal.planning.search.queries import Answer, affordable, fewest, grid, machines, what_if
from shoal.planning.search.search import Plan, Progressing, search
from shoal.planning.search.space import LEVELS, SEARCHED, LayoutSpace, layouts
from shoal.report.planning.tables import estimate_of, lines, reasons, run_toml, table, words
from shoal.spec.catalog import model_shape, tables
from shoal.spec.catalog.clusters import cluster
from shoal.spec.layout import Layout
from shoal.spec.layout.rules import MOST_RANKS
from shoal.spec.number_formats import FORMATS


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
    """Search, print, and write what was asked for; the exit code, 1 if nothing fits.

    Raises:
        UsageError: a name that is not known, or a field that a layout has not.
    """
    wanted = ".svg" if options.map else ".html"
    if options.out and options.out.suffix != wanted:
        raise UsageError(f"--out {options.out}: what is written ends in {wanted}")
    check_place(options.out, "--out")
    check_place(options.toml, "--toml", new=True)
    if sum(map(bool, (options.fewest, options.budget, options.what_if, options.map))) > 1:
        raise UsageError("--fewest, --budget, --what-if and --map are questions of their own.\n  Ask one at a time.")
    if not options.budget:
        reject_unused(options, ("tokens", "price"), "only with --budget, which counts dollars of a whole training")
    if options.fewest or options.budget or options.what_if or options.map:
        asked = next(name for name in ("fewest", "budget", "what_if", "map") if getattr(options, name))
        names = ("top", "toml") if options.map else ("top", "toml", "out")
        reject_unused(options, names, f"--{asked.replace('_', '-')} lists no layouts of one search")
    if options.catalog:
        tables.add(options.catalog)
    if options.map:
        return _map(options)
    problem, space = described(options, options.model), LayoutSpace(fixed=fixed(options.fix))
    if options.toml:
        model_section(options.model, problem.shape, problem.sequence_length)  # or is refused before anything is sought
    if options.fewest or options.budget or options.what_if:
        with shown("asking") as progress:
            return _ask(options, problem, space, progress)
    if next(layouts(problem, space), None) is None:
        given = f" with --fix {options.fix}" if options.fix else ""
        raise UsageError(
            f"no layout of {problem.cluster.size:,} devices{given} can split {options.model} and "
            f"{problem.global_batch:,} sequences of {problem.sequence_length:,} tokens, whatever the memory."
            "\n  Fix fewer fields, or change --cluster, --global-batch or --seq."
        )
    with shown("searching") as progress:
        plan = search(problem, space, count=options.top, progress=progress)
    estimates = [estimate_of(plan, found) for found in plan.best]
    say(lines(options.model, plan, estimates))
    if not plan.best:
        return 1
    if options.toml:
        options.toml.write_text(run_toml(options.model, problem, plan.best[0].layout))
        say([f"written: {options.toml}"])
    if options.out:
        from shoal.report.planning.search_page import write_page  # which draws

        write_page(options.out, plan, estimates, reasons(plan, estimates))
        say([f"written: {options.out}"])
    return 0


def say(lines: Iterable[str]) -> None:
    """Print."""
    for line in lines:
        print(line)


def described(options: PlanOptions, model: str) -> EstimatedRun:
    """What is planned for, of one model."""
    shape = model_shape(model)
    if shape.family == "gpt":
        shape = shape.model_copy(update={"max_sequence": max(shape.max_sequence, options.seq)})
    for option, known in (("precision", FORMATS), ("optimizer", OPTIMIZERS)):
        given = getattr(options, option)
        if given not in known:
            raise UsageError(f"--{option} {given}: there is none; {did_you_mean(given, known)}")
    machine = cluster(options.cluster)
    if machine.size > MOST_RANKS:
        raise UsageError(f"--cluster {options.cluster}: {machine.size:,} devices; a layout has at most {MOST_RANKS:,}.")
    run = EstimatedRun(shape, Layout(), machine, options.seq, sequences(options), options.precision, options.optimizer)
    check_device(run)
    check_trained(run, Layout(micro_batch=run.global_batch))  # what no layout could change
    return run


def sequences(options: PlanOptions) -> int:
    """Of a step.

    Raises:
        UsageError: no number, or tokens that make no sequence.
    """
    given = options.global_batch
    unit = {"K": 2**10, "M": 2**20}.get(given[-1:].upper(), 0)
    number = given[:-1] if unit else given
    if not re.fullmatch("[0-9]{1,15}", number) or not int(number):
        raise UsageError(f"--global-batch {given}: give sequences, as 1024, or tokens, as 4M")
    if not unit:
        return int(number)
    tokens = int(number) * unit
    if tokens % options.seq:
        raise UsageError(
            f"--global-batch {given} = {tokens:,} tokens is no multiple of --seq {options.seq}."
            f"\n  Give sequences, as {max(1, tokens // options.seq)}."
        )
    return tokens // options.seq


def fixed(text: str) -> dict:
    """Fields of a layout, from ``tp=8,recompute=full``.

    Raises:
        UsageError: a field that layouts have not, or a value that it does not take.
    """
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if bad := [name for name, equals, value in pairs if not equals or not value]:
        raise UsageError(f"--fix {text}: write fields and values, as tp=8; {bad[0]} has none")
    values = {name.strip().replace("-", "_"): _typed(value.strip()) for name, _, value in pairs}
    layout = validate(Layout, values, where="--fix")
    if unknown := [name for name in values if name not in LEVELS]:
        raise UsageError(f"--fix {unknown[0]}: it is not searched; allowed: {', '.join(LEVELS)}")
    given = {name: getattr(layout, name) for name in values}
    if given.get("schedule", SEARCHED[0]) not in SEARCHED:
        raise UsageError(f"--fix schedule={given['schedule']}: it is not searched; allowed: {', '.join(SEARCHED)}")
    return given


def _typed(text: str) -> int | bool | str | list[int]:
    """A number, numbers between slashes, or a truth value, where it reads like one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    parts = text.split("/")
    if len(parts) > 1:
        if not all(part.isdecimal() for part in parts):
            raise UsageError(f"--fix {text}: write the layers of all stages, as stage_layers=7/9")
        return [int(part) for part in parts]
    return int(text) if text.isdecimal() else text


@contextmanager
def shown(what: str):
    """A line on stderr for searches that take more than a second; None where nobody sees it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    begin = time.monotonic()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.fields[best]}"),
        console=Console(file=sys.stderr), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, visible=False, best="")

        def progress(done: int, total: int, plan: Plan) -> None:
            if time.monotonic() - begin > 1:
                best = f"best {show_seconds(plan.best[0].seconds)}" if plan.best else ""
                bar.update(task, completed=done, total=total, visible=True, best=best)

        yield progress


# ---- other questions -------------------------------------------------------------------------------------------------


def _ask(options: PlanOptions, run: EstimatedRun, space: LayoutSpace, progress: Progressing | None) -> int:
    if options.fewest:
        answer = fewest(run, space, progress)
        if answer is None:
            say([f"{options.model} does not fit on any number of {run.cluster.accelerator.name} that was tried."])
            return 1
        say([f"{answer.run.cluster.size} x {run.cluster.accelerator.name} are the fewest that hold {options.model}: "
             f"{show_seconds(answer.found.seconds)} a step, {show_bytes(answer.found.memory.reserved)} on the fullest, "
             f"{words(answer.found.layout)}"])  # fmt: skip
        return 0
    if options.what_if:
        say(table(["hardware", "step", "", "MFU", "memory", "best layout"], _compared(what_if(run, space, progress))))
        return 0
    return _pay(options, run, space, progress)


def _pay(options: PlanOptions, run: EstimatedRun, space: LayoutSpace, progress: Progressing | None) -> int:
    """The fastest for some money, beside what 1, 2, 4, ... nodes take."""
    price = options.price or run.cluster.accelerator.dollars_per_hour
    if not price:
        raise UsageError(f"--budget: {run.cluster.accelerator.name} has no price in the catalog.\n  Give --price.")
    tokens = options.tokens or 20 * run.shape.parameters()
    steps = tokens / run.tokens
    of_size = {answer.run.cluster.size: answer for answer in machines(run, space, progress)}
    found = affordable(run, space, options.budget / price * (DAY / 24) / steps, progress)
    if found:
        of_size[found.run.cluster.size] = found
    rows = []
    for size, answer in sorted(of_size.items()):
        days = answer.found.seconds * steps / DAY
        dollars = days * 24 * size * price
        rows.append([f"{size:,}", f"{days:,.1f}", f"${dollars:,.0f}",
                     "" if dollars <= options.budget else "over budget", words(answer.found.layout)])  # fmt: skip
    say(table(["devices", "days", "dollars", "", "best layout"], rows))
    budget = f"${options.budget:,.0f}"
    if not found:
        say(["", f"{budget} do not pay for {tokens:.3g} tokens on 1 to {run.cluster.nodes:,} nodes."])
        return 1
    days = found.found.seconds * steps / DAY
    say(["", f"{budget}: {found.run.cluster.size:,} devices, {days:,.1f} days for {tokens:.3g} tokens."])
    return 0


def _compared(answers: Iterable[tuple[str, Answer | None]]) -> Iterable[list[str]]:
    first = None
    for what, answer in answers:
        if answer is None:
            yield [what, "does not fit", "", "", "", ""]
            continue
        found = answer.found
        first = first or found.seconds
        mfu = estimate_of(answer.plan, found).mfu
        yield [what, show_seconds(found.seconds), f"{100 * (found.seconds / first - 1):+.1f} %", f"{100 * mfu:.1f} %",
               show_bytes(found.memory.reserved), words(found.layout)]  # fmt: skip


def _map(options: PlanOptions) -> int:
    try:
        nodes = [int(number) for number in options.map.split(",")]
    except ValueError:
        raise UsageError(f"--map {options.map}: give numbers of nodes, as 1,8,64") from None
    if min(nodes) < 1:
        raise UsageError(f"--map {options.map}: there is at least one node")
    names = options.model.split(",")
    runs = {name: described(options, name) for name in names}
    with shown("mapping") as progress:
        found = grid(runs, nodes, LayoutSpace(fixed=fixed(options.fix)), progress)
    rows = [
        [name, f"{count * runs[name].cluster.per_node:,}",
         f"{100 * estimate_of(answer.plan, answer.found).mfu:.1f} %" if answer else "",
         words(answer.found.layout) if answer else "does not fit"]
        for (name, count), answer in found.items()
    ]  # fmt: skip
    say(table(["model", "devices", "MFU", "best layout"], rows))
    if options.out:
        from shoal.report.planning.search_page import map_svg

        options.out.write_text(map_svg(names, nodes, found, {
            key: estimate_of(answer.plan, answer.found).mfu for key, answer in found.items() if answer
        }), encoding="utf-8")  # fmt: skip
        say([f"written: {options.out}"])
    return 0
