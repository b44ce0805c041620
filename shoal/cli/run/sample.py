"""`shoal sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

import shoal
from shoal.base.options import POSITIONAL
from shoal.base.section import Section
from shoal.base.terminal import printable


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


def run(options: SampleOptions) -> int:
    """Generate text and print it."""
    text = shoal.sample(
        options.run_folder, options.prompt, tokens=options.tokens, temperature=options.temperature, seed=options.seed
    )
    print(printable(text))
    return 0
