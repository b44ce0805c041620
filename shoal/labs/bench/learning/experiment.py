"""Experiments: train a small model in several ways with several seeds, and compare the losses.

Each way of training has a name. `train_all` trains models of one rank, as many at a time as there are cores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from shoal.base.files import write_whole
from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Dataset, open_dataset
from shoal.engine.data.prepare import prepare
from shoal.engine.device import usable_cores
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer
from shoal.labs.bench.benchmark import Row, Say, write_records
from shoal.launch.worker_pool import Pool
from shoal.report.charts import Points, draw_means, new_figure, to_svg
from shoal.spec.config import RunConfig, build_config
from shoal.training.check import check
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite


@dataclass(frozen=True)
class TrainedRun:
    """One training.

    Attributes:
        name, seed: the way of training, and its seed.
        losses: (x, training loss [nats per token]); x is the step, or seconds where time is compared.
        validations: (x, validation loss [nats per token]).
        facts: what else is compared, by name.
    """

    name: str
    seed: int
    losses: Points
    validations: Points
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """The last validation loss; NaN where the training ended before."""
        return self.validations[-1][1] if self.validations else math.nan


@dataclass(frozen=True)
class LossSummary:
    """One way of training over all seeds.

    Attributes:
        loss, spread: mean and standard deviation of the loss at the end.
        difference: of the mean from that of the reference over the same seeds.
    """

    name: str
    runs: Sequence[TrainedRun]
    loss: float
    spread: float
    difference: float

    def mean(self, fact: str) -> float:
        """The mean of one of the facts."""
        return mean(run.facts[fact] for run in self.runs)


def compare(runs: Sequence[TrainedRun], reference: str) -> list[LossSummary]:
    """Compare the losses at the end, in the order of the runs."""
    base = mean(run.end for run in runs if run.name == reference)
    found = []
    for name in dict.fromkeys(run.name for run in runs):
        mine = [run for run in runs if run.name == name]
        ends = [run.end for run in mine]
        finite = all(map(math.isfinite, ends))
        spread = 0.0 if len(ends) < 2 else stdev(ends) if finite else math.nan
        found.append(LossSummary(name, mine, mean(ends), spread, mean(ends) - base))
    return found


def draw(
    title: str, runs: Sequence[TrainedRun], families: Mapping[str, Sequence[str]], reference: Sequence[str],
    points: Callable[[TrainedRun], Points], *, x: str, y: str, highest: float | None = None,
) -> str:
    """Draw a panel for each family that has runs, as an SVG: the mean over the seeds, and each seed thin.

    Args:
        families: names of runs, by the title of the panel.
        reference: those drawn grey in every panel.
        points: the curve of a run.
        x, y: titles of the axes.
        highest: where y is cut off.
    """
    curves: dict[str, list[Points]] = {}
    for run in runs:
        curves.setdefault(run.name, []).append(points(run))
    drawn = {family: names for family, names in families.items() if curves.keys() & names}
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, charts = new_figure(430 * columns, 40 + 290 * rows, rows=rows, columns=columns, title=title, shared=True)
    for axes, (family, names) in zip(charts, drawn.items(), strict=False):
        shown = {name: curves[name] for name in (*reference, *names) if name in curves}
        draw_means(axes, family, shown, grey=reference, x=x, y=f"{y} (thin: each seed)")
    if highest is not None and math.isfinite(highest):
        charts[0].set_ylim(top=highest)
    for axes in charts[len(drawn) :]:
        axes.set_visible(False)
    return to_svg(figure)


def draw_validations(
    title: str, runs: Sequence[TrainedRun], panel: str, reference: Sequence[str],
    points: Callable[[TrainedRun], Points], *, x: str,
) -> str:
    """Draw the validation losses of all runs in one panel, with the arguments of `draw`."""
    highest = max(run.validations[len(run.validations) // 8][1] for run in runs)  # below the steepest part
    names = dict.fromkeys(run.name for run in runs if run.name not in reference)
    return draw(title, runs, {panel: tuple(names)}, tuple(dict.fromkeys(reference)), points, x=x,
                y="validation loss, nats per token", highest=highest)


def records(runs: Sequence[TrainedRun], who: str, facts: Sequence[str] = (), *, x: str = "step") -> list[Row]:
    """Every loss of every run, for a file.

    Args:
        who, x: what the columns of the names and of x are called.
        facts: of the run, in columns of their own.
    """
    lines: list[Row] = []
    for run in runs:
        trained, validated = dict(run.losses), dict(run.validations)
        about = {who: run.name, **{fact: run.facts[fact] for fact in facts}, "seed": run.seed}
        for place in sorted(trained | validated):
            lines.append({**about, x: f"{place:.10g}", "training_loss": trained.get(place, ""),
                          "validation_loss": validated.get(place, "")})
    return lines


def write_files(out: Path | None, name: str, lines: Sequence[Row], picture: str) -> None:
    """Write the losses as CSV and SVG to a folder, if there is one."""
    if out is not None:
        write_records(lines, out / f"{name}.csv")
        write_whole(out / f"{name}.svg", picture)


def train_all(
    names: Sequence[str], seeds: int, config_of: Callable[[str, int], RunConfig], say: Say, *, validations: int = 1
) -> list[TrainedRun]:
    """Train with each name and each seed from 0, on one thread each.

    Args:
        config_of: the config of a name and a seed.
        validations: how often, at equal distances, the last at the end.
    """
    jobs = {(name, seed): config_of(name, seed) for seed in range(seeds) for name in names}
    for data in dict.fromkeys(config.data for config in jobs.values()):
        prepare(data)
    names_of, finished = list(jobs), itertools.count(1)

    def tell(number: int, value: object) -> None:
        name, seed = names_of[number]
        say(f"{next(finished)} of {len(jobs)}: {name}, seed {seed}")

    with Pool(min(usable_cores(), len(jobs))) as pool:
        configs = [plain(config) for config in jobs.values()]
        one = partial(train, validations=validations)
        trained = pool.map(one, configs, timeout=math.inf, done=tell, stop_early=True)
    return [TrainedRun(name, seed, *run) for (name, seed), run in zip(jobs, trained, strict=True)]


def train(values: dict[str, Any], validations: int) -> tuple[Points, Points, dict[str, float]]:
    """Train one model; returns the losses, validations and facts of `TrainedRun`, up to where a number is not finite.

    The facts: "layers", "parameters" and "flops_per_token" of the model; "skipped", the steps without an update since
    a gradient overflowed; "dropped", the mean part of the tokens that experts had no room for since the validation
    before the last; of mixture of depths "one by one", the loss at the end with each token decided by itself, as in
    sampling, and how well that was predicted in the last step: "accuracy" and "recall".
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
                dropped.append(engine.routing_metrics()["dropped"])
            if done % every == 0 or done == steps:
                validated.append((done, engine.evaluate(held_out)))
    except NonFinite:
        return losses, [], {"skipped": skipped}
    flops = shape.flops_per_token(config.data.sequence_length)
    facts: dict[str, float] = {"layers": shape.layers, "parameters": shape.parameters(), "flops_per_token": flops}
    facts |= {"skipped": skipped, "dropped": mean(dropped[1:] or dropped)}
    if engine.depths:
        predicted = engine.routing_metrics()
        facts |= {"accuracy": predicted["depth_accuracy"], "recall": predicted["depth_recall"]}
        facts["one by one"] = one_by_one(engine.stages[0].module, held_out, config.train.validation_sequences)
    return losses, validated, facts


@torch.no_grad()
def one_by_one(model: Transformer, samples: Dataset, sequences: int) -> float:
    """The mean loss [nats per token] of the first samples, with each token decided by what is predicted of it."""
    total = tokens = 0.0
    for i in range(sequences):
        batch = samples.batch([i])
        total += float(model(batch.tokens, batch.targets, part=Slice()))
        tokens += batch.unmasked()
    return total / tokens
