"""`shoal bench step`: the races, their table, and its file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt
from rich.console import Console
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_place
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.labs.bench.crew import Failed
from shoal.labs.bench.machine import machine
from shoal.labs.bench.progress import telling
from shoal.labs.bench.race import ContenderResult, Disagreement
from shoal.labs.bench.race import run as run_race
from shoal.labs.bench.step.results import table, write
from shoal.labs.bench.step.selection import choose_races


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


def run(options: StepOptions, console: Console) -> int:
    """Run the races and print the table, of those that are done whatever ends the others; returns the exit code."""
    if options.quick:
        reject_unused(options, ("turns", "steps"), "--quick takes 2 turns of 1 step")
    _check_out(options.out)
    wanted = choose_races(
        options.only, sequences=options.sequences, ranks=options.ranks, products=options.products == "equal"
    )
    turns, steps = (2, 1) if options.quick else (options.turns, options.steps)
    rows: list[ContenderResult] = []
    failed = False
    try:
        with telling(console) as tell:
            for race in wanted:
                try:
                    found = run_race(race, turns, steps, warmup=2, say=tell)
                except (Failed, Disagreement) as error:
                    failed = True
                    _print_failure(race.name, error, console)
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


def _check_out(out: Path | None) -> None:
    if out is not None and out.suffix not in (".csv", ".json"):
        raise UsageError(f"bench step --out {out}: give a file ending in .csv or .json.")
    check_place(out, "bench step --out", new=True)


def _print_failure(race: str, error: Failed | Disagreement, console: Console) -> None:
    reason = error.reason if isinstance(error, Failed) else str(error)
    console.print(Text(f"{race} failed: {reason}"))
    if str(error) != reason:  # with the traceback of the process in which it was
        print(error, file=sys.stderr)


def _report(rows: list[ContenderResult], options: StepOptions, console: Console) -> None:
    console.print(table(rows))
    if options.products == "torch":
        console.print("Torch's contenders multiply by the library that torch has by itself.")
    console.print(machine(), highlight=False)
    if options.out:
        write(rows, options.out)
