"""Terminal output of a run: a banner with the grid of ranks, a line per logged step, and a summary at the end.

A terminal shows a progress bar below the lines. Other outputs (file, pipe, job log) get plain lines.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from shoal.base.files import expanded
from shoal.base.terminal import printable
from shoal.engine.data.tokenizer import BytesTokenizer, has_other_tokenizer
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.training.records.metrics import StepMetrics

HEADER_EVERY = 20  # lines between repeated headers
REFRESH_SECONDS = 0.1
WIDE = 100  # terminal width from which a step's line has all columns
LEFT_OUT = ("per rank", "memory", "MFU", "lr", "grad norm")  # columns without space on a narrow screen, in this order
PREFIXES = ("", "k", "M", "G", "T", "P")
LABEL = 8  # width of the banner's labels


class Display:
    """Terminal output of one run, on rank 0. As a context manager, it removes the progress bar on exit."""

    def __init__(self, console: Console | None = None, counted: Literal["token", "sample"] = "token"):
        self.console, self.counted = console or Console(highlight=False), counted
        # FORCE_COLOR lets pipes and notebooks count as terminals, but they cannot rewrite a line.
        self._has_bar = self.console.is_terminal and (console is not None or sys.stdout.isatty())
        self._unit = " nats per token" if counted == "token" else ""
        self._lines = 0
        self._last: StepMetrics | None = None
        self._bar: Progress | None = None
        self._refreshed = 0.0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def banner(self, config: RunConfig, *, parameters: int, device: str, threads: int, folder: Path) -> None:
        """Print a description of the run, with its trainable parameters (a tied head counts once)."""
        unicode, layout = self.console.encoding.startswith("utf"), config.parallel
        tokens = config.train.global_batch * config.counted_per_sample
        ranks = f" = {layout.world_size} ranks" if layout.world_size > 1 else ", 1 rank"
        facts = [
            ("model", f"{config.model.title}, {short(parameters)} parameters, {tokens:,} {self.counted}s per step"),
            ("layout", f"{layout.describe()}{ranks}"),
            ("", "\n".join(grid_of_ranks(layout, self.console.width - LABEL - 6, unicode=unicode))),
            ("device", f"{device}, {config.train.precision}, {threads} thread{'s' if threads > 1 else ''} per rank"),
            ("run", str(folder)),
        ]
        if config.data.source == "auto" and config.data.reads == "stdlib" and not config.model.module:
            facts.append(("note", "no text in [data]: Python's standard library is the text"))
        vocab = config.model.vocab or 0 if config.model.weights else 0
        if config.data.tokenizer == "bytes" and vocab > BytesTokenizer.vocab_size and config.data.reads != "synthetic":
            used = f"{BytesTokenizer.vocab_size} of the {vocab:,} ids of model.weights"
            facts.append(("note", f"text is read as bytes, {used}: set data.tokenizer to the model's tokenizer.json"))
        elif (weights := config.model.weights) and has_other_tokenizer(
            expanded(weights, "model.weights"), config.data.tokenizer
        ):
            facts.append(("note", "data.tokenizer is not that of model.weights: its ids may stand for other text"))
        trained, length = getattr(config.model, "max_sequence", None), config.data.sequence_length
        if config.model.weights and trained and length > trained:
            facts.append(("note", f"sequences of {length:,} tokens: model.weights had {trained:,} in training"))
        if (warmup := config.optimizer.warmup_steps) > config.train.steps:
            facts.append(("note", f"a warm-up of {warmup} steps is longer than the run: no step has the peak rate"))
        facts = [(name, printable(text)) for name, text in facts]
        if not self.console.is_terminal:
            for name, text in [("shoal", "training"), *facts]:
                for i, line in enumerate(text.splitlines()):
                    self.console.print(Text(f"{name if i == 0 else '':<{LABEL}}{line}"), soft_wrap=True)
            return
        table = Table.grid(padding=(0, 1))
        table.add_column(style="bold cyan", min_width=LABEL - 1)
        table.add_column(overflow="fold")
        for name, text in facts:
            table.add_row(name, Text(text))
        self.console.print(Panel(table, title="[bold]shoal[/bold]", title_align="left", border_style="cyan"))

    def step(self, metrics: StepMetrics) -> None:
        """Print the line of a logged step and advance the progress bar."""
        columns = _columns(self.console.width, metrics.steps, experts=metrics.dropped is not None, counted=self.counted)
        if self._lines % HEADER_EVERY == 0:
            self.note("  ".join(f"{title:>{width}}" for title, width, _ in columns), style="bold")
        self._lines += 1
        self.note("  ".join(f"{text(metrics):>{width}}" for _, width, text in columns), style="")
        self._last = metrics
        self.progress(metrics.step, metrics.steps, now=True)

    def progress(self, step: int, steps: int, *, now: bool = False) -> None:
        """Advance the progress bar of a terminal; cheap enough for every step."""
        if not self._has_bar or self.console.quiet:
            return
        if not now and time.monotonic() - self._refreshed < REFRESH_SECONDS:
            return
        self._refreshed = time.monotonic()
        if self._bar is None:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"), BarColumn(None), TextColumn("{task.description}"),
                console=self.console, transient=True, expand=True,
                auto_refresh=False,  # a refresh thread would take time from the training
            )
            self._bar.start()
            self._bar.add_task("", total=steps)
        known = ""
        if (last := self._last) is not None:
            speed, left = short(last.tokens_per_second), duration(last.seconds_left)
            loss = "-" if last.loss is None else f"{last.loss:.4f}"
            known = f"loss {loss}  {speed} {self.counted}s/s  {left} left"
        self._bar.update(self._bar.task_ids[0], completed=step, description=known, refresh=True)

    def validation(self, loss: float, step: int, dropped: float | None = None, *, name: str = "") -> None:
        """Print one validation: loss [nats per token], the fraction of expert choices dropped, and the data's name."""
        without = f", experts dropped {dropped:.1%}" if dropped else ""
        of = f" of {name}" if name else ""
        self.note(f"step {step}: validation loss{of} {loss:.4f}{self._unit}{without}", style="green")

    def note(self, text: str, style: str = "dim") -> None:
        """Print a note on a separate line."""
        self.console.print(Text(printable(text), style=style), soft_wrap=True)

    def finish(
        self, *, folder: Path, seconds: float, validation_loss: float | None = None, prompt: str = "", sample: str = ""
    ) -> None:
        """Print the summary of a run: final validation loss [nats per token], and generated text after its prompt."""
        if sample:
            text = Text.assemble((printable(prompt), "bold"), printable(sample.rstrip()))
            if self.console.is_terminal:
                self.console.print(Panel(text, title="sample of generated text", title_align="left"))
            else:
                self.note("\n  ".join(["sample of generated text:", *text.plain.splitlines()]), style="")
        known = f": validation loss {validation_loss:.4f}{self._unit}" if validation_loss is not None else ""
        self.note(f"finished in {duration(seconds)}{known}", style="bold green")
        self.note(f"run folder: {folder}", style="")


# ---- the grid of ranks -----------------------------------------------------------------------------------------


def grid_of_ranks(layout: Layout, width: int, *, unicode: bool = True) -> list[str]:
    """Draw the layout as a grid of ranks.

    A row per (pipeline stage, replica, context-parallel rank), a column per tensor-parallel rank. Long axes are
    shortened in the middle, to ``width`` columns and 25 lines.

    >>> print("\\n".join(["dp 2, tp 2", *grid_of_ranks(Layout(dp=2, tp=2), 60)]))
    dp 2, tp 2
          tp 0     1
         ┌─────┬─────┐
    dp 0 │   0 │   1 │
    dp 1 │   2 │   3 │
         └─────┴─────┘
    """
    rows = layout.dp * layout.cp
    row_axes = [(name, size) for name, size in (("dp", layout.dp), ("cp", layout.cp)) if size > 1]
    ranks = np.arange(layout.world_size).reshape(layout.pp, rows, layout.tp)
    cell = max(len(str(layout.world_size - 1)), len(str(layout.tp - 1)), 3)
    labels = [f"pp {'':<{len(str(layout.pp - 1))}} " if layout.pp > 1 else "",
              "".join(f"{name} {'':<{len(str(size - 1))}} " for name, size in row_axes)]
    margin = sum(map(len, labels))
    stages = _shorten(layout.pp, 4 if rows > 1 else 8)
    replicas = _shorten(rows, 4 if layout.pp > 1 else 8)
    columns = _shorten(layout.tp, max(3, (width - margin - 1) // (cell + 3)))
    dots = "…" if unicode else ".."
    corners = ("┌┬┐", "├┼┤", "└┴┘") if unicode else ("+++",) * 3
    across, down = ("─", "│") if unicode else ("-", "|")

    def rule(left: str, middle: str, right: str) -> str:
        return " " * margin + left + middle.join([across * (cell + 2)] * len(columns)) + right

    def label(replica: int | None) -> str:
        inside = {"dp": layout.cp, "cp": 1}
        return " ".join(
            f"{name} {dots if replica is None else replica // inside[name] % size:<{len(str(size - 1))}}"
            for name, size in row_axes
        )

    def row(stage: int | None, replica: int | None, *, first: bool) -> str:
        pp = f"pp {dots if stage is None else stage}" if layout.pp > 1 and first else ""
        dp = label(replica) if stage is not None else ""
        cells = [dots if None in (stage, replica, column) else str(ranks[stage, replica, column]) for column in columns]
        return (f"{pp:<{len(labels[0])}}{dp:<{len(labels[1])}}{down} "
                + f" {down} ".join(f"{text:>{cell}}" for text in cells) + f" {down}")

    lines = []
    if layout.tp > 1:
        heads = [dots if column is None else str(column) for column in columns]
        first, *others = heads
        lines.append(" " * margin + f"{f'tp {first}':>{cell + 2}}" + "".join(f"   {head:>{cell}}" for head in others))
    lines.append(rule(*corners[0]))
    for i, stage in enumerate(stages):
        if i and rows > 1:
            lines.append(rule(*corners[1]))
        shown = replicas if stage is not None else [None]
        lines += [row(stage, replica, first=replica == shown[0]) for replica in shown]
    return [*lines, rule(*corners[2])]


def _shorten(size: int, most: int) -> list[int | None]:
    """Return the indices of an axis, with None for omitted ones: ``_shorten(9, 4)`` gives ``[0, 1, None, 8]``."""
    return list(range(size)) if size <= most else [*range(most - 2), None, size - 1]


# ---- numbers as text -------------------------------------------------------------------------------------------


def _columns(
    width: int, steps: int, *, experts: bool, counted: str
) -> list[tuple[str, int, Callable[[StepMetrics], str]]]:
    """Return title, width and text of the columns of a step's line: 80 characters in all, below a million steps, or
    fewer columns on a narrower screen."""
    columns: list[tuple[str, int, Callable[[StepMetrics], str]]] = [
        ("step", max(4, len(str(steps))), lambda m: str(m.step)),
        ("loss", 6, lambda m: "-" if m.loss is None else f"{m.loss:.4f}"[:6]),
        (f"{counted}s/s", 8 if counted == "token" else 9, lambda m: short(m.tokens_per_second)),
        ("per rank", 8, lambda m: short(m.tokens_per_second_per_rank)),
        ("MFU", 5, lambda m: "-" if m.mfu is None else f"{100 * m.mfu:.1f}%"),
        ("grad norm", 9, lambda m: "skipped" if m.gradient_norm is None else f"{m.gradient_norm:.3g}"),
        ("lr", 7, lambda m: f"{m.learning_rate:.1e}"),
        ("memory", 6, lambda m: f"{short(m.memory_bytes)}B"),
        ("time left", 9, lambda m: duration(m.seconds_left)),
    ]
    if counted == "sample":  # of unknown FLOPs
        columns = [column for column in columns if column[0] != "MFU"]
    if experts:
        columns[3] = ("dropped", 7, lambda m: f"{100 * (m.dropped or 0.0):.1f}%")
    if width >= WIDE:
        columns.insert(2, ("validation", 10, lambda m: "" if m.validation_loss is None else f"{m.validation_loss:.4f}"))
    for left_out in LEFT_OUT:
        if sum(column[1] + 2 for column in columns) - 2 > width:
            columns = [column for column in columns if column[0] != left_out]
    return columns


def short(count: float) -> str:
    """Format a count with three digits and a decimal prefix.

    >>> short(20480), short(124_439_808), short(7)
    ('20.5k', '124M', '7')
    """
    if not math.isfinite(count):
        return str(count)
    power = 0
    while abs(count) >= 999.5 and power < len(PREFIXES) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if abs(count) >= 99.95 else 1 if abs(count) >= 9.995 else 2
    text = f"{count:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + PREFIXES[power]


def duration(seconds: float) -> str:
    """Format seconds with at most two units.

    >>> duration(45), duration(185), duration(3720), duration(273600)
    ('45s', '3m05s', '1h02m', '3d04h')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}m"
    return f"{m}m{s:02}s" if m else f"{s}s"
