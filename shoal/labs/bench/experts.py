"""Experts as one grouped computation against a loop; and Switch against dense models with equal FLOPs per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from rich.console import Console
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.base.options import reject_unused
from shoal.base.section import NonEmpty
from shoal.engine.device import tune_process
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import RoutingContext
from shoal.labs.bench.benchmark import Benchmark, Notify, Row, all_met, make_folder, make_table
from shoal.labs.bench.learning import experiment
from shoal.labs.bench.learning.experiment import VALIDATION, TrainedRun, build_run
from shoal.labs.bench.race import quartiles, time_in_turns
from shoal.report.charts import Points
from shoal.spec.catalog import Experts, model_shape
from shoal.spec.config import RunConfig

PER_TOKEN = 2  # experts of a token
TARGETS = {8: 1.0, 64: 1.5}
"""Speed of the grouped experts that is required, as a multiple of the loop's, by number of experts."""


class ExpertsBenchmark(Benchmark):
    """Experts as one grouped computation against a loop; --learning: Switch against dense, loss against steps."""

    experts: NonEmpty[PositiveInt] = (8, 64)
    """Experts of the layer (with --learning the first value is used)."""

    tokens: PositiveInt = 1024
    """Number of tokens."""

    hidden: PositiveInt = 256
    """Width of the residual stream."""

    width: PositiveInt = 4096
    """Total width of a layer's experts: more experts are narrower ones (Dai et al. 2024, "DeepSeekMoE")."""

    repeats: PositiveInt = 15
    """Measurements of each, in turns; medians count."""

    learning: bool = False
    """Instead train a dense model and a Switch model with the same FLOPs per token; exit code 1 if Switch does not
    reach the dense model's loss in fewer steps."""

    seeds: PositiveInt = 3
    """learning: runs of each, with seeds from 0."""

    steps: PositiveInt = 1200
    """learning: steps of each run."""

    shape: tuple[PositiveInt, PositiveInt, PositiveInt] = (2, 32, 32)
    """learning: layers, width, and width of the dense block and of an expert. The default is small for the number of
    steps, because experts pay off in a model with few weights that has seen enough tokens."""

    out: Path | None = None
    """learning: folder for switch.csv and switch.svg."""

    def run(self, console: Console, notify: Notify) -> bool:
        if self.learning:
            reject_unused(self, ("tokens", "hidden", "width", "repeats"),
                          "it configures the measurement that --learning replaces")
            return self.compare_learning(console, notify)
        reject_unused(self, ("seeds", "steps", "shape", "out"), "it needs --learning")
        if min(self.experts) < PER_TOKEN:
            raise UsageError(f"bench experts --experts {min(self.experts)}: a token goes to {PER_TOKEN} of them.")
        if uneven := [count for count in self.experts if self.width % count]:
            raise UsageError(f"bench experts --width {self.width} is not a multiple of --experts {uneven[0]}.")
        tune_process()  # for both, as in training
        timings = [self.measure(count) for count in self.experts]
        title = f"{self.tokens} tokens, k {PER_TOKEN}, h {self.hidden}, fp32"
        console.print(make_table(title, timings))
        return all_met(timings)

    def measure(self, count: int) -> Row:
        """Time a forward and backward of both in turns, router included, on the same weights and tokens. The difference
        is the largest of outputs and gradients, relative to the largest of each."""
        shape = model_shape("tiny").model_copy(update={
            "hidden": self.hidden, "experts": Experts(count=count, per_token=PER_TOKEN, ffn=self.width // count),
        })
        generator = torch.Generator().manual_seed(0)
        layer = MoE(shape, 0)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        x, gradient = (torch.randn(1, self.tokens, self.hidden, generator=generator) for _ in range(2))  # [1, s, h]
        x.requires_grad_()
        experts = layer.experts
        assert experts.gate is not None, "the experts of the llama family are gated"
        loop = [[w.detach().clone().requires_grad_() for w in matrices]
                for matrices in zip(experts.gate, experts.up, experts.down, strict=True)]
        weights = {"grouped": [experts.gate, experts.up, experts.down], "loop": [w for each in loop for w in each]}
        forward: dict[str, Callable[[], Tensor]] = {
            "grouped": lambda: layer(x, RoutingContext()), "loop": lambda: loop_over_experts(layer, x, loop),
        }
        results: dict[str, tuple[Tensor, ...]] = {}

        def step(kind: str) -> None:
            y = forward[kind]()
            results[kind] = (y.detach(), *torch.autograd.grad(y, [x, layer.router.weight, *weights[kind]], gradient))

        seconds = time_in_turns({kind: partial(step, kind) for kind in forward}, self.repeats, warmup=2)
        stacked = [*results["loop"][:3], *(torch.stack(results["loop"][3 + part :: 3]) for part in range(3))]
        difference = max(float((a - b).abs().max() / b.abs().max())
                         for a, b in zip(results["grouped"], stacked, strict=True))
        ratios = [slow / fast for fast, slow in zip(seconds["grouped"], seconds["loop"], strict=True)]
        target = TARGETS.get(count)
        return {
            "experts": count, "width": self.width // count, "loop ms": 1e3 * median(seconds["loop"]),
            "grouped ms": 1e3 * median(seconds["grouped"]), "loop / grouped": median(ratios),
            "quartiles": "{:.2f}-{:.2f}".format(*quartiles(ratios)), "target": target, "difference": difference,
            "met": None if target is None else median(ratios) >= target,
        }

    def compare_learning(self, console: Console, notify: Notify) -> bool:
        """Train both models with each seed, and print the steps that Switch takes to the dense model's final loss;
        return whether it takes fewer with every seed."""
        layers, hidden, _ = self.shape
        if layers < 2 or hidden % 8:
            raise UsageError(
                f"bench experts --shape {layers} {hidden} ..: every other layer has experts, and a layer has 4 heads "
                "of an even width.\n  Use 2 layers or more, and a width that is a multiple of 8."
            )
        make_folder(self.out, "bench experts --out")
        runs = experiment.train_all(("dense", "switch"), self.seeds, self.configure, notify, validations=20)
        for kind in experiment.compare(runs, "dense"):
            parameters, flops = kind.mean("parameters"), kind.mean("flops_per_token")
            console.print(
                f"{kind.name:<7} {parameters:,.0f} parameters, {flops:,.0f} FLOPs per token, validation loss after "
                f"{self.steps} steps {kind.loss:.3f}, dropped {kind.mean('dropped'):.1%}"
            )
        rows = steps_to_dense(runs)
        console.print(make_table("steps of Switch to the dense model's final loss", [
            {"seed": seed, "dense model's loss": end, f"steps, of {self.steps}": needed, "speedup": self.steps / needed}
            for seed, end, needed in rows
        ]))  # fmt: skip
        title = f"Switch ({self.experts[0]} experts) against dense, {self.seeds} seeds"
        picture = experiment.draw(
            title, runs, {"equal FLOPs per token": ("switch",)}, "dense", lambda run: run.validations, x="steps",
            y=VALIDATION,
        )
        experiment.write_files(self.out, "switch", experiment.list_losses(runs), picture)
        return all(needed < self.steps for _, _, needed in rows)

    def configure(self, kind: str, seed: int) -> RunConfig:
        """Build the config of one run. An expert is as wide as the dense block, so that a token uses equally many
        weights."""
        layers, hidden, ffn = self.shape
        model: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": 4, "ffn": ffn}
        if kind == "switch":
            model["experts"] = {"count": self.experts[0], "every": 2, "gate": "switch", "balance_loss": 0.01}
        return build_run(model, seed=seed, steps=self.steps, micro_batch=16, learning_rate=4e-3)


def loop_over_experts(layer: MoE, x: Tensor, matrices: Sequence[Sequence[Tensor]]) -> Tensor:
    """Compute the layer by a plain loop: for each expert, select its tokens, compute them, add them to the result."""
    weights, chosen = layer.router(x, RoutingContext())
    flat, rows = weights[0], x[0]
    out = torch.zeros_like(rows)
    for e, (gate, up, down) in enumerate(matrices):
        token = chosen[0, :, e].nonzero().squeeze(1)
        selected = rows[token]
        y = F.linear(F.silu(F.linear(selected, gate)) * F.linear(selected, up), down)
        out.index_add_(0, token, y * flat[token, e].to(y.dtype).unsqueeze(-1))
    return out.unsqueeze(0)


def steps_to_dense(runs: Sequence[TrainedRun]) -> list[tuple[int, float, float]]:
    """Return for each seed (seed, the dense model's final loss, Switch's steps to that loss)."""
    losses = {run.seed: run.final_loss for run in runs if run.name == "dense"}
    return [
        (run.seed, losses[run.seed], _interpolate(losses[run.seed], run.validations))
        for run in runs if run.name == "switch"
    ]  # fmt: skip


def _interpolate(loss: float, points: Points) -> float:
    """Return the x at which a curve first reaches a loss, linear between points; infinite if it never does."""
    for (before, high), (after, low) in pairwise(points):
        if low <= loss:
            return before + (after - before) * max(0.0, (high - loss) / (high - low))
    return float("inf")
