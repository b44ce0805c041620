"""Mixture of depths against dense models: the loss of layers that only some tokens pass through, and of more layers for
the FLOPs they save."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field, PositiveInt
from rich.console import Console

from shoal.engine.data.tokenizer import build_shape
from shoal.labs.bench.benchmark import Notify, make_folder, make_table
from shoal.labs.bench.learning import experiment
from shoal.labs.bench.learning.experiment import LENGTH, VALIDATION, Experiment, LossSummary, TrainedRun, build_run
from shoal.report.charts import Points
from shoal.spec.config import RunConfig

DENSE, SHORTER, LESS, EQUAL = "dense", "dense, shorter", "as deep", "equal FLOPs"
KINDS = (DENSE, SHORTER, LESS, EQUAL)
LAYERS = 4
BATCH = 16


class DepthsBenchmark(Experiment):
    """Layers that only some tokens pass through: their loss with a dense model's depth, and with its FLOPs."""

    capacity: float = Field(0.25, gt=0, le=1)
    """Fraction of the tokens that pass through every other layer."""

    steps: PositiveInt = 800
    """Steps of each run; the shorter dense run takes as many as cost the FLOPs of the layers that take some tokens."""

    def run(self, console: Console, notify: Notify) -> bool:
        make_folder(self.out, "bench depths --out")
        runs = experiment.train_all(KINDS, self.seeds, self.configure, notify, validations=20)
        title = f"capacity {self.capacity:g} in every other layer, {self.steps} steps, mean of {self.seeds} seeds"
        console.print(make_table(title, [
            {
                "model": kind.name, "layers": round(kind.mean("layers")), "parameters": round(kind.mean("parameters")),
                "FLOPs/token": round(kind.mean("flops_per_token")), "steps": kind.runs[0].validations[-1][0],
                "loss": f"{kind.loss:.3f}", "sampled": _format_fact(kind, "sampled", ".3f"),
                "accuracy": _format_fact(kind, "accuracy", ".1%"), "recall": _format_fact(kind, "recall", ".1%"),
            } for kind in experiment.compare(runs, DENSE)
        ]))  # fmt: skip
        console.print("sampled: the loss with each token's route predicted, as in sampling; accuracy, recall: of these "
                      "predictions")
        title = f"Every other layer takes {self.capacity:g} of the tokens, {self.seeds} seeds"
        named = [replace(run, name=f"{run.name}, {run.facts['layers']:.0f} layers") for run in runs]
        families = {"mixture of depths": [run.name for run in named]}
        picture = experiment.draw(
            title, named, families, named[0].name, training_flops, x="training, TFLOP", y=VALIDATION
        )
        lines = experiment.list_losses(runs, ("layers", "flops_per_token"))
        experiment.write_files(self.out, "depths", lines, picture)
        return True

    def configure(self, kind: str, seed: int) -> RunConfig:
        """Build the config of one run.

        "equal FLOPs" has the most layers that cost no more FLOPs per token than the dense model; "dense, shorter" takes
        the total FLOPs of "as deep", with its own learning-rate schedule.
        """

        def build(layers: int, steps: int, depths: dict[str, float]) -> RunConfig:
            model = {"layers": layers, "hidden": 48, "heads": 4, "ffn": 128, "depths": depths}
            return build_run(model, seed=seed, steps=steps, micro_batch=BATCH, learning_rate=4e-3)

        depths: dict[str, float] = {"capacity": self.capacity}
        dense, layers = build(LAYERS, self.steps, {}), LAYERS
        if kind == DENSE:
            return dense
        if kind == SHORTER:
            fraction = _flops(build(LAYERS, self.steps, depths)) / _flops(dense)
            return build(LAYERS, round(fraction * self.steps), {})
        while kind == EQUAL and _flops(build(layers + 1, self.steps, depths)) <= _flops(dense):
            layers += 1
        return build(layers, self.steps, depths)


def _format_fact(kind: LossSummary, fact: str, style: str) -> str:
    return format(kind.mean(fact), style) if fact in kind.runs[0].facts else ""


def _flops(config: RunConfig) -> int:
    return build_shape(config).flops_per_token(LENGTH)


def training_flops(run: TrainedRun) -> Points:
    """Return (training FLOPs [TFLOP], validation loss)."""
    return [(step * BATCH * LENGTH * run.facts["flops_per_token"] / 1e12, loss) for step, loss in run.validations]
