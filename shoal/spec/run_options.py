"""Options that `shoal estimate` and `shoal plan` share."""

from __future__ import annotations

from itertools import islice

from pydantic import PositiveFloat, PositiveInt

from shoal.base.errors import UsageError
from shoal.base.section import Section


class RunOptions(Section):
    """A run by names: its model, cluster, batch, formats and software, and the length and price of its training."""

    model: str | None = None
    """A model in the catalog (default: the TOML file's, else llama-3-8b)."""

    cluster: str = "8xH100"
    """8xH100, 64x8xH100-IB400, 8xGB200-NVL72, v5p-4096 (a slice, as its manufacturer names it), or an accelerator."""

    sequence_length: PositiveInt | None = None
    """Tokens per sequence (default: the file's, else the longest that the model was trained for)."""

    global_batch: str | None = None
    """Sequences per step (1024), or tokens with K or M (4M is 4 x 1024 x 1024; default: the file's, else about 4M)."""

    precision: str | None = None
    """Number formats, with the names of `shoal train`: bf16, fp16, fp8, fp32, ... (default: the file's, else bf16)."""

    optimizer: str | None = None
    """The update rule (default: the file's, else adamw)."""

    software: str = "shoal"
    """The software that trains: shoal, megatron-core, torchtitan, nanotron, ... (shoal/spec/catalog/software.toml). The
    layout is printed as its own config where known."""

    tokens: PositiveFloat | None = None
    """Tokens of the complete training, such as 15e12 (default: of the file's train.steps, else 20 per parameter)."""

    price: PositiveFloat | None = None
    """Price in dollars per accelerator and hour (default: the catalog's list price)."""


def join_fixed(args: list[str]) -> list[str]:
    """Join the values of several options ``--fix`` into one.

    Raises:
        UsageError: a field of the layout is an option, as in other commands.

    >>> join_fixed(["--fix", "tp=8", "--toml", "run.toml", "--fix=pp=2"])
    ['--toml', 'run.toml', '--fix=tp=8,pp=2']
    """
    others, fixed, words = list[str](), list[str](), iter(args)
    for word in words:
        option, equals, value = word.partition("=")
        if option.startswith("--parallel."):
            field = (name := option.removeprefix("--parallel.").replace("-", "_")).removeprefix("no_")
            found = "false" if name != field else value if equals else next(words, "--")
            raise UsageError(f"{option}: shoal plan searches for the layout.\n  Fix a field of it with --fix "
                             f"{field}={'true' if found.startswith('--') else found}.")
        if option == "--fix" and (given := [value] if equals else list(islice(words, 1))):
            fixed += given
        else:
            others.append(word)
    return [*others, f"--fix={','.join(fixed)}"] if fixed else others
