"""Switch against dense at equal FLOPs per token on the default corpus: loss against steps, over several seeds."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from shoal.labs.bench.learning.small import engine_and_validation, trained
from shoal.report.panels import Panel, panels, with_mean
from shoal.spec.config import RunConfig, build_config

KINDS = ("dense", "switch")


@dataclass(frozen=True)
class SwitchRun:
    """One training.

    Attributes:
        steps, losses: those at which it was validated, and the loss [nats per token].
        dropped: mean part of the tokens that found no room, over the last steps.
        parameters, flops: of the model, and per token.
    """

    kind: str
    seed: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    dropped: float
    parameters: int
    flops: int

    def reached(self, loss: float) -> float:
        """Steps until the loss is first as low, between two validations by a straight line; infinite if never."""
        points = list(zip(self.steps, self.losses, strict=True))
        for (before, high), (after, low) in pairwise(points):
            if low <= loss:
                return before + (after - before) * max(0.0, (high - loss) / (high - low))
        return float("inf")


SHAPE = (2, 32, 32)
"""Layers, width, and width of the dense block: a model small for its steps, since experts pay where a dense model lacks
weights, and after each has seen enough of the tokens."""


def config_of(
    kind: str, seed: int, *, steps: int, experts: int, shape: tuple[int, int, int] = SHAPE
) -> RunConfig:
    """A run of the experiment. An expert is as wide as the dense block, so that a token meets as many weights."""
    layers, hidden, ffn = shape
    model: dict[str, Any] = {"name": "tiny", "layers": layers, "hidden": hidden, "heads": 4, "ffn": ffn}
    if kind == "switch":
        model["experts"] = {"count": experts, "every": 2, "gate": "switch", "balance_loss": 0.01}
    return build_config({
        "model": model,
        "parallel": {"micro_batch": 16},
        "data": {"sequence_length": 64},
        "train": {
            "steps": steps, "global_batch": 16, "seed": seed, "validation_sequences": 64, "device": "cpu",
        },
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 20},
    })


def measure(
    seeds: int, *, steps: int, every: int, experts: int, shape: tuple[int, int, int], say: Callable[[str], None]
) -> list[SwitchRun]:
    """Train both with each seed in turn."""
    runs = []
    for seed in range(seeds):
        for kind in KINDS:
            config = config_of(kind, seed, steps=steps, experts=experts, shape=shape)
            engine, validation = engine_and_validation(config)
            at, losses, dropped = [], [], []
            for done, loss in trained(engine, validation, steps, every):
                routed = engine.routed() if done > steps - every else None
                if routed is not None:
                    dropped.append(routed.dropped)
                if loss is not None:
                    at.append(done)
                    losses.append(loss)
                    say(f"{kind}, seed {seed}, step {done} of {steps}: {loss:.3f}")
            runs.append(SwitchRun(
                kind, seed, tuple(at), tuple(losses), mean(dropped) if dropped else 0.0, engine.shape.parameters(),
                engine.shape.flops_per_token(config.data.sequence_length),
            ))
    return runs


def steps_to_dense(runs: Sequence[SwitchRun]) -> list[tuple[int, float, float]]:
    """For each seed: (seed, the dense model's loss at the end, Switch's steps until it has that)."""
    of = {(run.kind, run.seed): run for run in runs}
    seeds = sorted({run.seed for run in runs})
    ends = [of["dense", seed].losses[-1] for seed in seeds]
    return [(seed, end, of["switch", seed].reached(end)) for seed, end in zip(seeds, ends, strict=True)]


def write_csv(runs: Sequence[SwitchRun], out: Path) -> None:
    """Every validation of every run."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("model", "seed", "step", "validation_loss"))
        for run in runs:
            for step, loss in zip(run.steps, run.losses, strict=True):
                writer.writerow((run.kind, run.seed, step, f"{loss:.4f}"))


def draw(runs: Sequence[SwitchRun], title: str) -> str:
    """Validation loss against steps as an SVG: the mean over seeds, and each seed thin."""
    lines = {}
    for kind in KINDS:
        lines[kind] = with_mean([list(zip(run.steps, run.losses, strict=True)) for run in runs if run.kind == kind])
    highest = max(run.losses[len(run.losses) // 8] for run in runs)  # where they part is below the steepest part
    return panels(
        title, [Panel("equal FLOPs per token", lines, frozenset({"dense"}))], x="steps",
        y="validation loss, nats per token (thin: each seed)", highest=highest,
    )


def describe(runs: Sequence[SwitchRun], steps: int) -> list[str]:
    """A line for each kind: its size, its loss after all steps, and the tokens that found no room."""
    lines = []
    for kind in KINDS:
        mine = [run for run in runs if run.kind == kind]
        lines.append(
            f"{kind:<7} {mine[0].parameters:,} parameters, {mine[0].flops:,} FLOPs per token, validation loss after "
            f"{steps} steps {mean(run.losses[-1] for run in mine):.3f}, dropped {mean(run.dropped for run in mine):.1%}"
        )
    return lines


def table(rows: Sequence[tuple[int, float, float]], steps: int) -> Table:
    """A row for each seed.

    Args:
        rows: as of `steps_to_dense`.
        steps: of each run.
    """
    view = Table(title="steps of Switch until it has the dense model's last loss")
    for column in ("seed", "dense model's loss", f"steps, of {steps}", "times fewer"):
        view.add_column(column, justify="right")
    for seed, loss, needed in rows:
        view.add_row(str(seed), f"{loss:.3f}", f"{needed:.0f}", f"{steps / needed:.2f}")
    return view
