"""`shoal eval`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt

import shoal
from shoal.base.options import POSITIONAL, reject_unused
from shoal.base.section import Section
from shoal.spec.layout import Degree, ZeroStage


class EvalOptions(Section):
    folder: Annotated[Path, POSITIONAL]
    """A run, or a model in Hugging Face's format."""

    data: tuple[str, ...] = ()
    """Text (default: what the run held out)."""

    field: str | None = None
    """Field of .jsonl and .parquet (default: the run's)."""

    chat: bool | None = None
    """Text is conversations (default: as the run's)."""

    tasks: str = ""
    """Tasks or .yaml files of lm-evaluation-harness (comma)."""

    limit: PositiveInt | None = None
    """Only this many sequences (of each source), or questions."""

    shots: NonNegativeInt | None = None
    """Examples before a question."""

    sequence_length: PositiveInt | None = None
    """Tokens of each (default: the run's)."""

    dp: Degree = 1
    """Replicas."""

    zero: ZeroStage = 0
    """3 also shards weights over them."""

    tp: Degree = 1
    """Tensor-parallel ranks."""

    pp: Degree = 1
    """Pipeline ranks."""

    cp: Degree = 1
    """Context-parallel ranks."""

    ep: Degree = 1
    """Expert-parallel ranks."""

    micro_batch: PositiveInt = 8
    """Sequences of a pass."""

    precision: Literal["fp32", "bf16-all", "fp64"] | None = None
    """Number formats (default: the run's)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is CUDA if there is one."""

    json_: bool = False
    """Print JSON."""


LAYOUT = ("dp", "zero", "tp", "pp", "cp", "ep", "micro_batch")


def run(options: EvalOptions) -> int:
    """Evaluate and print the result."""
    if options.tasks:
        return _run_tasks(options)
    reject_unused(options, ["shots"], "without --tasks there are no questions")
    layout = shoal.Layout(**options.model_dump(include=set(LAYOUT)))
    found = shoal.evaluate(
        options.folder, options.data, field=options.field, chat=options.chat, layout=layout, sequences=options.limit,
        sequence_length=options.sequence_length, precision=options.precision, device=options.device,
    )
    if options.json_:
        print(json.dumps(asdict(found)))
        return 0
    print(f"loss           {found.loss:.6f} nats per token\nperplexity     {found.perplexity:.4f}")
    if found.bytes and found.bits_per_byte is not None:
        print(f"bits per byte  {found.bits_per_byte:.6f}")
    size = f", {found.bytes:,} bytes" if found.bytes else ""
    documents = f"{found.documents:,} document{'s' * (found.documents != 1)}"
    print(f"predicted      {found.tokens:,} tokens of a text of {documents}{size}")
    for name, source in found.sources.items():
        print(f"{name:<14} {source.loss:.6f} nats per token, {source.tokens:,} tokens")
    return 0


def _run_tasks(options: EvalOptions) -> int:
    unused = ["data", "field", "chat", "sequence_length", *(name for name in LAYOUT if name not in ("tp", "pp"))]
    reject_unused(options, unused, "--tasks has texts of its own, and computes each question on --tp and --pp ranks")
    found = shoal.evaluate_tasks(
        options.folder, options.tasks.split(","), tp=options.tp, pp=options.pp, limit=options.limit,
        shots=options.shots, precision=options.precision, device=options.device,
    )
    if options.json_:
        print(json.dumps(found, default=str))
        return 0
    for task, metrics in found.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                print(f"{task:<24}{name.removesuffix(',none'):<24}{value:.4f}")
    return 0
