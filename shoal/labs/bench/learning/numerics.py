"""Loss curves of every precision on the default corpus over several seeds, held against float32's.

A step here has 512 tokens, where a large model's has four million, and the loss is a mean over them: gradients there
are 2^13 times as small. One run has gradients of that size, to see what float16 makes of them without a scale.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.table import Table

from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import open_dataset
from shoal.engine.data.prepare import prepare
from shoal.engine.device import usable_cores
from shoal.labs.bench.race import deviation
from shoal.launch.forkserver import become_worker, worker_context
from shoal.report.panels import Panel, Points, panels, with_mean
from shoal.spec.config import RunConfig, build_config
from shoal.training.check import check
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite

REFERENCE, SMOOTH = "fp32", 10
LOST = "fp16, x 2^-13"
_SMALL = 2.0**-13  # 2^9 tokens over 2^22

Changes = dict[str, dict[str, Any]]
RUNS: dict[str, Changes] = {
    REFERENCE: {},
    "bf16": {"train": {"precision": "bf16"}},
    "bf16-sums": {"train": {"precision": "bf16-sums"}},
    "bf16-moments": {"train": {"precision": "bf16-moments"}},
    "bf16-weights": {"train": {"precision": "bf16-weights"}},
    "bf16-all": {"train": {"precision": "bf16-all"}},
    "fp16": {"train": {"precision": "fp16"}, "loss_scale": {"interval": 40}},
    "fp16-unscaled": {"train": {"precision": "fp16-unscaled"}},
    LOST: {"train": {"precision": "fp16"}, "loss_scale": {"initial": _SMALL, "growth": 1.0, "smallest": _SMALL}},
    "fp8": {"train": {"precision": "fp8"}},
    "fp8, delayed": {"train": {"precision": "fp8"}, "float8": {"amax": "delayed"}},
    "fp8, rows": {"train": {"precision": "fp8"}, "float8": {"scales": "row"}},
    "fp8, blocks": {"train": {"precision": "fp8"}, "float8": {"scales": "block"}},
    "mxfp8": {"train": {"precision": "mxfp8"}},
    "adam8bit": {"optimizer": {"name": "adam8bit"}},
}
FAMILIES = {
    "16 bits": ("bf16", "bf16-sums", "bf16-moments", "bf16-weights", "bf16-all", "fp16"),
    "float16 without a loss scale": ("fp16-unscaled", LOST),
    "8 bits in the layers' products": ("fp8", "fp8, delayed", "fp8, rows", "fp8, blocks", "mxfp8"),
    "8 bits in the optimizer's states": ("adam8bit",),
}
FAILS = (LOST,)
"""What is shown to fail."""
SHOWN = ("fp16-unscaled",)
"""What is shown and not judged: whether it fails is a matter of how large the gradients of a model are."""


@dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
        name, seed: which.
        losses: of each step [nats per token], up to where it ended.
        validation: at the end; NaN where it did not get there.
        skipped: steps, since a gradient overflowed.
    """

    name: str
    seed: int
    losses: tuple[float, ...]
    validation: float
    skipped: int

    def smooth(self) -> list[float]:
        """Means over the last `SMOOTH` steps."""
        return [mean(self.losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(self.losses))]


def config_of(name: str, seed: int, steps: int) -> RunConfig:
    """A run of the experiment: a small model on the default corpus, 512 tokens a step."""
    values: Changes = {
        "model": {"name": "tiny", "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 256},
        "parallel": {"micro_batch": 8},
        "data": {"sequence_length": 64},
        "train": {"steps": steps, "global_batch": 8, "seed": seed, "validation_sequences": 128, "device": "cpu"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20},
    }
    for section, changes in RUNS[name].items():
        values[section] = values.get(section, {}) | changes
    return build_config(values)


def measure(names: Sequence[str], seeds: int, steps: int, say: Callable[[str], None]) -> list[Curve]:
    """Train with each format and seed, as many at a time as there are cores."""
    jobs = [(name, seed) for seed in range(seeds) for name in names]
    prepare(config_of(REFERENCE, 0, steps).data)
    found = []
    with ProcessPoolExecutor(
        min(usable_cores(), len(jobs)), worker_context(), initializer=become_worker, initargs=(dict(os.environ),)
    ) as workers:
        configs = [plain(config_of(name, seed, steps)) for name, seed in jobs]
        try:
            for (name, seed), curve in zip(jobs, workers.map(_train, configs), strict=True):
                found.append(Curve(name, seed, *curve))
                say(f"{len(found)} of {len(jobs)}: {name}, seed {seed}")
        except BaseException:
            for process in list(workers._processes.values()):  # else their trainings would be waited for
                process.kill()
            raise
    return found


def _train(values: dict[str, Any]) -> tuple[tuple[float, ...], float, int]:
    """Losses of the steps, validation loss, skipped steps."""
    torch.set_num_threads(1)
    config = build_config(values)
    shape = check(config)
    samples = {s: open_dataset(config.data, seed=config.train.seed, split=s) for s in ("train", "validation")}
    engine = Engine(config, shape, Mesh(config.parallel, 0), samples["train"])
    losses: list[float] = []
    skipped = 0
    try:
        for step in range(config.train.steps):
            result = engine.step(step)
            losses.append(result.loss)
            skipped += result.skipped
    except NonFinite:
        return tuple(losses), float("nan"), skipped
    return tuple(losses), engine.evaluate(samples["validation"]), skipped


# ---- what is shown -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FormatResult:
    """One format over all seeds.

    Attributes:
        validation, spread: mean and standard deviation of the loss at the end.
        difference: of the mean from float32's.
        apart: the most that the smoothed training losses of one seed are apart from float32's, in the second half.
        skipped: steps, in all runs.
    """

    name: str
    validation: float
    spread: float
    difference: float
    apart: float
    skipped: int

    def within(self, band: float) -> bool:
        """Whether both differences are."""
        return abs(self.difference) <= band and self.apart <= band


def rows(curves: Sequence[Curve]) -> list[FormatResult]:
    """One for each format, in order."""
    base = {curve.seed: curve for curve in curves if curve.name == REFERENCE}
    found = []
    for name in dict.fromkeys(curve.name for curve in curves):
        mine = [curve for curve in curves if curve.name == name]
        losses = [curve.validation for curve in mine]
        apart = max(_apart(curve, base[curve.seed]) for curve in mine)
        found.append(FormatResult(
            name, mean(losses), deviation(losses),
            mean(losses) - mean(curve.validation for curve in base.values()), apart, sum(c.skipped for c in mine),
        ))
    return found


def _apart(curve: Curve, base: Curve) -> float:
    if len(curve.losses) < len(base.losses):
        return float("inf")
    half = len(base.losses) // 2
    return max(abs(a - b) for a, b in zip(curve.smooth()[half:], base.smooth()[half:], strict=True))


def wrong(table: Sequence[FormatResult], band: float) -> list[str]:
    """What is not as stated: beyond the band, or inside it where it should fail."""
    return [row.name for row in table if row.name not in SHOWN and row.within(band) == (row.name in FAILS)]


def write_csv(curves: Sequence[Curve], out: Path) -> None:
    """Every step of every run."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("format", "seed", "step", "training_loss", "validation_loss"))
        for curve in curves:
            for i, loss in enumerate(curve.losses):
                last = f"{curve.validation:.4f}" if i + 1 == len(curve.losses) else ""
                writer.writerow((curve.name, curve.seed, i + 1, f"{loss:.4f}", last))


def draw(curves: Sequence[Curve], title: str) -> str:
    """Loss against steps as an SVG: a panel for each family, with float32 in each."""
    measured = {curve.name for curve in curves}
    charts = [
        Panel(
            family, {n: _lines([c for c in curves if c.name == n]) for n in (REFERENCE, *names) if n in measured},
            frozenset({REFERENCE}),
        )
        for family, names in FAMILIES.items() if measured.intersection(names)
    ]
    return panels(title, charts, x="steps", y="training loss, nats per token, mean of 10 steps (thin: each seed)")


def _lines(curves: Sequence[Curve]) -> list[Points]:
    """The mean over the seeds, then each seed."""
    return with_mean([list(enumerate(curve.smooth(), 1)) for curve in curves])


def table(found: Sequence[FormatResult], band: float, *, steps: int, seeds: int) -> Table:
    """A row for each format."""
    view = Table(title=f"{steps} steps, {seeds} seeds, nats per token")
    view.add_column("")
    for column in ("validation loss", "std", "from float32's", "most apart, training", "skipped steps", ""):
        view.add_column(column, justify="right")
    for row in found:
        verdict = "within" if row.within(band) else "beyond"
        view.add_row(
            row.name, f"{row.validation:.4f}", f"{row.spread:.4f}", f"{row.difference:+.4f}", f"{row.apart:.4f}",
            str(row.skipped or ""), verdict + " (as it should)" * (row.name in FAILS and verdict == "beyond")
            + " (not judged)" * (row.name in SHOWN),
        )
    return view
