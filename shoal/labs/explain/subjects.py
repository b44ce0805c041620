"""`explain` prints how a subject works and what it costs; `SUBJECTS` lists the subjects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_writable, write_atomically
from shoal.base.section import Section, validate
from shoal.labs.collectives.description import Collective
from shoal.labs.explain import (
    backprop,
    collective,
    compatibility,
    context,
    experts,
    optimizers,
    precision,
    scaling,
    sharding,
)
from shoal.labs.explain.device import accelerators, budget, roofline
from shoal.labs.explain.parallelism import buckets, memory, pipeline, tensor, zero
from shoal.labs.glossary.fields import find_fields
from shoal.labs.glossary.words import Word, find_word, nearest_words, page_file

Show = Callable[[Any, Console], Callable[[], str] | None]
"""Prints an explanation for some options; returns a function that draws it as SVG, if --out is an option."""

SUBJECTS: dict[str, tuple[type[Section], Show]] = {
    **{each.value: (collective.CollectiveOptions, partial(collective.explain, each)) for each in Collective},
    "accelerators": (accelerators.AcceleratorsOptions, accelerators.explain),
    "backprop": (backprop.BackpropOptions, backprop.explain),
    "budget": (budget.BudgetOptions, budget.explain),
    "buckets": (buckets.BucketsOptions, buckets.explain),
    "compatibility": (compatibility.CompatibilityOptions, compatibility.explain),
    "context": (context.ContextOptions, context.explain),
    "experts": (experts.PlacementOptions, experts.explain),
    "memory": (memory.MemoryOptions, memory.explain),
    "optimizers": (optimizers.OptimizersOptions, optimizers.explain),
    "pipeline": (pipeline.PipelineOptions, pipeline.explain),
    "precision": (precision.PrecisionOptions, precision.explain),
    "roofline": (roofline.RooflineOptions, roofline.explain),
    "scaling": (scaling.ScalingOptions, scaling.explain),
    "tensor": (tensor.TensorOptions, tensor.explain),
    "zero": (zero.ZeroOptions, zero.explain),
}
"""Options and function of each subject."""

PRODUCT = '"A[Ix, J] * B[J, Ky] -> C[Ix, Ky]"'
"""The other subject: any text with a bracket is an expression of sharded arrays."""


class WordOptions(Section):
    """Any word of the course (its meaning), or its options."""


def explain(subject: str, console: Console | None = None, **options: Any) -> None:
    """Print how one thing works and what it costs, computed from the description that also runs.

    Args:
        subject: a key of `SUBJECTS`, such as ``"all-reduce"``, an expression of sharded arrays, or a word of the
            glossary, such as ``"1f1b"``.
        console: where to print (default: the standard output).
        **options: fields of the subject's options class (`find_subject`).

    Raises:
        UsageError: unknown subject, invalid options, or an ``out`` that cannot be written.

    >>> import shoal
    >>> shoal.explain("precision", billions=[7])  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
    number formats
    ...
    as others count, with Adam
    ...
    >>> shoal.explain("A[Ix, J] * B[J, K] -> C[Ix, K]", mesh="x=4")  # doctest: +SKIP
    """
    kind, show = find_subject(subject)
    settings, console = validate(kind, options, source=f"explain {subject}"), console or Console()
    out: Path | None = getattr(settings, "out", None)
    check_writable(out, "--out", ".svg")
    draw = show(settings, console)
    if out and draw:
        write_atomically(out, draw())
        console.print(Text(f"drawn: {out}"), soft_wrap=True)


def find_subject(subject: str) -> tuple[type[Section], Show]:
    """Return the options and the function of a subject.

    Raises:
        UsageError: unknown subject.
    """
    if "[" in subject:
        return sharding.ShardingOptions, partial(sharding.explain, subject)
    if subject in SUBJECTS:
        return SUBJECTS[subject]
    if word := find_word(subject):
        return WordOptions, partial(_explain_word, word)
    if fields := find_fields(subject):
        return WordOptions, partial(_list_fields, fields)
    first = subject.partition(" ")[0]
    if first in SUBJECTS:
        raise UsageError(
            f"explain {subject}: '{first}' takes options alone, no '{subject[len(first) + 1 :]}'."
            f"\n  See shoal explain {first} --help. For the run of a file: shoal estimate RUN.toml."
        )
    near = " or ".join(f"'{name}'" for name in nearest_words(subject, (*SUBJECTS,)))
    allowed = f"allowed: {', '.join([*SUBJECTS, PRODUCT])}, or a word of the glossary or the config"
    remedy = f"did you mean {near}?" if near else allowed
    raise UsageError(f"explain: unknown subject '{subject}'; {remedy}")


def _explain_word(word: Word, options: WordOptions, console: Console) -> None:
    console.print(Text(word.name, style="bold"))
    console.print(Text(word.about))
    if word.also:
        console.print(Text(f"also: {', '.join(word.also)}"))
    console.print(Text(f"course: docs/course/{page_file(word.page)}\ntry:    {word.command}"))


def _list_fields(fields: dict[str, str], options: WordOptions, console: Console) -> None:
    console.print("options of shoal train, and fields of its config:")
    for option, about in fields.items():
        console.print(Text(option, style="bold"))
        console.print(Padding(Text(" ".join(about.split())), (0, 0, 0, 4), expand=False))
