"""Every method of the relaxed family on the same data, under one straggler: loss against time, over several seeds.

The ranks share this machine's cores, so each step's computing is stretched to a minimum by sleeping
(``testing.min_step_seconds``), and the straggler's to a multiple of it: this compares how long the others wait. With
a simulated network (``testing.link_gbs``) it compares how long the exchange takes, for the methods that send something.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.throttle import ThrottledLink
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.data.batches import open_dataset
from shoal.engine.data.prepare import prepare
from shoal.labs.bench.benchmark import Benchmark, Say, check_folder, choose_names, make_table
from shoal.labs.bench.learning.experiment import TrainedRun, compare, draw, records, write_files
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig, build_config
from shoal.spec.sync_methods import POOLED, UNSYNCHRONISED
from shoal.training.async_dp.trainers import trainer_class
from shoal.training.check import check
from shoal.training.fault_knobs import FaultKnobs
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


class RelaxedBenchmark(Benchmark):
    """Relaxed data parallelism under one straggler: loss against time; exit code 1 if a loss is beyond its margin."""

    only: str = ""
    """Some of the methods, with commas; all-reduce is always among them."""

    seeds: PositiveInt = 3
    """Runs of each, with seeds from 0."""

    steps: PositiveInt = 120
    """Steps of each run."""

    ranks: PositiveInt = 4
    """Replicas, each a rank of one thread."""

    pace: NonNegativeFloat = 0.04
    """Seconds that a step's computing takes at least, by sleeping."""

    straggler: PositiveFloat = 3.0
    """How many times as long it takes the last rank; 1 for none."""

    link_gbs: NonNegativeFloat = 0.0
    """GB/s of a simulated network between the replicas (testing.link_gbs); what shares memory is left out. 0 for
    none."""

    margin: NonNegativeFloat = 0.0
    """Nats per token that any method's mean validation loss may be above that of all-reduce; 0 takes each method's own,
    which is of the default steps, ranks and straggler."""

    out: Path | None = None
    """A folder for relaxed.csv and relaxed.svg; with a network, relaxed-link.csv and relaxed-link.svg."""

    def run(self, console: Console, say: Say) -> bool:
        """Train with every method, and compare."""
        possible = OVER_LINKS if self.link_gbs else METHODS
        wanted = choose_names(self.only, METHODS, "bench relaxed --only") if self.only else possible
        if impossible := [name for name in wanted if name not in possible]:
            raise UsageError(
                f"bench relaxed --only {impossible[0]} --link-gbs {self.link_gbs:g}: its replicas share memory, over "
                f"which no network can lie.\n  Leave one of them out, or take some of {', '.join(OVER_LINKS)}."
            )
        if self.ranks < 2 or self.straggler < 1:
            raise UsageError("bench relaxed: give --ranks of 2 or more, and a --straggler of 1 or more.")
        check_folder(self.out, "bench relaxed --out")
        runs = self.train([name for name in METHODS if name in wanted or name == REFERENCE], say)
        rows = compare(runs, REFERENCE)
        margins = {row.name: self.margin or MARGINS[row.name] for row in rows}
        base = rows[0].mean("seconds")
        setting = f"{self.ranks} replicas"
        if self.straggler > 1:
            setting += f", one {self.straggler:g} x slower"
        if self.link_gbs:
            setting += f", {1000 * self.link_gbs:g} MB/s between them"
        console.print(make_table(f"{self.steps} steps on {setting}", [
            {
                "sync": row.name, "validation loss": f"{row.loss:.3f}", "std": f"{row.spread:.3f}",
                "against all-reduce": f"{row.difference:+.3f}", "margin": f"{margins[row.name]:.2f}",
                "seconds": f"{row.mean('seconds'):.1f}", "all-reduce's / these": f"{base / row.mean('seconds'):.2f}",
            } for row in rows
        ]))  # fmt: skip
        name = "relaxed-link" if self.link_gbs else "relaxed"
        lines = records(runs, "method", x="seconds")
        write_files(self.out, name, lines, draw_methods(runs, f"Loss against time: {setting}"))
        far = [row.name for row in rows if not row.difference <= margins[row.name]]  # also one that is not a number
        console.print(f"beyond their margin: {', '.join(far)}" if far else "all within their margins")
        return not far

    def train(self, methods: Sequence[str], say: Say) -> list[TrainedRun]:
        """Train with each seed and method in turn."""
        runs = []
        slow = f"{self.ranks - 1}={self.straggler:g}" if self.straggler > 1 else ""
        with Pool(self.ranks, tune_process) as pool, tempfile.TemporaryDirectory(prefix="shoal-relaxed-") as scratch:
            for seed in range(self.seeds):
                for method in methods:
                    say(f"{method}, seed {seed}")
                    config = config_of(
                        method, seed, ranks=self.ranks, steps=self.steps, pace=self.pace, straggler=slow,
                        link_gbs=self.link_gbs,
                    )
                    shape = check(config)
                    prepare(config.data)
                    folder = new_run(config, Path(scratch, f"{method}-{seed}"))
                    limit = seconds_at_most(config, shape.parameters())
                    pool.run(_train, self.ranks, plain(config), folder, timeout=limit)
                    runs.append(_read(folder, method, seed, config))
        return runs


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
            "threads": 1, "device": "cpu",
        },
        "testing": {"min_step_seconds": pace, "straggler": straggler, "link_gbs": link_gbs},
        "optimizer": {"learning_rate": 5e-3, "warmup_steps": 20},
        "checkpoint": {"every": 0},
        "metrics": {"log_every": 10, "tensorboard": False},
    }
    return build_config(values)


def seconds_at_most(config: RunConfig, parameters: int) -> float:
    """What a run that does not hang takes: ten times its steps as slow as they are asked to be, of a tenth of a second
    at least, since ranks may share a core."""
    testing = config.testing
    slowest = max([1.0, *FaultKnobs.read(testing, config.parallel.dp).factors.values()])
    exchange = 2 * 4 * parameters / (1e9 * testing.link_gbs) if testing.link_gbs else 0.0  # fp32 gradients, all-reduced
    return 600.0 + 10 * config.train.steps * (max(testing.min_step_seconds, 0.1) * slowest + exchange)


def _train(values: dict[str, Any], folder: Path) -> None:
    config = build_config(values)
    mesh = Mesh(config.parallel, dist.get_rank(), link=ThrottledLink.of(config.testing.link_gbs))
    samples = {s: open_dataset(config.data, seed=config.train.seed, split=s) for s in ("train", "validation")}
    trainer = trainer_class(config)(
        config, check(config), mesh, samples, folder, resume=False, local_ranks=dist.get_world_size()
    )
    trainer.display.console.quiet = True
    trainer.run()
    trainer.barrier()


def _read(folder: Path, method: str, seed: int, config: RunConfig) -> TrainedRun:
    """The losses over the seconds in steps, without those between steps."""
    records = read_metrics(folder)
    tokens = config.train.global_batch * config.data.sequence_length
    losses, seconds, before = [], 0.0, 0
    for record in records:
        seconds += (record.step - before) * tokens / record.tokens_per_second
        before = record.step
        losses.append((seconds, record.loss))
    validation = records[-1].validation_loss
    assert validation is not None, "a run ends with a validation"
    return TrainedRun(method, seed, losses, [(seconds, validation)], {"seconds": seconds})


def draw_methods(runs: Sequence[TrainedRun], title: str) -> str:
    """Loss against time as an SVG: a panel for each family, with the synchronous run in each."""
    highest = max((run.losses[1][1] for run in runs if len(run.losses) > 1), default=None)
    return draw(title, runs, FAMILIES, (REFERENCE,), lambda run: run.losses, x="seconds in steps",
                y="training loss, nats per token", highest=highest)
