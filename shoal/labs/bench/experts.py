"""The experts of one layer, forward and backward, as one grouped computation against a plain loop over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.device import synchronize
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import RoutingContext
from shoal.labs.bench.peak import DTYPES
from shoal.labs.bench.race import quartiles
from shoal.spec.catalog import Experts, model_shape

KINDS = ("grouped", "loop")


@dataclass(frozen=True)
class ExpertsTiming:
    """One number of experts.

    Attributes:
        seconds: by kind, median of a forward and backward, router included.
        ratio: of the loop's time to the grouped one's, median over turns.
        spread: the first and third quartile of it.
        difference: largest difference of outputs and gradients, relative to the largest of each.
    """

    experts: int
    per_token: int
    seconds: dict[str, float]
    ratio: float
    spread: tuple[float, float]
    difference: float


def measure(
    count: int, precision: str, device: torch.device, *,
    per_token: int, tokens: int, hidden: int, ffn: int, repeats: int,
) -> ExpertsTiming:
    """Time both in turn on the same weights and tokens."""
    experts = Experts(count=count, per_token=per_token, ffn=ffn)
    shape = model_shape("tiny").model_copy(update={"hidden": hidden, "experts": experts})
    generator = torch.Generator().manual_seed(0)
    layer = MoE(shape, 0)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    layer.to(device, DTYPES[precision])
    x, gradient = (torch.randn(1, tokens, hidden, generator=generator).to(device, layer.router.weight.dtype)
                   for _ in range(2))
    x.requires_grad_()
    held = layer.experts
    assert held.gate is not None, "the experts of the llama family are gated"
    loop = [[w.detach().clone().requires_grad_() for w in matrices]
            for matrices in zip(held.gate, held.up, held.down, strict=True)]
    weights = {"grouped": [held.gate, held.up, held.down], "loop": [w for matrices in loop for w in matrices]}
    run: dict[str, Callable[[], Tensor]] = {
        "grouped": lambda: layer(x, RoutingContext()), "loop": lambda: looped(layer, x, loop),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    results: dict[str, list[Tensor]] = {}
    for repeat in range(repeats + 2):
        for kind in KINDS:
            synchronize(device)
            start = time.perf_counter()
            y = run[kind]()
            gradients = torch.autograd.grad(y, [x, layer.router.weight, *weights[kind]], gradient)
            synchronize(device)
            if repeat > 1:  # the first ones warm up
                seconds[kind].append(time.perf_counter() - start)
            results[kind] = [y.detach(), *gradients[:2], *_stacked(kind, gradients[2:])]
    ratios = [slow / fast for fast, slow in zip(seconds["grouped"], seconds["loop"], strict=True)]
    difference = max(float((a - b).abs().max() / b.abs().max())
                     for a, b in zip(results["grouped"], results["loop"], strict=True))
    medians = {kind: median(times) for kind, times in seconds.items()}
    return ExpertsTiming(count, per_token, medians, median(ratios), quartiles(ratios), difference)


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


def _stacked(kind: str, gradients: tuple[Tensor, ...]) -> list[Tensor]:
    return list(gradients) if kind == "grouped" else [torch.stack(gradients[part::3]) for part in range(3)]
