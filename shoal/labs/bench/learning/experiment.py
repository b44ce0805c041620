"""Train a small model in several named ways, each with several seeds, and compare the losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from types import MappingProxyType
from typing import Any

import torch
from pydantic import PositiveInt

from shoal.base.files import write_atomically
from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Dataset, open_dataset
from shoal.engine.data.prepare import prepare
from shoal.engine.device import usable_cores
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer
from shoal.labs.bench.benchmark import Benchmark, Notify, Row, write_records
from shoal.launch.worker_pool import Pool
from shoal.report.charts import Points, draw_means, new_figure, to_svg
from shoal.spec.config import RunConfig, build_config
from shoal.training.check import check
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite

LENGTH = 64  # tokens of a sequence in every experiment
VALIDATION = "validation loss, nats per token"

Changes = Mapping[str, Mapping[str, Any]]
"""Config values by section and key."""


@dataclass(frozen=True)
class TrainedRun:
    """One training run.

    Attributes:
        name: the way of training.
        losses: (x, training loss [nats per token]); x is the step, or seconds if time is compared.
        validations: (x, validation loss [nats per token]).
        facts: other compared values by name.
    """

    name: str
    seed: int
    losses: Points
    validations: Points
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def final_loss(self) -> float:
        """The last validation loss; NaN if the run ended before it."""
        return self.validations[-1][1] if self.validations else math.nan


@dataclass(frozen=True)
class LossSummary:
    """One way of training over all seeds.

    Attributes:
        loss, spread: mean and standard deviation of the final loss.
        difference: mean minus the reference's mean over the same seeds.
    """

    name: str
    runs: Sequence[TrainedRun]
    loss: float
    spread: float
    difference: float

    def mean(self, fact: str) -> float:
        """Return the mean of one of the facts."""
        return mean(run.facts[fact] for run in self.runs)


class Experiment(Benchmark):
    """A benchmark that trains in several ways, each with several seeds."""

    seeds: PositiveInt = 3
    """Runs of each way of training, with seeds from 0."""

    out: Path | None = None
    """Folder for the losses, as .csv and .svg."""


def build_run(
    model: Mapping[str, Any], *, seed: int, steps: int, micro_batch: int, learning_rate: float,
    validation_sequences: int = 64, changes: Changes = MappingProxyType({}),
) -> RunConfig:
    """Build the config of one run on the CPU and the default corpus: the model "tiny" with the values of ``model``, and
    other ``changes``, which take precedence."""
    values: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny", **model},
        "parallel": {"micro_batch": micro_batch},
        "data": {"sequence_length": LENGTH},
        "train": {
            "steps": steps, "global_batch": micro_batch, "seed": seed, "validation_sequences": validation_sequences,
            "device": "cpu",
        },
        "optimizer": {"learning_rate": learning_rate, "warmup_steps": 20},
    }
    return build_config(values, changes)


def compare(runs: Sequence[TrainedRun], reference: str) -> list[LossSummary]:
    """Summarise the final losses of each way of training, in the order of the runs."""
    base = mean(run.final_loss for run in runs if run.name == reference)
    summaries = []
    for name in dict.fromkeys(run.name for run in runs):
        same = [run for run in runs if run.name == name]
        losses = [run.final_loss for run in same]
        spread = 0.0 if len(losses) < 2 else stdev(losses) if all(map(math.isfinite, losses)) else math.nan
        summaries.append(LossSummary(name, same, mean(losses), spread, mean(losses) - base))
    return summaries


def draw(
    title: str, runs: Sequence[TrainedRun], families: Mapping[str, Sequence[str]], reference: str,
    points: Callable[[TrainedRun], Points], *, x: str, y: str,
) -> str:
    """Draw a panel for each family with runs, as an SVG: each seed as a thin line, and the mean.

    Args:
        families: names of runs by panel title.
        reference: name drawn in grey in every panel.
        points: curve of a run; y is cut off at the largest value after its first eighth, which is the steepest part.
    """
    curves: dict[str, list[Points]] = {}
    for run in runs:
        curves.setdefault(run.name, []).append(points(run))
    drawn = {family: names for family, names in families.items() if curves.keys() & names}
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, charts = new_figure(430 * columns, 40 + 290 * rows, rows=rows, columns=columns, title=title, shared=True)
    for axes, (family, names) in zip(charts, drawn.items(), strict=False):
        shown = {name: curves[name] for name in (reference, *names) if name in curves}
        draw_means(axes, family, shown, grey=(reference,), x=x, y=f"{y} (thin: each seed)")
    highest = max(curve[len(curve) // 8][1] for seeds in curves.values() for curve in seeds if curve)
    if math.isfinite(highest):
        charts[0].set_ylim(top=highest)
    for axes in charts[len(drawn) :]:
        axes.set_visible(False)
    return to_svg(figure)


def list_losses(runs: Sequence[TrainedRun], facts: Sequence[str] = (), *, x: str = "step") -> list[Row]:
    """Return every loss of every run, for a file, with columns of these facts and of x under this heading."""
    lines: list[Row] = []
    for run in runs:
        trained, validated = dict(run.losses), dict(run.validations)
        about = {"name": run.name, **{fact: run.facts[fact] for fact in facts}, "seed": run.seed}
        for place in sorted(trained | validated):
            lines.append({**about, x: f"{place:.10g}", "training_loss": trained.get(place, ""),
                          "validation_loss": validated.get(place, "")})
    return lines


def write_files(out: Path | None, name: str, lines: Sequence[Row], picture: str) -> None:
    """Write the losses as CSV and SVG to a folder, if one is given."""
    if out is not None:
        write_records(lines, out / f"{name}.csv")
        write_atomically(out / f"{name}.svg", picture)


def train_all(
    names: Sequence[str], seeds: int, configure: Callable[[str, int], RunConfig], notify: Notify, *,
    validations: int = 1,
) -> list[TrainedRun]:
    """Train each name with each seed from 0, on one thread each and on all cores, with evenly spaced validations, the
    last one after the last step. ``configure`` returns the config of a name and a seed."""
    jobs = {(name, seed): configure(name, seed) for seed in range(seeds) for name in names}
    for data in {repr(config.data): config.data for config in jobs.values()}.values():
        prepare(data)
    keys, finished = list(jobs), itertools.count(1)

    def show(number: int, value: object) -> None:
        name, seed = keys[number]
        notify(f"{next(finished)} of {len(jobs)}: {name}, seed {seed}")

    with Pool(min(usable_cores(), len(jobs))) as pool:
        configs = [plain(config) for config in jobs.values()]
        one = partial(train, validations=validations)
        trained = pool.map(one, configs, timeout=math.inf, done=show, stop_early=True)
    return [TrainedRun(name, seed, *run) for (name, seed), run in zip(jobs, trained, strict=True)]


def train(values: dict[str, Any], validations: int) -> tuple[Points, Points, dict[str, float]]:
    """Train one model until the end or the first non-finite number.

    Returns:
        Losses, validations and facts of a `TrainedRun`. The facts: "layers", "parameters" and "flops_per_token" of the
        model; "skipped", the steps without an update because a gradient overflowed; "dropped", the mean fraction of
        tokens over the experts' capacity since the last validation but one. With mixture of depths also "sampled", the
        final loss with each token's route predicted as in sampling, and the predictor's "accuracy" and "recall".
    """
    config = build_config(values)
    samples, held_out = (open_dataset(config.data, seed=config.train.seed, split=s) for s in ("train", "validation"))
    engine = Engine(config, check(config), Mesh(config.parallel, 0), samples)
    steps, shape = config.train.steps, engine.shape
    every = max(1, steps // validations)
    losses, validated, dropped, skipped = [], [], [0.0], 0
    try:
        for done in range(1, steps + 1):
            result = engine.step(done - 1)
            losses.append((done, result.loss))
            skipped += result.skipped
            if done > steps - every and engine.routing:
                dropped.append(engine.step_metrics()["dropped"])
            if done % every == 0 or done == steps:
                validated.append((done, engine.evaluate(held_out)))
    except NonFinite:
        return losses, [], {"skipped": skipped}
    flops = shape.flops_per_token(config.data.sequence_length)
    facts: dict[str, float] = {"layers": shape.layers, "parameters": shape.parameters(), "flops_per_token": flops}
    facts |= {"skipped": skipped, "dropped": mean(dropped[1:] or dropped)}
    if engine.depths:
        predicted = engine.step_metrics()
        facts |= {"accuracy": predicted["depth_accuracy"], "recall": predicted["depth_recall"]}
        facts["sampled"] = sampled_loss(engine.stages[0].module, held_out, config.train.validation_sequences)
    return losses, validated, facts


@torch.no_grad()
def sampled_loss(model: Transformer, samples: Dataset, sequences: int) -> float:
    """Return the mean loss [nats per token] of the first samples, with each token's route predicted."""
    total = tokens = 0.0
    for i in range(sequences):
        batch = samples.batch([i])
        total += float(model(batch.tokens, batch.targets, part=Slice()))
        tokens += batch.unmasked()
    return total / tokens
