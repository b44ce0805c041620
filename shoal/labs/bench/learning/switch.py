"""Switch against dense at equal FLOPs per token on the default corpus: loss against steps, over several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.base.errors import UsageError
from shoal.labs.bench.benchmark import Say, check_folder, make_table
from shoal.labs.bench.learning.experiment import TrainedRun, compare, draw_validations, records, train_all, write_files
from shoal.report.charts import Points
from shoal.spec.config import RunConfig, build_config

KINDS = ("dense", "switch")
SHAPE = (2, 32, 32)
"""Layers, width, and width of the dense block: a model small for its steps, since experts pay where a dense model lacks
weights, and after each has seen enough of the tokens."""


def run(
    console: Console, say: Say, *, experts: int, seeds: int, steps: int, shape: tuple[int, int, int], out: Path | None
) -> bool:
    """Train both with each seed, and print how many steps Switch takes to the dense model's last loss.

    Args:
        experts: of a layer.
        shape: as `SHAPE`.
        out: a folder for switch.csv and switch.svg.

    Returns:
        Whether it takes fewer with every seed.
    """
    check_folder(out, "bench experts --out")
    layers, hidden, _ = shape
    if layers < 2 or hidden % 8:
        raise UsageError(f"bench experts --shape {layers} {hidden} ..: every other layer has experts, and there are 4 "
                         "heads of an even width.\n  Use 2 layers or more, and a width that is a multiple of 8.")
    runs = train_all(
        KINDS, seeds, lambda kind, seed: config_of(kind, seed, steps=steps, experts=experts, shape=shape), say,
        validations=20,
    )
    for kind in compare(runs, "dense"):
        parameters, flops = kind.mean("parameters"), kind.mean("flops_per_token")
        console.print(
            f"{kind.name:<7} {parameters:,.0f} parameters, {flops:,.0f} FLOPs per token, validation loss after {steps} "
            f"steps {kind.loss:.3f}, dropped {kind.mean('dropped'):.1%}"
        )
    rows = steps_to_dense(runs)
    console.print(make_table("steps of Switch until it has the dense model's last loss", [
        {"seed": seed, "dense model's loss": end, f"steps, of {steps}": needed, "times fewer": steps / needed}
        for seed, end, needed in rows
    ]))  # fmt: skip
    title = f"Switch ({experts} experts) against dense, {seeds} seeds"
    write_files(out, "switch", records(runs, "model"), draw_kinds(runs, title))
    return all(needed < steps for _, _, needed in rows)


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


def steps_to_dense(runs: Sequence[TrainedRun]) -> list[tuple[int, float, float]]:
    """For each seed: (seed, the dense model's loss at the end, Switch's steps until it has that)."""
    ends = {run.seed: run.end for run in runs if run.name == "dense"}
    return [(run.seed, ends[run.seed], reach(ends[run.seed], run.validations)) for run in runs if run.name == "switch"]


def reach(loss: float, points: Points) -> float:
    """The x at which a curve is first as low as a loss, between two points by a straight line; infinite if never."""
    for (before, high), (after, low) in pairwise(points):
        if low <= loss:
            return before + (after - before) * max(0.0, (high - loss) / (high - low))
    return float("inf")


def draw_kinds(runs: Sequence[TrainedRun], title: str) -> str:
    """Validation loss against steps as an SVG."""
    return draw_validations(title, runs, "equal FLOPs per token", ("dense",), lambda run: run.validations, x="steps")
