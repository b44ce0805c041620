"""`shoal bench experts`: grouped experts against a loop over them; with --learning, Switch against dense."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.options import reject_unused
from shoal.base.section import NonEmpty, Section
from shoal.labs.bench.experts import measure_counts, table
from shoal.labs.bench.learning import switch
from shoal.labs.bench.progress import telling


class ExpertsOptions(Section):
    """Experts as one grouped computation against a loop; --learning: Switch against dense, loss against steps."""

    experts: NonEmpty[PositiveInt] = (8, 64)
    """Experts of the layer (with --learning the first counts)."""

    per_token: PositiveInt = 2
    """Experts of a token."""

    tokens: PositiveInt = 1024
    """Tokens."""

    hidden: PositiveInt = 256
    """Width of the residual stream."""

    width: PositiveInt = 4096
    """Of all experts of a layer together: more of them are finer ones (Dai et al. 2024, "DeepSeekMoE")."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32 or bf16."""

    repeats: PositiveInt = 15
    """Measurements of each, in turn; medians count."""

    device: str = "auto"
    """auto, cpu or cuda."""

    learning: bool = False
    """Train a dense model and a Switch model with the same FLOPs per token instead; exit code 1 if Switch does not
    reach the dense model's loss in fewer steps."""

    seeds: PositiveInt = 3
    """learning: runs of each, with seeds from 0."""

    steps: PositiveInt = 1200
    """learning: steps of each run."""

    shape: tuple[PositiveInt, PositiveInt, PositiveInt] = switch.SHAPE
    """learning: layers, width, and width of the dense block and of an expert."""

    out: Path | None = None
    """learning: a folder for switch.csv and switch.svg."""


def run(options: ExpertsOptions, console: Console) -> int:
    """Run the measurement or the experiment; returns the exit code.

    Raises:
        UsageError: options of the other, or that do not go together.
    """
    for unread, names, why in (
        (not options.learning, ("seeds", "steps", "shape", "out"), "of --learning, which is not given"),
        (options.learning, ("per_token", "tokens", "hidden", "width", "precision", "repeats", "device"),
         "of the measurement, in whose place --learning trains"),
    ):  # fmt: skip
        if unread:
            reject_unused(options, names, why)
    if options.learning:
        return _learning(options, console)
    timings = measure_counts(
        options.experts, options.precision, options.device, per_token=options.per_token, tokens=options.tokens,
        hidden=options.hidden, width=options.width, repeats=options.repeats,
    )
    console.print(table(timings, options.tokens, options.hidden, options.precision))
    return 1 if any(timing.missed for timing in timings) else 0


def _learning(options: ExpertsOptions, console: Console) -> int:
    if options.out is not None and not options.out.is_dir():
        raise UsageError(f"bench experts --out {options.out}: there is no such folder.")
    layers, hidden, _ = options.shape
    if layers < 2 or hidden % 8:
        raise UsageError(f"bench experts --shape {layers} {hidden} ..: every other layer has experts, and there are 4 "
                         "heads of an even width.\n  Use 2 layers or more, and a width that is a multiple of 8.")
    every = max(1, options.steps // 20)
    with telling(console) as tell:
        runs = switch.measure(
            options.seeds, steps=options.steps, every=every, experts=options.experts[0], shape=options.shape,
            say=tell,
        )
    for line in switch.describe(runs, options.steps):
        console.print(line)
    rows = switch.steps_to_dense(runs)
    console.print(switch.table(rows, options.steps))
    if options.out:
        switch.write_csv(runs, options.out / "switch.csv")
        title = f"Switch ({options.experts[0]} experts) against dense, {options.seeds} seeds"
        (options.out / "switch.svg").write_text(switch.draw(runs, title))
    return 0 if all(steps < options.steps for _, _, steps in rows) else 1
