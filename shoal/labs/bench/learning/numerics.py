"""Loss curves of every precision on the default corpus over several seeds, compared with float32's.

A step here has 512 tokens. A large model's has four million, and gradients of the mean loss are 2^13 times as small.
One run scales its gradients to that size, to show what float16 does to them without loss scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console

from shoal.labs.bench.benchmark import Notify, choose_names, make_folder, make_table
from shoal.labs.bench.learning import experiment
from shoal.labs.bench.learning.experiment import Changes, Experiment, LossSummary, TrainedRun, build_run
from shoal.report.charts import Points
from shoal.spec.config import RunConfig

REFERENCE, SMOOTH = "fp32", 10
LOST = "fp16, x 2^-13"
_SMALL = 2.0**-13  # 2^9 tokens over 2^22

BFLOAT16 = ("bf16", "bf16-sums", "bf16-moments", "bf16-weights", "bf16-all")
RUNS: dict[str, Changes] = {
    REFERENCE: {},
    **{name: {"train": {"precision": name}} for name in BFLOAT16},
    "fp16": {"train": {"precision": "fp16"}, "loss_scale": {"interval": 40}},
    "fp16-unscaled": {"train": {"precision": "fp16-unscaled"}},
    LOST: {"train": {"precision": "fp16"}, "loss_scale": {"initial": _SMALL, "growth": 1.0, "smallest": _SMALL}},
    "fp8": {"train": {"precision": "fp8"}},
    "fp8, delayed": {"train": {"precision": "fp8"}, "float8": {"amax": "delayed"}},
    "fp8, rows": {"train": {"precision": "fp8"}, "float8": {"scales": "row"}},
    "fp8, blocks": {"train": {"precision": "fp8"}, "float8": {"scales": "block"}},
    "mxfp8": {"train": {"precision": "mxfp8"}},
    "nvfp4": {"train": {"precision": "nvfp4"}},
    "adam8bit": {"optimizer": {"name": "adam8bit"}},
}
FAMILIES = {
    "16 bits": (*BFLOAT16, "fp16"),
    "float16 without a loss scale": ("fp16-unscaled", LOST),
    "8 bits in the layers' products": ("fp8", "fp8, delayed", "fp8, rows", "fp8, blocks", "mxfp8"),
    "4 bits in the layers' products": ("nvfp4",),
    "8 bits in the optimizer's states": ("adam8bit",),
}
FAILS = (LOST,)  # runs that are expected to fail
SHOWN = ("fp16-unscaled",)
"""Runs that are shown and not judged: whether they fail depends on the size of a model's gradients."""


class NumericsBenchmark(Experiment):
    """Loss curves of every precision against float32's; exit code 1 if one is outside the band, or a run that should
    fail is inside."""

    only: str = ""
    """Semicolon-separated list of runs, such as "fp8; mxfp8"; fp32 is always included."""

    steps: PositiveInt = 150
    """Steps of each run, of 512 tokens."""

    band: PositiveFloat = 0.1
    """Largest distance from float32, in nats per token, of the mean validation loss and of any seed's smoothed training
    loss in the second half."""

    def run(self, console: Console, notify: Notify) -> bool:
        wanted = choose_names(self.only, RUNS, "bench numerics --only", ";")
        make_folder(self.out, "bench numerics --out")
        names = [name for name in RUNS if name in wanted or name == REFERENCE]
        runs = experiment.train_all(names, self.seeds, lambda name, seed: configure(name, seed, self.steps), notify)
        summaries, distances = experiment.compare(runs, REFERENCE), max_distances(runs)
        unexpected = find_unexpected(summaries, distances, self.band)
        console.print(make_table(f"{self.steps} steps, {self.seeds} seeds, nats per token", [
            {
                "": each.name, "validation loss": f"{each.loss:.4f}", "std": f"{each.spread:.4f}",
                "minus float32's": f"{each.difference:+.4f}", "max distance, training": f"{distances[each.name]:.4f}",
                "skipped steps": sum(run.facts["skipped"] for run in each.runs) or None,
                "band": ("inside" if is_within(each, distances, self.band) else "outside")
                + " (should be outside)" * (each.name in FAILS) + " (not judged)" * (each.name in SHOWN),
            } for each in summaries
        ]))  # fmt: skip
        title = f"Number formats: {self.steps} steps of 512 tokens, {self.seeds} seeds"
        y = "training loss, nats per token, mean of 10 steps"
        picture = experiment.draw(title, runs, FAMILIES, REFERENCE, smooth, x="steps", y=y)
        experiment.write_files(self.out, "numerics", experiment.list_losses(runs), picture)
        console.print(f"unexpected: {'; '.join(unexpected)}" if unexpected else "all as expected")
        return not unexpected


def configure(name: str, seed: int, steps: int) -> RunConfig:
    """Build the config of one run: a small model, 512 tokens a step."""
    model = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 256}
    return build_run(
        model, seed=seed, steps=steps, micro_batch=8, learning_rate=3e-3, validation_sequences=128, changes=RUNS[name]
    )


def smooth(run: TrainedRun) -> Points:
    """Return the mean training loss over the last `SMOOTH` steps, at each step."""
    losses = [loss for _, loss in run.losses]
    return [(i + 1, mean(losses[max(0, i - SMOOTH + 1) : i + 1])) for i in range(len(losses))]


def max_distances(runs: Sequence[TrainedRun]) -> dict[str, float]:
    """Return, by format, the largest distance of a seed's smoothed losses from float32's in the second half; infinite
    if a run ended before the last step."""
    curves = {(run.name, run.seed): [loss for _, loss in smooth(run)] for run in runs}
    found = dict.fromkeys((run.name for run in runs), 0.0)
    for (name, seed), curve in curves.items():
        base = curves[REFERENCE, seed]
        pairs = list(zip(curve, base, strict=False))[len(base) // 2 :]
        distance = max(abs(a - b) for a, b in pairs) if len(curve) == len(base) else math.inf
        found[name] = max(found[name], distance)
    return found


def is_within(format: LossSummary, distances: Mapping[str, float], band: float) -> bool:
    """Return whether the final loss and the training losses of a format are inside the band around float32's."""
    return abs(format.difference) <= band and distances[format.name] <= band


def find_unexpected(summaries: Sequence[LossSummary], distances: Mapping[str, float], band: float) -> list[str]:
    """Return the judged runs that are outside the band, or inside it although they should fail."""
    return [each.name for each in summaries
            if each.name not in SHOWN and is_within(each, distances, band) == (each.name in FAILS)]
