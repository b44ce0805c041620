"""`shoal sample`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import read_text
from shoal.base.options import POSITIONAL
from shoal.base.section import Section
from shoal.base.terminal import printable


class SampleOptions(Section):
    folder: Annotated[Path, POSITIONAL]
    """A run, or a model in Hugging Face's format."""

    prompt: Annotated[tuple[str, ...], POSITIONAL] = ()
    """Texts to continue, together."""

    prompts: Path | None = None
    """File with a text to continue on each line."""

    max_tokens: PositiveInt = 200
    """Most tokens to generate."""

    temperature: NonNegativeFloat = 0.8
    """0 takes the most likely token."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among tokens of this probability in all."""

    top_k: NonNegativeInt = 0
    """Draw among the k likeliest tokens."""

    stop: tuple[str, ...] = ()
    """Texts that end a continuation."""

    seed: NonNegativeInt = 0
    """Random seed; prompt i takes seed + i."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""

    pp: PositiveInt = 1
    """Pipeline ranks."""

    precision: Literal["fp32", "bf16-all", "fp64"] = "fp32"
    """Number format."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is CUDA if there is one."""


def run(options: SampleOptions) -> int:
    """Generate text and print it, one prompt's while it is generated."""
    prompts = list(options.prompt)
    if options.prompts:
        prompts += [line for line in read_text(options.prompts).splitlines() if line.strip()]
    if not prompts:
        raise UsageError('there is no prompt.\n  Give a text, as in: shoal sample RUN "def main(", or --prompts FILE.')
    given = options.model_dump(exclude={"folder", "prompt", "prompts"})
    shoal.sample(options.folder, prompts, **given, show=_print)
    print()
    return 0


def _print(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()
