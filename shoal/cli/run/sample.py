"""`shoal sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

import shoal
from shoal.base.options import POSITIONAL
from shoal.base.section import Section


class SampleOptions(Section):
    run_folder: Annotated[Path, POSITIONAL]
    """A run folder that holds a checkpoint."""

    prompt: Annotated[str, POSITIONAL]
    """The text to go on from."""

    tokens: PositiveInt = 200
    """Tokens to write."""

    temperature: NonNegativeFloat = 0.8
    """Of the distribution that tokens are drawn from; 0 takes the likeliest."""

    seed: NonNegativeInt = 0
    """Of the draws."""


def run(options: SampleOptions) -> int:
    """Print the text."""
    print(shoal.sample(
        options.run_folder, options.prompt, tokens=options.tokens, temperature=options.temperature, seed=options.seed
    ))
    return 0
