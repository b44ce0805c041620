"""`shoal sample` and `shoal chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import read_text
from shoal.base.options import POSITIONAL
from shoal.base.section import Section
from shoal.base.terminal import printable


class GenerateOptions(Section):
    folder: Annotated[Path, POSITIONAL]
    """A run, or a model in Hugging Face's format."""

    max_tokens: PositiveInt = 500
    """Most tokens to generate."""

    temperature: NonNegativeFloat = 0.8
    """0 takes the most likely token."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among tokens of this probability in all."""

    top_k: NonNegativeInt = 0
    """Draw among the k likeliest tokens."""

    stop: tuple[str, ...] = ()
    """Texts that end the generated text."""

    seed: NonNegativeInt = 0
    """Random seed; prompt i takes seed + i."""

    precision: Literal["fp32", "bf16-all", "fp64"] = "fp32"
    """Number format."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is CUDA if there is one."""


class SampleOptions(GenerateOptions):
    prompt: Annotated[tuple[str, ...], POSITIONAL] = ()
    """Texts to continue, together."""

    prompts: Path | None = None
    """File with a text to continue on each line."""

    max_tokens: PositiveInt = 200
    """Most tokens to generate."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""

    pp: PositiveInt = 1
    """Pipeline ranks."""


class ChatOptions(GenerateOptions):
    system: str = ""
    """Message before all others."""


def sample(options: SampleOptions) -> int:
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


def chat(options: ChatOptions) -> int:
    """Read messages from stdin, and print the reply to each while it is generated."""
    chat = shoal.open_chat(options.folder, **options.model_dump(exclude={"folder"}))
    for message in _messages():
        chat.reply(message, _print)
        print()
    return 0


def _messages() -> Iterator[str]:
    """Yield the lines of stdin, typed after a prompt on a terminal."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then edits and remembers lines
        print("Ctrl-C ends a reply, Ctrl-D the conversation.")
    while True:
        try:
            line = input("> " if typed else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _print(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()
