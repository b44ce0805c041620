"""`shoal bench step`: which races are run, what is refused before one starts, and their table."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.engine.cpu_tuning import allocator_environment
from shoal.labs.bench.benchmark import Benchmark, Row, Say, all_met, choose_names, make_table, write_records
from shoal.labs.bench.contender import Failed
from shoal.labs.bench.race import Disagreement, Race, run
from shoal.labs.bench.step import shoal_engine
from shoal.labs.bench.step.comparisons import NAMES, races
from shoal.labs.bench.step.torch_pipelining import MICROBATCHES
from shoal.labs.bench.step.workload import Workload

SHARED = ("dp", "zero", "fsdp", "threads", "overlap-network", "compression-network", "pp")
"""Races whose ranks, or micro-batches, share the sequences of a step evenly."""


class StepBenchmark(Benchmark):
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

    def run(self, console: Console, say: Say) -> bool:
        """Run the races; whatever ends them, print the table of those that are done."""
        if self.quick:
            reject_unused(self, ("turns", "steps"), "--quick takes 2 turns of 1 step")
        check_writable(self.out, "bench step --out", ".csv", ".json", new=True)
        wanted = self.choose_races()
        turns, steps = (2, 1) if self.quick else (self.turns, self.steps)
        rows: list[Row] = []
        failed = False
        try:
            for race in wanted:
                try:
                    found = run(race, turns, steps, warmup=2, say=say)
                except (Failed, Disagreement) as error:
                    failed = True
                    _print_failure(race.name, error, console)
                    continue
                rows += found
                for row in found:
                    if row["target"] is not None:
                        console.print(Text("{race}: {contender} at {ratio:.2f} of {target:.2f}".format(**row)))
        finally:
            if rows:
                console.print(table(rows))
                if self.products == "torch":
                    console.print("Torch's contenders multiply by the library that torch has by itself.")
                if self.out:
                    write_records(rows, self.out)
        return not failed and (self.quick or all_met(rows))

    def choose_races(self) -> list[Race]:
        """The races that are asked for, ready to run.

        Raises:
            UsageError: there is no race of a name, the work cannot be shared out, or the environment sets the
                allocator.
        """
        every = races(Workload(sequences=self.sequences), self.ranks, products=self.products == "equal")
        names = choose_names(self.only, dict.fromkeys([*NAMES, *(race.name for race in every)]), "bench step --only")
        _check_allocator()
        if self.ranks < 2:
            raise UsageError(f"bench step --ranks {self.ranks}: parallelism needs 2 or more.")
        wanted = [race for race in every if race.name in names or race.name.split()[0] in names]
        for race in wanted:
            self.check_work(race)
        return wanted

    def check_work(self, race: Race) -> None:
        """Refuse sequences that the ranks of a race cannot share evenly, and layouts that the model does not allow."""
        parts = MICROBATCHES if race.name.startswith("pp ") else self.ranks
        if self.sequences % parts and race.name.split()[0] in SHARED:
            raise UsageError(
                f"bench step --sequences {self.sequences}: {race.name} needs a multiple of {parts}."
                f"\n  Give {-(-self.sequences // parts) * parts}, or choose other races with --only."
            )
        for contender in (*race.ours, *race.references, *race.also, *race.bounds):
            try:
                shoal_engine.check(contender)
            except UsageError as error:
                raise UsageError(f"bench step, {race.name}: {error}") from None


def _check_allocator() -> None:
    """The system's setting is one side of a comparison, so it must be the system's."""
    foreign = [name for name in (*allocator_environment(), "GLIBC_TUNABLES", "LD_PRELOAD") if os.environ.get(name)]
    if foreign:
        raise UsageError(f"the environment sets the allocator of every contender: unset {', '.join(foreign)}.")


def _print_failure(race: str, error: Failed | Disagreement, console: Console) -> None:
    reason = error.reason if isinstance(error, Failed) else str(error)
    console.print(Text(f"{race} failed: {reason}"))
    if str(error) != reason:  # with the traceback of the process in which it was
        print(error, file=sys.stderr)


def table(rows: Sequence[Row]) -> Table:
    """The results for people, at most 80 columns wide."""
    return make_table("one training step: shoal beside torch", [
        {
            "race": row["race"], "contender": row["contender"], "ms": f"{row['seconds'] * 1e3:.1f}",
            "CPU ms": f"{row['cpu_seconds'] * 1e3:.1f}", "tokens/s": round(row["tokens_per_second"]),
            "MB": round(row["memory"] / 1e6), "ratio": f"{row['ratio']:.2f}",
            "quartiles": f"{row['spread_low']:.2f}-{row['spread_high']:.2f}",
            "target": "" if row["target"] is None else f"{row['target']:.2f}", "met": row["met"],
        } for row in rows
    ], above="race")  # fmt: skip
