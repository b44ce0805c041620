"""The experts of one layer, forward and backward, as one grouped computation against a plain loop over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from rich.console import Console
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.base.options import reject_unused
from shoal.base.section import NonEmpty
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import pick_device
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import RoutingContext
from shoal.labs.bench.benchmark import Benchmark, Row, Say, all_met, make_table
from shoal.labs.bench.learning import switch
from shoal.labs.bench.race import quartiles, time_in_turns
from shoal.labs.bench.step.workload import DTYPES
from shoal.spec.catalog import Experts, model_shape

KINDS = ("grouped", "loop")

TARGETS = {8: 1.0, 64: 1.5}
"""How many times as fast as the loop the grouped experts are at least, on CPU, by experts of a layer."""


class ExpertsBenchmark(Benchmark):
    """Experts as one grouped computation against a loop; --learning: Switch against dense, loss against steps."""

    experts: NonEmpty[PositiveInt] = (8, 64)
    """Experts of the layer (with --learning the first counts)."""

    per_token: PositiveInt = 2
    """Experts of a token."""

    tokens: PositiveInt = 1024
    """Tokens."""

    hidden: PositiveInt = 256
    """Width of the residual stream."""

    width: PositiveInt = 4096
    """Width of all experts of a layer together: more of them are finer ones (Dai et al. 2024, "DeepSeekMoE")."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32 or bf16."""

    repeats: PositiveInt = 15
    """Measurements of each, in turn; medians count."""

    device: str = "auto"
    """auto, cpu or cuda."""

    learning: bool = False
    """Train a dense model and a Switch model with the same FLOPs per token instead; exit code 1 if Switch does not
    reach the dense model's loss in fewer steps."""

    seeds: PositiveInt = 3
    """learning: runs of each, with seeds from 0."""

    steps: PositiveInt = 1200
    """learning: steps of each run."""

    shape: tuple[PositiveInt, PositiveInt, PositiveInt] = switch.SHAPE
    """learning: layers, width, and width of the dense block and of an expert."""

    out: Path | None = None
    """learning: a folder for switch.csv and switch.svg."""

    def run(self, console: Console, say: Say) -> bool:
        """Time layers of each number of experts, or train the models of `switch`."""
        if self.learning:
            reject_unused(self, ("per_token", "tokens", "hidden", "width", "precision", "repeats", "device"),
                          "of the measurement, in whose place --learning trains")
            return switch.run(
                console, say, experts=self.experts[0], seeds=self.seeds, steps=self.steps, shape=self.shape,
                out=self.out,
            )
        reject_unused(self, ("seeds", "steps", "shape", "out"), "of --learning, which is not given")
        device = pick_device(self.device)
        if self.per_token > min(self.experts):
            raise UsageError(f"bench experts --per-token {self.per_token}: more than --experts {min(self.experts)}.")
        if uneven := [count for count in self.experts if self.width % count]:
            raise UsageError(f"bench experts --width {self.width} is not a multiple of --experts {uneven[0]}.")
        tune_process()  # as training does, for both
        timings = [self.measure(count, device) for count in self.experts]
        title = f"{self.tokens} tokens, k {self.per_token}, h {self.hidden}, {self.precision} on {device.type}"
        console.print(make_table(title, timings))
        return all_met(timings)

    def measure(self, count: int, device: torch.device) -> Row:
        """Time both in turn on the same weights and tokens.

        Returns:
            Median times of a forward and backward, router included; the median of the turns' ratios; and the largest
            difference of outputs and gradients, relative to the largest of each.
        """
        experts = Experts(count=count, per_token=self.per_token, ffn=self.width // count)
        shape = model_shape("tiny").model_copy(update={"hidden": self.hidden, "experts": experts})
        generator = torch.Generator().manual_seed(0)
        layer = MoE(shape, 0)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        layer.to(device, DTYPES[self.precision])
        x, gradient = (torch.randn(1, self.tokens, self.hidden, generator=generator).to(device, DTYPES[self.precision])
                       for _ in range(2))  # [1, s, h]
        x.requires_grad_()
        held = layer.experts
        assert held.gate is not None, "the experts of the llama family are gated"
        loop = [[w.detach().clone().requires_grad_() for w in matrices]
                for matrices in zip(held.gate, held.up, held.down, strict=True)]
        weights = {"grouped": [held.gate, held.up, held.down], "loop": [w for matrices in loop for w in matrices]}
        forward: dict[str, Callable[[], Tensor]] = {
            "grouped": lambda: layer(x, RoutingContext()), "loop": lambda: looped(layer, x, loop),
        }
        results: dict[str, tuple[Tensor, ...]] = {}

        def step(kind: str) -> None:
            y = forward[kind]()
            results[kind] = (y.detach(), *torch.autograd.grad(y, [x, layer.router.weight, *weights[kind]], gradient))

        seconds = time_in_turns(
            {kind: partial(step, kind) for kind in KINDS}, self.repeats, warmup=2, device=device
        )
        stacked = [*results["loop"][:3], *(torch.stack(results["loop"][3 + part :: 3]) for part in range(3))]
        difference = max(float((a - b).abs().max() / b.abs().max())
                         for a, b in zip(results["grouped"], stacked, strict=True))
        ratios = [slow / fast for fast, slow in zip(seconds["grouped"], seconds["loop"], strict=True)]
        target = TARGETS.get(count) if device.type == "cpu" else None
        return {
            "experts": count, "width": self.width // count, "loop ms": 1e3 * median(seconds["loop"]),
            "grouped ms": 1e3 * median(seconds["grouped"]), "loop / grouped": median(ratios),
            "quartiles": "{:.2f}-{:.2f}".format(*quartiles(ratios)), "target": target, "difference": difference,
            "met": None if target is None else median(ratios) >= target,
        }


def looped(layer: MoE, x: Tensor, matrices: Sequence[Sequence[Tensor]]) -> Tensor:
    """What is written first: for each expert, pick its tokens, compute them, add them to the result."""
    weights, chosen = layer.router(x, RoutingContext())
    flat, rows = weights[0], x[0]
    out = torch.zeros_like(rows)
    for e, (gate, up, down) in enumerate(matrices):
        token = chosen[0, :, e].nonzero().squeeze(1)
        mine = rows[token]
        y = F.linear(F.silu(F.linear(mine, gate)) * F.linear(mine, up), down)
        out.index_add_(0, token, y * flat[token, e].to(y.dtype).unsqueeze(-1))
    return out.unsqueeze(0)
