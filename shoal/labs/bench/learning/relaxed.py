"""Every method of the relaxed family on the same data, under one straggler: loss against time, over several seeds.

The ranks share this machine's cores, so each step's computing is stretched to a pace by sleeping (``train.pace``), and
the straggler's to a multiple of that: what is compared is how much of it the others wait for. With a network between
them (``train.link_gbs``) it is how long the exchange of what each method sends takes, of those that send something.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch.distributed as dist
from rich.table import Table

from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.throttle import ThrottledLink
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.data.batches import open_dataset
from shoal.engine.data.prepare import prepare
from shoal.labs.bench.race import deviation
from shoal.launch.worker_pool import Pool
from shoal.report.panels import Panel, Points, panels, with_mean
from shoal.spec.config import RunConfig, build_config
from shoal.spec.sync_methods import POOLED, UNSYNCHRONISED
from shoal.training.async_dp.choose import trainer_of
from shoal.training.check import check
from shoal.training.fault_knobs import Handicaps
from shoal.training.records.metrics import read_metrics
from shoal.training.run_folder import new_run

FAMILIES = {
    "compressed all-reduce": ("powersgd", "topk", "onebit", "int8"),
    "local steps, then an average": ("local-sgd", "diloco", "diloco-int8"),
    "a few others in each step": ("sgp", "wagma"),
    "parameter server, Hogwild!": ("ps-bsp", "ps-ssp", "ps-async", "hogwild"),
}
REFERENCE = "all-reduce"
METHODS = (REFERENCE, *(method for methods in FAMILIES.values() for method in methods))
OVER_LINKS = tuple(method for method in METHODS if method not in UNSYNCHRONISED)
"""Those whose ranks send each other something."""
VARIANTS = {"diloco-int8": ("diloco", {"outer_int8": True})}
"""What is no value of parallel.sync by itself, as one and what is set of relaxed.*."""
MARGINS = {
    REFERENCE: 0.0, "powersgd": 0.07, "topk": 0.31, "onebit": 0.54, "int8": 0.08, "local-sgd": 0.21, "diloco": 0.47,
    "diloco-int8": 0.46, "sgp": 0.18, "wagma": 0.24, "ps-bsp": 0.12, "ps-ssp": 0.11, "ps-async": 0.11, "hogwild": 0.14,
}
"""Nats that the mean loss at the end may be above the synchronous run's, at the settings of `shoal bench relaxed`: the
difference that was measured, if it was worse, and two standard deviations over the seeds (docs/relaxed.md)."""


@dataclass(frozen=True)
class RelaxedRun:
    """One training.

    Attributes:
        method, seed: which.
        times, losses: seconds in steps until each logged one, and its training loss [nats per token].
        validation: loss at the end.
    """

    method: str
    seed: int
    times: tuple[float, ...]
    losses: tuple[float, ...]
    validation: float

    @property
    def seconds(self) -> float:
        """In steps alone, to the end."""
        return self.times[-1]


def config_of(
    method: str, seed: int, *, ranks: int, steps: int, pace: float, straggler: str, link_gbs: float = 0.0
) -> RunConfig:
    """A run of the experiment: a small model on the default corpus."""
    sync, relaxed = VARIANTS.get(method, (method, {}))
    values: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny", "layers": 2, "hidden": 64, "heads": 2, "ffn": 192},
        "parallel": {"dp": ranks, "micro_batch": 2, "sync": sync},
        "relaxed": relaxed,
        "data": {"sequence_length": 64, "sampler": "pool" if sync in POOLED else "even"},
        "train": {
            "steps": steps, "global_batch": 2 * ranks, "seed": seed, "validate_every": 0, "validation_sequences": 128,
            "threads": 1, "device": "cpu", "pace": pace, "straggler": straggler, "link_gbs": link_gbs,
        },
        "optimizer": {"learning_rate": 5e-3, "warmup_steps": 20},
        "checkpoint": {"every": 0},
        "metrics": {"log_every": 10, "tensorboard": False},
    }
    return build_config(values)


def measure(
    methods: Sequence[str], seeds: int, *, ranks: int, say: Callable[[str], None], **settings: Any
) -> list[RelaxedRun]:
    """Train with each method and seed in turn.

    Args:
        settings: as of `config_of`.
    """
    runs = []
    with Pool(ranks, tune_process) as pool, tempfile.TemporaryDirectory(prefix="shoal-relaxed-") as scratch:
        for seed in range(seeds):
            for method in methods:
                say(f"{method}, seed {seed}")
                config = config_of(method, seed, ranks=ranks, **settings)
                shape = check(config)
                prepare(config.data)
                folder = new_run(config, Path(scratch, f"{method}-{seed}"))
                limit = seconds_at_most(config, shape.parameters())
                pool.run(_train, ranks, plain(config), folder, timeout=limit)
                runs.append(_read(folder, method, seed, config))
    return runs


def seconds_at_most(config: RunConfig, parameters: int) -> float:
    """What a run that does not hang takes: ten times its steps as slow as they are asked to be, of a tenth of a second
    at least, since ranks may share a core."""
    train = config.train
    slowest = max([1.0, *Handicaps.of(train, config.parallel.dp).factors.values()])
    exchange = 2 * 4 * parameters / (1e9 * train.link_gbs) if train.link_gbs else 0.0  # of fp32 gradients, all-reduced
    return 600.0 + 10 * train.steps * (max(train.pace, 0.1) * slowest + exchange)


def _train(values: dict[str, Any], folder: Path) -> None:
    config = build_config(values)
    mesh = Mesh(config.parallel, dist.get_rank(), link=ThrottledLink.of(config.train.link_gbs))
    samples = {s: open_dataset(config.data, seed=config.train.seed, split=s) for s in ("train", "validation")}
    trainer = trainer_of(config)(
        config, check(config), mesh, samples, folder, resume=False, local_ranks=dist.get_world_size()
    )
    trainer.display.console.quiet = True
    trainer.run()
    trainer.leave()


def _read(folder: Path, method: str, seed: int, config: RunConfig) -> RelaxedRun:
    records = read_metrics(folder)
    tokens = config.train.global_batch * config.data.sequence_length
    steps = [0, *(record.step for record in records)]
    times, now = [], 0.0
    for record, before in zip(records, steps, strict=False):
        now += (record.step - before) * tokens / record.tokens_per_second
        times.append(now)
    validation = records[-1].validation_loss
    assert validation is not None, "a run ends with a validation"
    return RelaxedRun(method, seed, tuple(times), tuple(r.loss for r in records), validation)


# ---- what is shown -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """One method over all seeds.

    Attributes:
        validation, spread: mean and standard deviation of the loss at the end.
        difference: of the mean from the synchronous run's, over the same seeds.
        seconds, faster: mean time in steps, and how many times less than the synchronous run's.
    """

    method: str
    validation: float
    spread: float
    difference: float
    seconds: float
    faster: float


def summaries(runs: Sequence[RelaxedRun]) -> list[Summary]:
    """One row for each method, in order."""
    of = {method: [r for r in runs if r.method == method] for method in METHODS}
    base = of[REFERENCE]
    found = []
    for method, mine in of.items():
        if mine:
            losses, seconds = [r.validation for r in mine], mean(r.seconds for r in mine)
            found.append(Summary(
                method, mean(losses), deviation(losses),
                mean(losses) - mean(r.validation for r in base), seconds, mean(r.seconds for r in base) / seconds,
            ))
    return found


def write_csv(runs: Sequence[RelaxedRun], out: Path) -> None:
    """Every logged step of every run."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("method", "seed", "seconds", "training_loss", "validation_loss"))
        for run in runs:
            for i, (time, loss) in enumerate(zip(run.times, run.losses, strict=True)):
                last = f"{run.validation:.4f}" if i + 1 == len(run.times) else ""
                writer.writerow((run.method, run.seed, f"{time:.3f}", f"{loss:.4f}", last))


def draw(runs: Sequence[RelaxedRun], title: str) -> str:
    """Loss against time as an SVG: a panel for each family, with the synchronous run in each."""
    measured = {run.method for run in runs}
    charts = [
        Panel(
            family, {m: _lines([r for r in runs if r.method == m]) for m in (REFERENCE, *methods) if m in measured},
            frozenset({REFERENCE}),
        )
        for family, methods in FAMILIES.items() if measured.intersection(methods)
    ]
    highest = max((run.losses[1] for run in runs if len(run.losses) > 1), default=None)
    return panels(
        title, charts, x="seconds in steps", y="training loss, nats per token (thin: each seed)", highest=highest
    )


def _lines(runs: Sequence[RelaxedRun]) -> list[Points]:
    """The mean over the seeds, then each seed."""
    return with_mean([list(zip(run.times, run.losses, strict=True)) for run in runs])


def table(rows: Sequence[Summary], margins: Mapping[str, float], title: str) -> Table:
    """A row for each method.

    Args:
        margins: how far the loss of each may be above that of all-reduce.
    """
    view = Table(title=title)
    view.add_column("sync")
    for column in ("validation loss", "std", "against all-reduce", "margin", "seconds", "all-reduce's / these"):
        view.add_column(column, justify="right")
    for row in rows:
        view.add_row(
            row.method, f"{row.validation:.3f}", f"{row.spread:.3f}", f"{row.difference:+.3f}",
            f"{margins[row.method]:.2f}", f"{row.seconds:.1f}", f"{row.faster:.2f}",
        )
    return view
