"""Loss curves of every precision on the default corpus over several seeds, held against float32's.

A step here has 512 tokens, where a large model's has four million, and the loss is a mean over them: gradients there
are 2^13 times as small. One run has gradients of that size, to see what float16 makes of them without a scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console

from shoal.labs.bench.benchmark import Benchmark, Say, check_folder, choose_names, make_table
from shoal.labs.bench.learning.experiment import LossSummary, TrainedRun, compare, draw, records, train_all, write_files
from shoal.report.charts import Points
from shoal.spec.config import RunConfig, build_config

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


class NumericsBenchmark(Benchmark):
    """Loss curves of every precision against float32's; exit code 1 if one is beyond the band, or the one that should
    fail does not."""

    only: str = ""
    """Some of the runs, with semicolons, as in "fp8; mxfp8"; fp32 is always among them."""

    seeds: PositiveInt = 3
    """Runs of each, with seeds from 0."""

    steps: PositiveInt = 150
    """Steps of each run, of 512 tokens."""

    band: PositiveFloat = 0.1
    """Nats per token that the mean validation loss, and the smoothed training loss of any seed in the second half, may
    be from float32's."""

    out: Path | None = None
    """A folder for numerics.csv and numerics.svg."""

    def run(self, console: Console, say: Say) -> bool:
        """Train with every format, and compare."""
        wanted = choose_names(self.only, RUNS, "bench numerics --only", ";")
        check_folder(self.out, "bench numerics --out")
        names = [name for name in RUNS if name in wanted or name == REFERENCE]
        runs = train_all(names, self.seeds, lambda name, seed: config_of(name, seed, self.steps), say)
        found, apart = compare(runs, REFERENCE), distances(runs)
        console.print(make_table(f"{self.steps} steps, {self.seeds} seeds, nats per token", [
            {
                "": each.name, "validation loss": f"{each.loss:.4f}", "std": f"{each.spread:.4f}",
                "from float32's": f"{each.difference:+.4f}", "most apart, training": f"{apart[each.name]:.4f}",
                "skipped steps": sum(run.facts["skipped"] for run in each.runs) or None,
                "band": ("within" if within(each, apart, self.band) else "beyond")
                + " (should be beyond)" * (each.name in FAILS) + " (not judged)" * (each.name in SHOWN),
            } for each in found
        ]))  # fmt: skip
        title = f"Number formats: {self.steps} steps of 512 tokens, {self.seeds} seeds"
        write_files(self.out, "numerics", records(runs, "format"), draw_formats(runs, title))
        bad = wrong(found, apart, self.band)
        console.print(
            f"not as stated: {'; '.join(bad)}" if bad else f"all within {self.band:g} nats of float32, and what should "
            "fail does"
        )
        return not bad


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


def smooth(run: TrainedRun) -> Points:
    """Means of the training loss over the last `SMOOTH` steps."""
    losses = [loss for _, loss in run.losses]
    return [(i + 1, mean(losses[max(0, i - SMOOTH + 1) : i + 1])) for i in range(len(losses))]


def distances(runs: Sequence[TrainedRun]) -> dict[str, float]:
    """By format, the most that the smoothed losses of one seed are apart from float32's in the second half; infinite
    where a run ended before the last step."""
    curves = {(run.name, run.seed): [loss for _, loss in smooth(run)] for run in runs}
    found = dict.fromkeys((run.name for run in runs), 0.0)
    for (name, seed), curve in curves.items():
        base = curves[REFERENCE, seed]
        pairs = list(zip(curve, base, strict=False))[len(base) // 2 :]
        apart = max(abs(a - b) for a, b in pairs) if len(curve) == len(base) else math.inf
        found[name] = max(found[name], apart)
    return found


def within(format: LossSummary, apart: Mapping[str, float], band: float) -> bool:
    """Whether a format's loss at the end and its training losses are no further from float32's than the band."""
    return abs(format.difference) <= band and apart[format.name] <= band


def wrong(found: Sequence[LossSummary], apart: Mapping[str, float], band: float) -> list[str]:
    """What is not as stated: beyond the band, or inside it where it should fail."""
    return [each.name for each in found
            if each.name not in SHOWN and within(each, apart, band) == (each.name in FAILS)]


def draw_formats(runs: Sequence[TrainedRun], title: str) -> str:
    """Loss against steps as an SVG: a panel for each family, with float32 in each."""
    return draw(title, runs, FAMILIES, (REFERENCE,), smooth, x="steps",
                y="training loss, nats per token, mean of 10 steps")
