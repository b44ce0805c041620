"""Mixture of depths against dense: what the layers that only some tokens pass through cost in loss, and what the FLOPs
that they save are worth in further layers."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.table import Table

from shoal.engine.data.batches import Dataset
from shoal.engine.data.tokenizer import load_tokenizer
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer
from shoal.labs.bench.learning.small import engine_and_validation, trained
from shoal.report.panels import Panel, panels, with_mean
from shoal.spec.config import RunConfig, build_config
from shoal.training.step.mixture_of_depths import Foreseen

DENSE, SHORTER, LESS, EQUAL = "dense", "dense, shorter", "as deep", "equal FLOPs"
KINDS = (DENSE, SHORTER, LESS, EQUAL)
LAYERS = 4
LENGTH, BATCH = 64, 16


@dataclass(frozen=True)
class DepthsRun:
    """One training.

    Attributes:
        steps, losses: those at which it was validated, and the loss [nats per token] with the highest of each sequence.
        foreseen: the loss at the end with each token decided by itself, as in sampling.
        predictor: how well it was foreseen in the last step; None for dense.
        layers, parameters, flops: of the model, and per token.
    """

    kind: str
    seed: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    foreseen: float
    predictor: Foreseen | None
    layers: int
    parameters: int
    flops: int

    def points(self) -> list[tuple[float, float]]:
        """Training FLOPs [TFLOP] and loss."""
        return [(step * BATCH * LENGTH * self.flops / 1e12, loss) for step, loss in self.curve()]

    def curve(self) -> list[tuple[int, float]]:
        """Steps and loss."""
        return list(zip(self.steps, self.losses, strict=True))


def config_of(kind: str, seed: int, *, steps: int, capacity: float, weight: str = "score") -> RunConfig:
    """A run of the experiment.

    "equal FLOPs" has as many layers as cost no more per token than the dense ones; "dense, shorter" does as many FLOPs
    in all as the model that is "as deep", on a schedule of its own.
    """
    depths = {"capacity": capacity, "weight": weight}
    dense, layers = _config(LAYERS, seed, steps, {}), LAYERS
    if kind == DENSE:
        return dense
    if kind == SHORTER:
        part = _flops(_config(LAYERS, seed, steps, depths)) / _flops(dense)
        return _config(LAYERS, seed, round(part * steps), {})
    while kind == EQUAL and _flops(_config(layers + 1, seed, steps, depths)) <= _flops(dense):
        layers += 1
    return _config(layers, seed, steps, depths)


def _config(layers: int, seed: int, steps: int, depths: dict[str, Any]) -> RunConfig:
    return build_config({
        "model": {"name": "tiny", "layers": layers, "hidden": 48, "heads": 4, "ffn": 128, "depths": depths},
        "parallel": {"micro_batch": BATCH},
        "data": {"sequence_length": LENGTH},
        "train": {
            "steps": steps, "global_batch": BATCH, "seed": seed, "validation_sequences": 64, "device": "cpu",
        },
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 20},
    })


def _flops(config: RunConfig) -> int:
    vocab = load_tokenizer(config.data.tokenizer).vocab_size
    return config.model.shape(vocab=vocab, sequence_length=LENGTH).flops_per_token(LENGTH)


def measure(
    seeds: int, *, steps: int, capacity: float, weight: str, say: Callable[[str], None]
) -> list[DepthsRun]:
    """Train each kind with each seed in turn, and validate some twenty times."""
    runs = []
    for seed in range(seeds):
        for kind in KINDS:
            config = config_of(kind, seed, steps=steps, capacity=capacity, weight=weight)
            engine, validation = engine_and_validation(config)
            at, losses = [], []
            last = config.train.steps
            for done, loss in trained(engine, validation, last, max(1, last // 20)):
                if loss is not None:
                    at.append(done)
                    losses.append(loss)
                    say(f"{kind}, seed {seed}, step {done} of {last}: {loss:.3f}")
            foreseen = one_by_one(engine.stages[0].module, validation, config.train.validation_sequences)
            runs.append(DepthsRun(
                kind, seed, tuple(at), tuple(losses), foreseen, engine.foreseen(), engine.shape.layers,
                engine.shape.parameters(), engine.shape.flops_per_token(LENGTH),
            ))
    return runs


@torch.no_grad()
def one_by_one(model: Transformer, samples: Dataset, sequences: int) -> float:
    """The mean loss [nats per token] of the first samples, with each token decided by what is foreseen of it."""
    total = tokens = 0.0
    for i in range(sequences):
        batch = samples.batch([i])
        total += float(model(batch.tokens, batch.targets, part=Slice()))
        tokens += batch.unmasked()
    return total / tokens


def of_kind(runs: Sequence[DepthsRun], kind: str) -> list[DepthsRun]:
    """Those of one kind."""
    return [run for run in runs if run.kind == kind]


def write_csv(runs: Sequence[DepthsRun], out: Path) -> None:
    """Every validation of every run."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("model", "layers", "flops_per_token", "seed", "step", "validation_loss"))
        for run in runs:
            for step, loss in run.curve():
                writer.writerow((run.kind, run.layers, run.flops, run.seed, step, f"{loss:.4f}"))


def draw(runs: Sequence[DepthsRun], title: str) -> str:
    """Validation loss against training FLOPs as an SVG: the mean over seeds, and each seed thin."""
    lines = {}
    for kind in KINDS:
        found = of_kind(runs, kind)
        lines[f"{kind}, {found[0].layers} layers"] = with_mean([run.points() for run in found])
    dense = list(lines)[:2]
    highest = max(run.losses[len(run.losses) // 8] for run in runs)  # where they part is below the steepest part
    return panels(
        title, [Panel("mixture of depths", lines, frozenset(dense))], x="training, TFLOP",
        y="validation loss, nats per token (thin: each seed)", highest=highest,
    )


def table(runs: Sequence[DepthsRun], capacity: float, steps: int) -> Table:
    """A row for each kind, means over the seeds.

    Args:
        capacity: the part of the tokens that pass through every other layer.
        steps: of the longest run.
    """
    seeds = len({run.seed for run in runs})
    view = Table(title=f"capacity {capacity:g} in every other layer, {steps} steps, mean of {seeds} seeds")
    for column in ("model", "layers", "parameters", "FLOPs a token", "steps", "loss", "foreseen", "right", "recall"):
        view.add_column(column, justify="left" if column == "model" else "right")
    for kind in KINDS:
        mine = of_kind(runs, kind)
        loss = mean(run.losses[-1] for run in mine)
        view.add_row(
            kind, str(mine[0].layers), f"{mine[0].parameters:,}", f"{mine[0].flops:,}", str(mine[0].steps[-1]),
            f"{loss:.3f}", *_foreseen(mine),
        )
    return view


def _foreseen(runs: Sequence[DepthsRun]) -> list[str]:
    """The cells of what was foreseen, empty for dense models."""
    predictors = [run.predictor for run in runs if run.predictor]
    if not predictors:
        return [""] * 3
    return [
        f"{mean(run.foreseen for run in runs):.3f}", f"{mean(p.accuracy for p in predictors):.1%}",
        f"{mean(p.recall for p in predictors):.1%}",
    ]
