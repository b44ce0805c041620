"""`shoal verify` and `shoal chaos`."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

import shoal
from shoal.base.files import check_writable
from shoal.base.section import Section
from shoal.spec.config import RunConfig


class VerifyOptions(Section):
    random: PositiveInt | None = None
    """Verify this many randomly drawn layouts instead of the given one."""

    rule: str | None = None
    """With --random: an update rule (or a comma-separated list, or all), each on this many layouts drawn for it."""

    steps: PositiveInt = 3
    """Training steps to compare."""

    precision: Literal["fp64", "own"] = "fp64"
    """fp64 compares to 1e-9; own uses the run's precision and compares to its rounding."""

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where the ranks compute (auto: CUDA if available); more ranks than CUDA devices share them, for checking only."""

    json_: bool = False
    """Print one JSON object instead."""

    inject: str | None = None
    """Inject this fault, to check that it is found; an unknown name lists them."""


def verify(options: VerifyOptions, config: RunConfig) -> int:
    """Compare and print; return 0 if everything agrees, 1 if something differs."""
    found = shoal.verify(
        config, random=options.random, rule=options.rule, steps=options.steps,
        own_precision=options.precision == "own", inject=options.inject,
        device=options.device, show=not options.json_,
    )
    if options.json_:
        print(dumps({"same": found.same, **asdict(found)}))
    return 0 if found.same else 1


class ChaosOptions(Section):
    trials: PositiveInt = 50
    """Number of trials; they cycle through the faults."""

    faults: str = "all"
    """Comma-separated faults; an unknown name lists them."""

    seed: NonNegativeInt = 0
    """Random seed of the times of the faults."""

    folder: Path | None = None
    """Folder of the trials, in which failed ones are kept (default: a new folder under /tmp)."""

    minutes: PositiveFloat | None = None
    """Run for this many minutes instead of trials, and kill a rank every --every seconds."""

    every: PositiveFloat = 60.0
    """With --minutes: seconds between failures."""

    out: Path | None = None
    """Write a page (.html)."""


def chaos(options: ChaosOptions, config: RunConfig) -> int:
    """Run the trials and show the results; return 0 if all passed, else 1."""
    check_writable(options.out, "--out", ".html")
    result = shoal.chaos(
        config, trials=options.trials, faults=options.faults, seed=options.seed, folder=options.folder,
        minutes=options.minutes, every=options.every, show=True,
    )
    if options.out and result.trials:
        from shoal.testing.chaos.run import write_page

        write_page(options.out, config, result.trials)
        print(f"written: {options.out}")
    if result.failed:
        print(f"{result.failed} of {len(result.trials)} trials failed; their files are in {result.folder}")
    return 0 if result.passed else 1
