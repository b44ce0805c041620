"""`shoal bench step`: the races, their table, and its file."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from pydantic import PositiveInt
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_place, write_whole
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.engine.cpu_tuning import allocator_environment
from shoal.engine.device import usable_cores
from shoal.labs.bench.crew import Failed
from shoal.labs.bench.progress import telling
from shoal.labs.bench.race import ContenderResult, Disagreement, Race, run
from shoal.labs.bench.step import shoal_engine
from shoal.labs.bench.step.comparisons import NAMES, races
from shoal.labs.bench.step.torch_pipelining import MICROBATCHES
from shoal.labs.bench.step.workload import Workload

SHARED = ("dp", "zero", "fsdp", "threads", "overlap-network", "compression-network", "pp")
"""Races whose ranks, or micro-batches, share the sequences of a step evenly."""


class StepOptions(Section):
    """Training steps of shoal and of torch's own implementations, in turn; exit code 1 if a target is missed or a race
    fails."""

    only: str = ""
    """Some of the races, with commas: dp, zero, fsdp, threads, overlap, overlap-device, overlap-network,
    compression-network, tp, tp-overlap, tp-overlap-network, pp, single, compile; or one of several of a kind, as in
    "pp zb-v" or "tp-overlap ring"."""

    turns: PositiveInt = 10
    """Turns of each contender; what is compared are medians over all."""

    steps: PositiveInt = 3
    """Steps in a turn."""

    sequences: PositiveInt = 8
    """Sequences of 256 tokens in a step, over all ranks: a multiple of the ranks, and of 8 for pp."""

    ranks: PositiveInt = 2
    """Ranks of one thread (in single and compile: threads)."""

    products: Literal["equal", "torch"] = "equal"
    """Who multiplies for torch's contenders: the library that shoal chooses for its ranks, so that nothing but the
    parallelism differs; or the one that torch has by itself."""

    quick: bool = False
    """2 turns of 1 step: shows that everything runs and computes the same losses, and proves nothing about speed."""

    out: Path | None = None
    """Also write the table to this file, .csv or .json."""


def step(options: StepOptions, console: Console) -> int:
    """Run the races and print the table, of those that are done whatever ends the others."""
    every = races(Workload(sequences=options.sequences), options.ranks, products=options.products == "equal")
    names = _wanted(options.only, every)
    if options.quick:
        reject_unused(options, ("turns", "steps"), "--quick takes 2 turns of 1 step")
    _check_out(options.out)
    _check_allocator()
    wanted = [race for race in every if race.name in names or race.name.split()[0] in names]
    _check_work(options, wanted)
    turns, steps = (2, 1) if options.quick else (options.turns, options.steps)
    rows: list[ContenderResult] = []
    failed = False
    try:
        with telling(console) as tell:
            for race in wanted:
                try:
                    found = run(race, turns, steps, warmup=2, say=tell)
                except (Failed, Disagreement) as error:
                    failed = True
                    reason = error.reason if isinstance(error, Failed) else error
                    console.print(Text(f"{race.name} failed: {reason}"))
                    if str(error) != str(reason):  # with the traceback of the process in which it was
                        print(error, file=sys.stderr)
                    continue
                rows += found
                for row in found:
                    if row.target is not None:
                        console.print(Text(f"{race.name}: {row.contender} at {row.ratio:.2f} of {row.target:.2f}"))
    finally:
        if rows:
            _report(rows, options, console)
    missed = [row for row in rows if row.met is False]
    return 1 if failed or (missed and not options.quick) else 0


def _report(rows: list[ContenderResult], options: StepOptions, console: Console) -> None:
    console.print(step_table(rows))
    if options.products == "torch":
        console.print("Torch's contenders multiply by the library that torch has by itself.")
    console.print(machine(), highlight=False)
    if options.out:
        write(rows, options.out)


def _wanted(only: str, every: list[Race]) -> list[str]:
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(NAMES)
    allowed = list(dict.fromkeys([*NAMES, *(race.name for race in every)]))
    for name in wanted:
        if name not in allowed:
            raise UsageError(f"bench step --only {only}: there is no race '{name}'; {did_you_mean(name, allowed)}")
    return wanted


def _check_work(options: StepOptions, wanted: list[Race]) -> None:
    if options.ranks < 2:
        raise UsageError(f"bench step --ranks {options.ranks}: parallelism needs 2 or more.")
    for race in wanted:
        parts = MICROBATCHES if race.name.startswith("pp ") else options.ranks
        if options.sequences % parts and race.name.split()[0] in SHARED:
            raise UsageError(
                f"bench step --sequences {options.sequences}: {race.name} needs a multiple of {parts}."
                f"\n  Give {-(-options.sequences // parts) * parts}, or choose other races with --only."
            )
        for contender in (*race.ours, *race.references, *race.also, *race.bounds):
            try:
                shoal_engine.check(contender)
            except UsageError as error:
                raise UsageError(f"bench step, {race.name}: {error}") from None


def _check_out(out: Path | None) -> None:
    if out is not None and out.suffix not in (".csv", ".json"):
        raise UsageError(f"bench step --out {out}: give a file ending in .csv or .json.")
    check_place(out, "bench step --out", new=True)


def _check_allocator() -> None:
    """The system's setting is one side of a comparison, so it must be the system's."""
    foreign = [name for name in (*allocator_environment(), "GLIBC_TUNABLES", "LD_PRELOAD") if os.environ.get(name)]
    if foreign:
        raise UsageError(f"the environment sets the allocator of every contender: unset {', '.join(foreign)}.")


def step_table(rows: list[ContenderResult]) -> Table:
    """The result as people read it; 80 columns are enough."""
    table = Table(title="one training step: shoal beside torch", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("contender", overflow="fold")
    for column in ("ms", "CPU ms", "tokens/s", "MB", "ratio", "quartiles", "target"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("met", no_wrap=True)
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1].race != row.race:
            table.add_row(f"[bold]{row.race}")
        target = "" if row.target is None else f"{row.target:.2f}"
        met = {None: "", True: "[green]yes", False: "[red]no"}[row.met]
        table.add_row(
            f"  {row.contender}", f"{row.seconds * 1e3:.1f}", f"{row.cpu_seconds * 1e3:.1f}",
            f"{row.tokens_per_second:,.0f}", f"{row.memory / 1e6:.0f}", f"{row.ratio:.2f}",
            f"{row.spread[0]:.2f}-{row.spread[1]:.2f}", target, met,
            end_section=i + 1 == len(rows) or rows[i + 1].race != row.race,
        )
    return table


def machine() -> str:
    """What was measured on, in one line."""
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"torch {torch.__version__}, {platform.machine()}, {usable_cores()} cores{load}"


def write(rows: list[ContenderResult], out: Path) -> None:
    """The table as CSV or JSON, by the file's ending."""
    records = [asdict(row) | {"met": row.met} for row in rows]
    if out.suffix == ".json":
        write_whole(out, json.dumps({"machine": machine(), "rows": records}, indent=1) + "\n")
        return
    for record in records:
        record["spread_low"], record["spread_high"] = record.pop("spread")
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0])
    writer.writeheader()
    writer.writerows(records)
    write_whole(out, text.getvalue())
