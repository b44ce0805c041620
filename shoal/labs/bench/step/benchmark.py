"""`shoal bench step`: choose the races, check them before one starts, and print their table."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt
from rich.console import Console
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.engine.cpu_tuning import allocator_environment
from shoal.labs.bench.benchmark import Benchmark, Notify, Row, all_met, choose_names, make_table, write_records
from shoal.labs.bench.race import Race, RaceError, run_race
from shoal.labs.bench.step.comparisons import build_races
from shoal.labs.bench.step.torch_baselines import MICROBATCHES
from shoal.labs.bench.step.workload import Workload, make_layout, shoal_step
from shoal.spec.layout import Layout

SHARED = ("dp", "zero", "fsdp", "threads", "overlap-network", "compression-network", "pp")
"""Races whose ranks or micro-batches share the sequences of a step evenly."""


class StepBenchmark(Benchmark):
    """Training steps of shoal and of torch's own implementations, in turn; exit code 1 if a target is missed or a race
    fails."""

    only: str = ""
    """Comma-separated list of races: dp, zero, fsdp, threads, overlap, overlap-device, overlap-network,
    compression-network, tp, tp-overlap, tp-overlap-network, pp, single, compile; or one race of a kind, such as
    "pp zb-v" or "tp-overlap ring"."""

    turns: PositiveInt = 10
    """Turns of each variant; medians over all turns are compared."""

    steps: PositiveInt = 3
    """Steps in a turn."""

    sequences: PositiveInt = 8
    """Sequences of 256 tokens in a step, over all ranks: a multiple of the ranks, and of 8 for pp."""

    ranks: PositiveInt = 2
    """Ranks of one thread (in single and compile: threads)."""

    products: Literal["equal", "torch"] = "equal"
    """Library of matrix products of torch's variants: shoal's choice, so that only the parallelism differs; or torch's
    default."""

    quick: bool = False
    """2 turns of 1 step: checks that everything runs and computes the same losses; proves nothing about speed."""

    out: Path | None = None
    """Also write the table to this file, .csv or .json."""

    def run(self, console: Console, notify: Notify) -> bool:
        """Run the races; print the table of the finished ones also after an error or Ctrl-C."""
        if self.quick:
            reject_unused(self, ("turns", "steps"), "--quick takes 2 turns of 1 step")
        check_writable(self.out, "bench step --out", ".csv", ".json", new=True)
        races = self.choose_races()
        turns, steps = (2, 1) if self.quick else (self.turns, self.steps)
        rows: list[Row] = []
        failed = False
        try:
            for race in races:
                try:
                    found = run_race(race, turns, steps, warmup=2, notify=notify)
                except RaceError as error:
                    failed = True
                    console.print(Text(f"{race.name} failed: {error}"))
                    print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
                    continue
                rows += found
                for row in found:
                    if row["target"] is not None:
                        console.print(Text("{race}: {variant} at {ratio:.2f} of {target:.2f}".format(**row)))
        finally:
            if rows:
                _print_table(rows, console)
                if self.products == "torch":
                    console.print("Torch's variants use torch's default library of matrix products.")
                if self.out:
                    write_records(rows, self.out)
        return not failed and (self.quick or all_met(rows))

    def choose_races(self) -> list[Race]:
        """Return the requested races.

        Raises:
            UsageError: a race is unknown, the ranks cannot share the work, or the environment configures the allocator.
        """
        every = {race.name: race for race in build_races(
            Workload(sequences=self.sequences), self.ranks, products=self.products == "equal"
        )}  # fmt: skip
        kinds = dict.fromkeys(name.split()[0] for name in every)
        names = choose_names(self.only, [*kinds, *every], "bench step --only")
        _check_allocator()
        if self.ranks < 2:
            raise UsageError(f"bench step --ranks {self.ranks}: parallelism needs 2 or more.")
        races = [race for name, race in every.items() if name in names or name.split()[0] in names]
        for race in races:
            self.check_work(race)
        return races

    def check_work(self, race: Race) -> None:
        """Reject sequences that the ranks of a race cannot share evenly, and layouts that the model does not allow."""
        parts = MICROBATCHES if race.name.startswith("pp ") else self.ranks
        if self.sequences % parts and race.name.split()[0] in SHARED:
            raise UsageError(
                f"bench step --sequences {self.sequences}: {race.name} needs a multiple of {parts}."
                f"\n  Use {-(-self.sequences // parts) * parts}, or choose other races with --only."
            )
        for variant in race.variants:
            build, work = variant.build, variant.workload
            if isinstance(build, partial) and build.func is shoal_step and isinstance(work, Workload):
                fields = build.keywords.keys() & Layout.model_fields
                try:
                    make_layout(work, variant.ranks, **{field: build.keywords[field] for field in fields})
                except UsageError as error:
                    raise UsageError(f"bench step, {race.name}: {error}") from None


def _check_allocator() -> None:
    """Reject allocator settings in the environment, since one side of a comparison uses the system's defaults."""
    present = [name for name in (*allocator_environment(), "GLIBC_TUNABLES", "LD_PRELOAD") if os.environ.get(name)]
    if present:
        raise UsageError(f"the environment configures the allocator of every variant: unset {', '.join(present)}.")


def _print_table(rows: Sequence[Row], console: Console) -> None:
    console.print(make_table("one training step: shoal beside torch", [
        {
            "race": row["race"], "variant": row["variant"], "ms": f"{row['seconds'] * 1e3:.1f}",
            "CPU ms": f"{row['cpu_seconds'] * 1e3:.1f}", "tokens/s": round(row["tokens_per_second"]),
            "MB": round(row["memory"] / 1e6), "ratio": f"{row['ratio']:.2f}",
            "quartiles": f"{row['spread_low']:.2f}-{row['spread_high']:.2f}",
            "target": "" if row["target"] is None else f"{row['target']:.2f}", "met": row["met"],
        } for row in rows
    ], above="race"))  # fmt: skip
