"""Mixture of depths against dense: what the layers that only some tokens pass through cost in loss, and what the FLOPs
that they save are worth in further layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt
from rich.console import Console

from shoal.engine.data.tokenizer import load_tokenizer
from shoal.labs.bench.benchmark import Benchmark, Say, check_folder, make_table
from shoal.labs.bench.learning.experiment import (
    LossSummary,
    TrainedRun,
    compare,
    draw_validations,
    records,
    train_all,
    write_files,
)
from shoal.report.charts import Points
from shoal.spec.config import RunConfig, build_config

DENSE, SHORTER, LESS, EQUAL = "dense", "dense, shorter", "as deep", "equal FLOPs"
KINDS = (DENSE, SHORTER, LESS, EQUAL)
LAYERS = 4
LENGTH, BATCH = 64, 16


class DepthsBenchmark(Benchmark):
    """Layers that only some tokens pass through: their loss as deep as a dense model, and with as many FLOPs."""

    capacity: float = Field(0.25, gt=0, le=1)
    """The part of the tokens that pass through every other layer."""

    weight: Literal["score", "sigmoid"] = "score"
    """What multiplies that which such a layer adds, as of model.depths."""

    seeds: PositiveInt = 3
    """Runs of each, with seeds from 0."""

    steps: PositiveInt = 800
    """Steps of each run; those of the shorter one are as many as cost what the layers that take some tokens do."""

    out: Path | None = None
    """A folder for depths.csv and depths.svg."""

    def run(self, console: Console, say: Say) -> bool:
        """Train each kind, and compare."""
        check_folder(self.out, "bench depths --out")

        def config(kind: str, seed: int) -> RunConfig:
            return config_of(kind, seed, steps=self.steps, capacity=self.capacity, weight=self.weight)

        runs = train_all(KINDS, self.seeds, config, say, validations=20)
        title = f"capacity {self.capacity:g} in every other layer, {self.steps} steps, mean of {self.seeds} seeds"
        console.print(make_table(title, [
            {
                "model": kind.name, "layers": round(kind.mean("layers")), "parameters": round(kind.mean("parameters")),
                "FLOPs a token": round(kind.mean("flops_per_token")), "steps": kind.runs[0].validations[-1][0],
                "loss": f"{kind.loss:.3f}", "predicted": predicted(kind, "one by one", ".3f"),
                "right": predicted(kind, "accuracy", ".1%"), "recall": predicted(kind, "recall", ".1%"),
            } for kind in compare(runs, DENSE)
        ]))  # fmt: skip
        console.print("predicted: the loss with each token decided by itself, as in sampling; right: part of the "
                      "tokens of which that was predicted, recall: of the chosen ones")
        title = f"Every other layer takes {self.capacity:g} of the tokens, {self.seeds} seeds"
        lines = records(runs, "model", ("layers", "flops_per_token"))
        write_files(self.out, "depths", lines, draw_kinds(runs, title))
        return True


def predicted(kind: LossSummary, fact: str, style: str) -> str:
    """The cell of what the predictors of layers did; empty for dense models."""
    return format(kind.mean(fact), style) if fact in kind.runs[0].facts else ""


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


def training_flops(run: TrainedRun) -> Points:
    """Training FLOPs [TFLOP] and validation loss."""
    return [(step * BATCH * LENGTH * run.facts["flops_per_token"] / 1e12, loss) for step, loss in run.validations]


def draw_kinds(runs: Sequence[TrainedRun], title: str) -> str:
    """Validation loss against training FLOPs as an SVG."""
    named = [replace(run, name=f"{run.name}, {run.facts['layers']:.0f} layers") for run in runs]
    dense = [run.name for run in named if run.name.startswith(DENSE)]
    return draw_validations(title, named, "mixture of depths", dense, training_flops, x="training, TFLOP")
