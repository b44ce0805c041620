"""Update rules on a flat shard beside torch's own, or a plain loop over the same tensors, in turns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from pydantic import PositiveInt
from rich.console import Console
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.base.section import NonEmpty
from shoal.engine.device import tune_process
from shoal.engine.kernels.adam8bit import WIDTH, dynamic_map
from shoal.engine.optim.build import COMPILED, RULES, build, weight_decay
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.engine.optim.sophia import Sophia
from shoal.labs.bench.benchmark import Benchmark, Notify, Row, choose_names, make_table
from shoal.labs.bench.race import quartiles, time_in_turns
from shoal.planning.cost.parameters import StagePart, list_units
from shoal.spec.catalog import model_shape
from shoal.spec.config import OptimizerConfig
from shoal.spec.layout import Layout

FUSED = ("sgd", "momentum", "adagrad", "adam", "adamw")
"""Rules with fused and foreach kernels in torch; the baseline of other rules is a plain loop."""

RATE = OptimizerConfig().learning_rate
WARM_UP = 7
"""Untimed steps: the first allocates, and RAdam's first few use momentum only."""

Update = Callable[[], object]
"""Function that makes one update, and returns the weights."""


def compare(rule: str, count: int, name: str, ours: list[float], baselines: dict[str, list[float]]) -> Row:
    """Compare one of shoal's variants with the fastest baseline, by the seconds of an update in every turn."""
    baseline, theirs = min(baselines.items(), key=lambda each: median(each[1]))
    ratio, target = median(theirs) / median(ours), 1.0 if rule in FUSED else 2.0
    low, high = quartiles([b / a for a, b in zip(ours, theirs, strict=True)])
    return {
        "rule": rule, "parameters": f"{count / 1e6:.1f} M", "shoal": name, "ms": 1e3 * median(ours),
        "baseline": baseline, "baseline ms": 1e3 * median(theirs), "ratio": ratio,
        "quartiles": f"{low:.2f} to {high:.2f}", "target": target, "met": ratio >= target,
    }


class OptimizersBenchmark(Benchmark):
    """Updates on a flat CPU shard, beside torch's fused and foreach kernels or a plain loop; exit code 1 if no variant
    of shoal reaches a rule's target."""

    rules: str = "all"
    """Comma-separated list of rules, or all."""

    parameters: NonEmpty[PositiveInt] = (10_000_000,)
    """Numbers of parameters."""

    turns: PositiveInt = 9
    """Updates of each variant, in turns; medians count."""

    def run(self, console: Console, notify: Notify) -> bool:
        rules = choose_names(self.rules, sorted(RULES), "bench optimizers --rules")
        tune_process()
        torch.set_num_threads(1)
        timings = []
        for count in self.parameters:
            for rule in rules:
                notify(f"{rule}, {count:,} parameters")
                timings.append(measure(rule, choose_shapes(count), self.turns))
        title = "one update on one thread: shoal's on the flat shard, torch's by tensor"
        console.print(make_table(title, [row for rows in timings for row in rows]))
        return all(any(row["met"] for row in rows) for rows in timings)


def choose_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes, by name, of enough layers of a llama, 512 or 1024 wide, for a number of parameters."""
    hidden = 1024 if parameters >= 50_000_000 else 512
    sizes = {"hidden": hidden, "ffn": 11 * hidden // 4, "heads": 8, "kv_heads": 8, "head_dim": hidden // 8}
    model = model_shape("tiny").model_copy(update=sizes)
    (layer,) = list_units(model, Layout(), StagePart(range(1), first=False, last=False))
    layers = -(-parameters // sum(math.prod(parameter.global_shape) for parameter in layer))
    units = list_units(model, Layout(), StagePart(range(layers), first=False, last=False))
    return {parameter.name: parameter.global_shape for unit in units for parameter in unit}


def measure(rule: str, shapes: dict[str, tuple[int, ...]], turns: int) -> list[Row]:
    """Time one update of each variant in each turn; return a row for each variant of shoal."""
    config = OptimizerConfig.model_validate({"name": rule, "hessian_every": 10**9})
    ours = {"eager": partial(build_flat, config, shapes)}
    if rule in COMPILED:
        ours["compiled"] = partial(build_flat, config, shapes, compile=True)
    baselines = {way: partial(build_baseline, config, shapes, way) for way in baseline_names(rule)}
    builders = ours | baselines
    seconds: dict[str, list[float]] = {name: [] for name in builders}
    # The variant that allocates first was up to a tenth slower, so each side comes first in half of the turns.
    for names, number in ((list(builders), turns - turns // 2), (list(builders)[::-1], turns // 2)):
        updates = {name: builders[name]() for name in names} if number else {}
        for name, times in time_in_turns(updates, number, warmup=WARM_UP).items():
            seconds[name] += times
    count = sum(map(math.prod, shapes.values()))
    theirs = {name: seconds[name] for name in baselines}
    return [compare(rule, count, name, seconds[name], theirs) for name in ours]


def _draw(shapes: dict[str, tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return the same random flat weights and gradients in every call."""
    generator = torch.Generator().manual_seed(0)
    n = sum(map(math.prod, shapes.values()))
    return torch.randn(n, generator=generator), torch.randn(n, generator=generator)


def build_flat(config: OptimizerConfig, shapes: dict[str, tuple[int, ...]], *, compile: bool = False) -> Update:
    """Build an update of shoal's rule on the flat shard of one rank, cut where the weight decay changes."""
    weights, gradient = _draw(shapes)
    parts, start = [], 0
    for name, shape in shapes.items():
        parts.append(ShardPart(name, shape, Box.full(shape), start))
        start += parts[-1].box.numel
    shard = Shard(weights, gradient, tuple(parts))
    groups = shard.cut(lambda part: weight_decay(config, part.name, part.global_shape))
    cut = [replace(each, decay=decay) for decay, each in groups]
    rule = build(config, Shards(shapes, cut, saves=frozenset(shapes)), compile=compile)
    if isinstance(rule, Sophia):
        rule.learn([each.gradient.abs() for each in cut])

    def update() -> Tensor:
        rule.step(RATE)
        return weights

    return update


def baseline_names(rule: str) -> tuple[str, ...]:
    """Return the implementations of a rule that shoal is compared with."""
    return ("fused", "foreach") if rule in FUSED else ("plain loop",)


def build_baseline(config: OptimizerConfig, shapes: dict[str, tuple[int, ...]], way: str) -> Update:
    """Build an update of a baseline on its own copy of the parameters, as tensors."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    weights, gradients = (
        [x.clone().view(shape) for x, shape in zip(flat.split(sizes), shapes.values(), strict=True)]
        for flat in _draw(shapes)
    )
    if config.name in FUSED or config.name in ("radam", "adafactor"):
        parameters = [nn.Parameter(weight) for weight in weights]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer = build_torch(config, parameters, way)

        def update() -> list[Tensor]:
            optimizer.step()
            return weights

        return update
    loop = {"sage": _sage, "sophia-g": _sophia, "sophia-h": _sophia, "muon": _muon, "adam8bit": _adam8bit}[config.name]
    states: list[dict[str, Tensor]] = [{} for _ in sizes]
    steps = itertools.count(1)

    def update_by_loop() -> list[Tensor]:
        step = next(steps)
        for w, g, state in zip(weights, gradients, states, strict=True):
            one = _adam if w.dim() != 2 and config.name in ("muon", "adam8bit") else loop
            one(w, g, state, step, weight_decay(config, "", tuple(w.shape)), config)
        return weights

    return update_by_loop


def build_torch(config: OptimizerConfig, parameters: Iterable[nn.Parameter], way: str) -> torch.optim.Optimizer:
    """Build torch's own optimizer of a rule, "fused" or "foreach", with weight decay on matrices only, like shoal's."""
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(weight_decay(config, "", tuple(parameter.shape)), []).append(parameter)
    params = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
    fused, betas, eps = way == "fused", config.betas, config.eps
    common: dict[str, Any] = {"lr": config.learning_rate, "foreach": way == "foreach"}
    match config.name:
        case "sgd" | "momentum":
            momentum = config.momentum if config.name == "momentum" else 0.0
            return torch.optim.SGD(params, momentum=momentum, nesterov=config.nesterov, fused=fused, **common)
        case "adagrad":
            return torch.optim.Adagrad(params, eps=eps, fused=fused, **common)
        case "radam":
            return torch.optim.RAdam(params, betas=betas, eps=eps, decoupled_weight_decay=True, **common)
        case "adafactor":
            return torch.optim.Adafactor(params, **common)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(params, betas=betas, eps=eps, fused=fused, **common)


# ---- plain loops: straightforward updates of one tensor, in the style of torch.optim ---------------------------------


def _moments(g: Tensor, state: dict[str, Tensor], config: OptimizerConfig) -> tuple[Tensor, Tensor]:
    if not state:
        state |= {"m": torch.zeros_like(g), "v": torch.zeros_like(g)}
    state["m"].lerp_(g, 1 - config.betas[0])
    state["v"].mul_(config.betas[1]).addcmul_(g, g, value=1 - config.betas[1])
    return state["m"], state["v"]


def _adam(w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    beta1, beta2 = config.betas
    m, v = _moments(g, state, config)
    w.mul_(1 - RATE * decay)
    w.addcdiv_(m, (v / (1 - beta2**t)).sqrt_().add_(config.eps), value=-RATE / (1 - beta1**t))


def _sage(w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    beta1, beta2 = config.betas
    m, v = _moments(g, state, config)
    sensitivity = (w * g).abs()
    mean = state.setdefault("i", torch.zeros_like(w)).lerp_(sensitivity, 1 - config.sensitivity_beta)
    scale = ((sensitivity - mean).abs() + config.eps) / (mean + config.eps)
    root = (v / (1 - beta2**t)).sqrt() + config.eps
    w.mul_(1 - RATE * decay).addcdiv_(scale * m, root, value=-RATE / (1 - beta1**t))


def _sophia(w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    if not state:
        state |= {"m": torch.zeros_like(w), "h": g.abs() * (1 - config.betas[1])}
    m = state["m"].mul_(config.betas[0]).add_(g, alpha=1 - config.betas[0])
    w.mul_(1 - RATE * decay)
    w.sub_((m / (config.hessian_scale * state["h"]).clamp(min=config.eps)).clamp(-1, 1), alpha=RATE)


def _muon(w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    m = state.setdefault("m", torch.zeros_like(w)).mul_(config.momentum).add_(g)
    x = g + config.momentum * m
    x = (x if w.size(0) <= w.size(1) else x.T) / (x.norm() + 1e-7)
    for _ in range(5):  # Newton-Schulz (Jordan et al. 2024)
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x if w.size(0) <= w.size(1) else x.T
    w.mul_(1 - RATE * decay).sub_(x, alpha=RATE * 0.2 * max(w.shape) ** 0.5)


def _adam8bit(w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    tables = {"m": dynamic_map(True).float(), "v": dynamic_map(False).float()}
    moments = {
        kind: (table[state[kind].int()] * state[f"{kind} scale"]).view_as(w) if state else torch.zeros_like(w)
        for kind, table in tables.items()
    }
    _adam(w, g, moments, t, decay, config)
    for kind, table in tables.items():
        blocks = moments[kind].view(-1, WIDTH)
        scale = blocks.abs().amax(1, keepdim=True)
        state[kind] = torch.bucketize(blocks / scale, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        state[f"{kind} scale"] = scale
