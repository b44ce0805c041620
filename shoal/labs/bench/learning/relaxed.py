"""Relaxed data parallelism under one straggler, on the same data: loss against time, over several seeds.

The ranks share this machine's cores, so sleeping extends each step to a minimum time (``testing.min_step_seconds``),
and the straggler's to a multiple of it: the comparison shows how long the other ranks wait. With a simulated network
(``testing.link_gbs``) it shows how long the exchange takes, for the methods that send data.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.engine.collectives.group import ThrottledLink
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import open_dataset
from shoal.engine.data.prepare import prepare
from shoal.engine.device import tune_process
from shoal.labs.bench.benchmark import TIME_LIMIT, Notify, choose_names, make_folder, make_table
from shoal.labs.bench.learning import experiment
from shoal.labs.bench.learning.experiment import Experiment, TrainedRun, build_run
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig, build_config
from shoal.spec.sync_methods import POOLED, UNSYNCHRONISED
from shoal.training.async_dp.trainers import trainer_class
from shoal.training.check import check
from shoal.training.records.metrics import read_metrics
from shoal.training.run_folder import new_run

FAMILIES = {
    "compressed all-reduce": ("powersgd", "topk", "onebit", "int8"),
    "local steps, then an average": ("local-sgd", "diloco", "diloco-int8"),
    "a few others in each step": ("sgp", "wagma"),
    "parameter server, Hogwild!": ("ps-bsp", "ps-ssp", "ps-async", "hogwild"),
}
REFERENCE = "all-reduce"
PACE = 0.04  # seconds: minimum compute time of a step, by sleeping
METHODS = (REFERENCE, *(method for methods in FAMILIES.values() for method in methods))
OVER_LINKS = tuple(method for method in METHODS if method not in UNSYNCHRONISED)
"""Methods whose ranks send data to each other."""
MARGINS = {
    REFERENCE: 0.0, "powersgd": 0.07, "topk": 0.31, "onebit": 0.54, "int8": 0.08, "local-sgd": 0.21, "diloco": 0.47,
    "diloco-int8": 0.46, "sgp": 0.18, "wagma": 0.24, "ps-bsp": 0.12, "ps-ssp": 0.11, "ps-async": 0.11, "hogwild": 0.14,
}
"""Nats by which the mean final loss may exceed the synchronous run's, at the default settings: the measured difference,
if it was positive, plus two standard deviations over the seeds (docs/relaxed.md)."""


class RelaxedBenchmark(Experiment):
    """Relaxed data parallelism under one straggler: loss against time; exit code 1 if a loss exceeds its margin."""

    only: str = ""
    """Comma-separated list of methods; all-reduce is always included."""

    steps: PositiveInt = 120
    """Steps of each run."""

    ranks: PositiveInt = 4
    """Replicas, each a rank of one thread."""

    straggler: PositiveFloat = 3.0
    """Compute time of the last rank's steps, as a multiple of the others'; 1 for no straggler."""

    link_gbs: NonNegativeFloat = 0.0
    """GB/s of a simulated network between the replicas (testing.link_gbs), without the methods that share memory; 0 for
    none."""

    def run(self, console: Console, notify: Notify) -> bool:
        possible = OVER_LINKS if self.link_gbs else METHODS
        wanted = choose_names(self.only, METHODS, "bench relaxed --only") if self.only else possible
        if impossible := [name for name in wanted if name not in possible]:
            raise UsageError(
                f"bench relaxed --only {impossible[0]} --link-gbs {self.link_gbs:g}: its replicas share memory and use "
                f"no network.\n  Remove one of the options, or choose from {', '.join(OVER_LINKS)}."
            )
        if self.ranks < 2 or self.straggler < 1:
            raise UsageError("bench relaxed: use --ranks of 2 or more, and a --straggler of 1 or more.")
        make_folder(self.out, "bench relaxed --out")
        runs = self.train([name for name in METHODS if name in wanted or name == REFERENCE], notify)
        summaries = experiment.compare(runs, REFERENCE)
        base = summaries[0].mean("seconds")
        setting = f"{self.ranks} replicas"
        if self.straggler > 1:
            setting += f", one {self.straggler:g} x slower"
        if self.link_gbs:
            setting += f", {1000 * self.link_gbs:g} MB/s between them"
        console.print(make_table(f"{self.steps} steps on {setting}", [
            {
                "sync": each.name, "validation loss": f"{each.loss:.3f}", "std": f"{each.spread:.3f}",
                "minus all-reduce's": f"{each.difference:+.3f}", "margin": f"{MARGINS[each.name]:.2f}",
                "seconds": f"{each.mean('seconds'):.1f}", "speedup": f"{base / each.mean('seconds'):.2f}",
            } for each in summaries
        ]))  # fmt: skip
        name = "relaxed-link" if self.link_gbs else "relaxed"
        picture = experiment.draw(
            f"Loss against time: {setting}", runs, FAMILIES, REFERENCE, lambda run: run.losses, x="seconds in steps",
            y="training loss, nats per token",
        )
        experiment.write_files(self.out, name, experiment.list_losses(runs, x="seconds"), picture)
        worse = [each.name for each in summaries if not each.difference <= MARGINS[each.name]]  # NaN too
        console.print(f"beyond their margin: {', '.join(worse)}" if worse else "all within their margins")
        return not worse

    def train(self, methods: Sequence[str], notify: Notify) -> list[TrainedRun]:
        """Train with each method and seed, one after the other."""
        runs = []
        with Pool(self.ranks, tune_process) as pool, tempfile.TemporaryDirectory(prefix="shoal-relaxed-") as scratch:
            for seed in range(self.seeds):
                for method in methods:
                    notify(f"{method}, seed {seed}")
                    config = self.configure(method, seed)
                    check(config)
                    prepare(config.data)
                    folder = new_run(config, Path(scratch, f"{method}-{seed}"))
                    pool.run(_train, self.ranks, plain(config), folder, timeout=TIME_LIMIT)
                    runs.append(_read(folder, method, seed, config))
        return runs

    def configure(self, method: str, seed: int) -> RunConfig:
        """Build the config of one run."""
        sync, relaxed = ("diloco", {"outer_int8": True}) if method == "diloco-int8" else (method, {})
        slow = f"{self.ranks - 1}={self.straggler:g}" if self.straggler > 1 else ""
        return build_run(
            {"layers": 2, "hidden": 64, "heads": 2, "ffn": 192}, seed=seed, steps=self.steps, micro_batch=2,
            learning_rate=5e-3, validation_sequences=128, changes={
                "parallel": {"dp": self.ranks, "sync": sync},
                "relaxed": relaxed,
                "data": {"sampler": "pool" if sync in POOLED else "even"},
                "train": {"global_batch": 2 * self.ranks, "validate_every": 0, "threads": 1},
                "testing": {"min_step_seconds": PACE, "straggler": slow, "link_gbs": self.link_gbs},
                "checkpoint": {"every": 0},
                "metrics": {"log_every": 10, "tensorboard": False},
            },
        )  # fmt: skip


def _train(values: dict[str, object], folder: Path) -> None:
    config = build_config(values)
    mesh = Mesh(config.parallel, dist.get_rank(), link=ThrottledLink.from_gbs(config.testing.link_gbs))
    samples = {s: open_dataset(config.data, seed=config.train.seed, split=s) for s in ("train", "validation")}
    trainer = trainer_class(config)(
        config, check(config), mesh, samples, folder, resume=False, local_ranks=dist.get_world_size()
    )
    trainer.display.console.quiet = True
    trainer.run()
    trainer.barrier()


def _read(folder: Path, method: str, seed: int, config: RunConfig) -> TrainedRun:
    """Read the losses of a run against the seconds spent in steps, without the time between steps."""
    records = read_metrics(folder)
    tokens = config.train.global_batch * config.data.sequence_length
    losses, seconds, before = [], 0.0, 0
    for record in records:
        seconds += (record.step - before) * tokens / record.tokens_per_second
        before = record.step
        losses.append((seconds, record.loss if record.loss is not None else math.nan))
    validation = records[-1].validation_loss
    assert validation is not None, "a run ends with a validation"
    return TrainedRun(method, seed, losses, [(seconds, validation)], {"seconds": seconds})
