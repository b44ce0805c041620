"""Update rules on a flat shard beside torch's own, or a plain loop over the same tensors; all in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch
from rich.table import Table
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.base.errors import UsageError, did_you_mean
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import usable_cores
from shoal.engine.models.products import by_mkl
from shoal.engine.optim.adam8bit import WIDTH, dynamic_map
from shoal.engine.optim.build import RULES, build, compilable, weight_decay
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.engine.optim.sophia import Sophia
from shoal.planning.cost.parameters import LocalParameter, StagePart, units_of
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.config import OptimizerConfig
from shoal.spec.layout import Layout

FUSED = ("sgd", "momentum", "adagrad", "adam", "adamw")
"""Those that torch has fused and foreach kernels for; of the others the plain loop is what there is."""

RATE = 1e-3
WARM_UP = 7
"""Steps before those that are timed: the first allocates, and RAdam's first few are momentum alone."""

Step = Callable[[], object]


@dataclass(frozen=True)
class OptimizerTiming:
    """One rule on one size.

    Attributes:
        ours, rivals: seconds of a step by contender, one for each turn.
    """

    rule: str
    parameters: int
    ours: dict[str, list[float]]
    rivals: dict[str, list[float]]

    @property
    def rival(self) -> str:
        """The fastest of the others."""
        return min(self.rivals, key=lambda name: median(self.rivals[name]))

    def ratio(self, name: str) -> float:
        """Time of the fastest rival over that of one of ours."""
        return median(self.rivals[self.rival]) / median(self.ours[name])

    @property
    def met(self) -> bool:
        """Whether one of ours is as fast as it should be."""
        return max(map(self.ratio, self.ours)) >= self.target

    @property
    def target(self) -> float:
        """What the best ratio should be."""
        return 1.0 if self.rule in FUSED else 2.0


def shapes_of(parameters: int, model: ModelShape | None = None) -> dict[str, tuple[int, ...]]:
    """By name, the matrices and norms of a model's layers, or of narrow llama ones: at least so many parameters."""
    if model is not None:
        layers = -(-parameters // sum(math.prod(held.whole) for held in _layers(model, 1)))
        return {held.name: held.whole for held in _layers(model, layers)}
    hidden = 1024 if parameters >= 50_000_000 else 512
    ffn = 11 * hidden // 4
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(-(-parameters // (4 * hidden**2 + 3 * hidden * ffn))):
        for name in ("q", "k", "v", "out"):
            shapes[f"layers.{layer}.attention.{name}.weight"] = (hidden, hidden)
        shapes[f"layers.{layer}.mlp.gate.weight"] = shapes[f"layers.{layer}.mlp.up.weight"] = (ffn, hidden)
        shapes[f"layers.{layer}.mlp.down.weight"] = (hidden, ffn)
        shapes[f"layers.{layer}.mlp_norm.weight"] = (hidden,)
    return shapes


def _layers(model: ModelShape, layers: int) -> list[LocalParameter]:
    units = units_of(model, Layout(), StagePart(range(layers), first=False, last=False))
    return [held for unit in units for held in unit]


def measure(rule: str, shapes: dict[str, tuple[int, ...]], turns: int, *, products: bool = True) -> OptimizerTiming:
    """Time one step of each contender in each turn, on parameters of these shapes.

    Args:
        products: whether the rivals' are made as ours, or by the library that torch has by itself.
    """
    config = OptimizerConfig.model_validate({"name": rule, "hessian_every": 10**9})
    ours = {"shoal": partial(flat, config, shapes)}
    if compilable(rule):
        ours["compiled"] = partial(flat, config, shapes, compile=True)
    others = rivals(config, shapes)
    if not products:
        others = {name: partial(_multiplying_by_mkl, make) for name, make in others.items()}
    seconds: dict[str, list[float]] = {name: [] for name in (*ours, *others)}
    makers = ours | others
    # Whose memory was allocated first was up to a tenth slower, so each side is first for half of the turns.
    for names, number in ((list(makers), turns - turns // 2), (list(makers)[::-1], turns // 2)):
        steps = {name: makers[name]() for name in names} if number else {}
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        for _ in range(number):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    return OptimizerTiming(rule, count, *({name: seconds[name] for name in side} for side in (ours, others)))


def measure_rules(
    rules: str, parameters: Sequence[int], model: str | None, turns: int, *, threads: int, products: bool,
    say: Callable[[str], None],
) -> list[OptimizerTiming]:
    """Time some rules on some numbers of parameters.

    Args:
        rules: names with commas, or "all".
        model: of the catalog, of whose layers as many are taken as have so many parameters; None as in `shapes_of`.
        turns, products: as of `measure`.
        threads: of the CPU.
        say: told what is going on.

    Raises:
        UsageError: there is no such rule or model, or the model has experts.
    """
    names = sorted(RULES) if rules == "all" else [name.strip() for name in rules.split(",")]
    for name in names:
        if name not in RULES:
            raise UsageError(f"bench optimizers --rules {rules}: no rule '{name}'; {did_you_mean(name, RULES)}")
    shape = None if model is None else model_shape(model)
    if shape is not None and shape.experts:
        raise UsageError(f"bench optimizers --model {model}: it has experts; take a model without.")
    tune_process()
    torch.set_num_threads(threads)
    timings = []
    for count in parameters:
        for name in names:
            say(f"{name}, {count:,} parameters")
            timings.append(measure(name, shapes_of(count, shape), turns, products=products))
    return timings


def table(timings: Sequence[OptimizerTiming]) -> Table:
    """A row for each rule, number of parameters and contender of ours."""
    view = Table(title="one update: shoal's on the flat shard, torch's by tensor")
    for column in ("rule", "parameters", "shoal", "ms", "rival", "rival ms", "ratio", "quartiles", "target", "met"):
        view.add_column(column, justify="left" if column in ("rule", "shoal", "rival", "met") else "right")
    for timing in timings:
        theirs = timing.rivals[timing.rival]
        for name, ours in timing.ours.items():
            each = [b / a for a, b in zip(ours, theirs, strict=True)]
            low, _, high = quantiles(each, n=4) if len(each) > 1 else each * 3
            ratio = timing.ratio(name)
            view.add_row(
                timing.rule, f"{timing.parameters / 1e6:.1f} M", "compiled" if name == "compiled" else "as it is",
                f"{median(ours) * 1e3:.1f}", timing.rival, f"{median(theirs) * 1e3:.1f}", f"{ratio:.2f}",
                f"{low:.2f} to {high:.2f}", f"{timing.target:.0f}",
                "[green]yes" if ratio >= timing.target else "[red]no",
            )
    return view


def cores_used(threads: int) -> str:
    """Torch's version, and how many of the cores a step had."""
    return f"torch {torch.__version__}, {threads} of {usable_cores()} cores"


def drawn(shapes: dict[str, tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Weights and gradients of all of them, flat, always the same."""
    generator = torch.Generator().manual_seed(0)
    n = sum(torch.Size(shape).numel() for shape in shapes.values())
    return torch.randn(n, generator=generator), torch.randn(n, generator=generator)


def flat(config: OptimizerConfig, shapes: dict[str, tuple[int, ...]], *, compile: bool = False) -> Step:
    """A step of shoal's rule on one flat shard, as one rank has it, cut where the decay changes."""
    weights, gradient = drawn(shapes)
    parts, start = [], 0
    for name, shape in shapes.items():
        parts.append(ShardPart(name, shape, Box.whole(shape), start))
        start += parts[-1].box.numel
    whole = Shard(weights, gradient, tuple(parts))
    cut = [
        Shard(shard.weights, shard.gradient, shard.parts, decay)
        for decay, shard in whole.cut(lambda part: weight_decay(config, part.whole))
    ]
    rule = build(config, Shards(shapes, cut, saves=frozenset(shapes)), compile=compile)
    if isinstance(rule, Sophia):
        rule.learn([shard.gradient.abs() for shard in cut])

    def step() -> Tensor:
        rule.step(RATE)
        return weights

    return step


def rivals(config: OptimizerConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, Callable[[], Step]]:
    """Makers of steps of the others, each on its own copy of the parameters as tensors."""
    ways = ("fused", "foreach") if config.name in FUSED else ("plain loop",)
    return {way: partial(_rival, config, shapes, way) for way in ways}


def _multiplying_by_mkl(make: Callable[[], Step]) -> Step:
    return by_mkl()(make())


def _rival(config: OptimizerConfig, shapes: dict[str, tuple[int, ...]], way: str) -> Step:
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    weights, gradients = (
        [x.clone().view(shape) for x, shape in zip(whole.split(sizes), shapes.values(), strict=True)]
        for whole in drawn(shapes)
    )
    if config.name in FUSED or config.name in ("radam", "adafactor"):
        optimizer = _torch(config, weights, gradients, way)
        return lambda: (optimizer.step(), weights)[1]
    loop = {"sage": _sage, "sophia-g": _sophia, "sophia-h": _sophia, "muon": _muon, "adam8bit": _adam8bit}[config.name]
    states: list[dict[str, Tensor]] = [{} for _ in sizes]
    count = 0

    def step() -> list[Tensor]:
        nonlocal count
        count += 1
        for name, w, g, state in zip(shapes, weights, gradients, states, strict=True):
            loop(name, w, g, state, count, weight_decay(config, tuple(w.shape)), config)
        return weights

    return step


def _torch(config: OptimizerConfig, weights: list[Tensor], gradients: list[Tensor], way: str) -> torch.optim.Optimizer:
    groups: dict[float, list[nn.Parameter]] = {}
    for weight, gradient in zip(weights, gradients, strict=True):
        parameter = nn.Parameter(weight)
        parameter.grad = gradient
        groups.setdefault(weight_decay(config, tuple(weight.shape)), []).append(parameter)
    params = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
    fused, foreach, betas, eps = way == "fused", way == "foreach", config.betas, config.eps
    match config.name:
        case "sgd" | "momentum":
            momentum = config.momentum if config.name == "momentum" else 0.0
            nesterov = config.nesterov
            return torch.optim.SGD(params, RATE, momentum, nesterov=nesterov, fused=fused, foreach=foreach)
        case "adagrad":
            return torch.optim.Adagrad(params, lr=RATE, eps=eps, fused=fused, foreach=foreach)
        case "adam":
            return torch.optim.Adam(params, lr=RATE, betas=betas, eps=eps, fused=fused, foreach=foreach)
        case "adamw":
            return torch.optim.AdamW(params, lr=RATE, betas=betas, eps=eps, fused=fused, foreach=foreach)
        case "radam":
            return torch.optim.RAdam(
                params, lr=RATE, betas=betas, eps=eps, decoupled_weight_decay=True, foreach=False
            )
    return torch.optim.Adafactor(params, lr=RATE, foreach=False)


# ---- plain loops: what one would write for one tensor, in the way of torch's own -----------------------------------


def _moments(g: Tensor, state: dict[str, Tensor], config: OptimizerConfig) -> tuple[Tensor, Tensor]:
    if not state:
        state |= {"m": torch.zeros_like(g), "v": torch.zeros_like(g)}
    state["m"].lerp_(g, 1 - config.betas[0])
    state["v"].mul_(config.betas[1]).addcmul_(g, g, value=1 - config.betas[1])
    return state["m"], state["v"]


def _adam(w: Tensor, m: Tensor, v: Tensor, t: int, decay: float, config: OptimizerConfig) -> None:
    beta1, beta2 = config.betas
    w.mul_(1 - RATE * decay)
    w.addcdiv_(m, (v / (1 - beta2**t)).sqrt_().add_(config.eps), value=-RATE / (1 - beta1**t))


def _sage(name: str, w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    beta1, beta2 = config.betas
    m, v = _moments(g, state, config)
    sensitivity = (w * g).abs()
    mean = state.setdefault("i", torch.zeros_like(w)).lerp_(sensitivity, 1 - config.sensitivity_beta)
    scale = ((sensitivity - mean).abs() + config.eps) / (mean + config.eps)
    root = (v / (1 - beta2**t)).sqrt() + config.eps
    w.mul_(1 - RATE * decay).addcdiv_(scale * m, root, value=-RATE / (1 - beta1**t))


def _sophia(name: str, w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    if not state:
        state |= {"m": torch.zeros_like(w), "h": g.abs() * (1 - config.betas[1])}
    m = state["m"].mul_(config.betas[0]).add_(g, alpha=1 - config.betas[0])
    w.mul_(1 - RATE * decay)
    w.sub_((m / (config.hessian_scale * state["h"]).clamp(min=config.eps)).clamp(-1, 1), alpha=RATE)


def _muon(name: str, w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    if w.dim() != 2:
        _adam(w, *_moments(g, state, config), t, decay, config)
        return
    m = state.setdefault("m", torch.zeros_like(w)).mul_(config.momentum).add_(g)
    x = g + config.momentum * m
    x = (x if w.size(0) <= w.size(1) else x.T) / (x.norm() + 1e-7)
    for _ in range(5):  # Newton-Schulz, as Jordan et al. 2024 write it
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x if w.size(0) <= w.size(1) else x.T
    w.mul_(1 - RATE * decay).sub_(x, alpha=RATE * 0.2 * max(w.shape) ** 0.5)


def _adam8bit(name: str, w: Tensor, g: Tensor, state: dict, t: int, decay: float, config: OptimizerConfig) -> None:
    if w.dim() != 2:
        _adam(w, *_moments(g, state, config), t, decay, config)
        return
    tables = {"m": dynamic_map(True).float(), "v": dynamic_map(False).float()}
    moments = {
        kind: (table[state[kind].int()] * state[f"{kind} scale"]).view_as(w) if state else torch.zeros_like(w)
        for kind, table in tables.items()
    }
    _adam(w, *_moments(g, moments, config), t, decay, config)
    for kind, table in tables.items():
        blocks = moments[kind].view(-1, WIDTH)
        scale = blocks.abs().amax(1, keepdim=True)
        state[kind] = torch.bucketize(blocks / scale, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        state[f"{kind} scale"] = scale
