"""`shoal report` and `shoal sample`: what a run has come to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from rich.console import Console

import shoal
from shoal.base.options import POSITIONAL
from shoal.base.section import Section


class ReportOptions(Section):
    run_folder: Annotated[Path, POSITIONAL]
    """A run folder."""

    out: Path | None = None
    """File to write: a page (.html), a figure (.svg, .png) or a trace (.json, .json.gz). Default: report.html in the
    run folder."""


def report(options: ReportOptions) -> int:
    """Write the report, and print a summary."""
    written = shoal.write_report(options.run_folder, options.out)
    from shoal.report.run import print_report

    print_report(Console(highlight=False), written)
    return 0


class SampleOptions(Section):
    run_folder: Annotated[Path, POSITIONAL]
    """A run folder that holds a checkpoint."""

    prompt: Annotated[str, POSITIONAL]
    """Text to continue."""

    tokens: PositiveInt = 200
    """Number of tokens to generate."""

    temperature: NonNegativeFloat = 0.8
    """Sampling temperature; 0 takes the most likely token."""

    seed: NonNegativeInt = 0
    """Random seed of the sampling."""


def sample(options: SampleOptions) -> int:
    """Generate text and print it."""
    print(shoal.sample(
        options.run_folder, options.prompt, tokens=options.tokens, temperature=options.temperature, seed=options.seed
    ))
    return 0
