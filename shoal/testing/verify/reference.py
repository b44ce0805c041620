"""The single-device reference: a plain model, a plain loop over the global batch, a plain optimizer.

It shares with the engine the model's definition, its initial values and its data, but not the code that runs them: no
mesh, no program, no bucket, no accumulation hook. It is always computed in float64, so that its own rounding does not
contribute to the printed errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.models.experts.router import SUMS, Router, find_modules
from shoal.engine.models.initial import Initial, fill
from shoal.engine.models.labels import draw_labels, label_key
from shoal.engine.models.loss import IGNORE
from shoal.engine.models.mixture_of_depths import COUNTS, MixtureOfDepths
from shoal.engine.models.transformer import Transformer, initialise
from shoal.engine.optim.build import build, rate_factor, weight_decay
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.schedule import learning_rate
from shoal.engine.optim.shards import Shards
from shoal.engine.optim.sophia import Sophia
from shoal.engine.precision.float8 import compute_scale, encode, largest
from shoal.engine.precision.nvfp4 import RoundingDraws, draw_rounding, rotate
from shoal.engine.precision.policy import POLICIES
from shoal.engine.precision.recipe import GRADIENT, INPUT, WEIGHT, AmaxHistory, Recipe
from shoal.pipeline.from_layout import build_layout_program
from shoal.spec.catalog import ModelShape
from shoal.spec.compatibility.sizes import float8_products
from shoal.spec.config import OptimizerConfig, RunConfig
from shoal.spec.number_formats import FORMATS
from shoal.spec.optimizers import is_matrix
from shoal.testing.verify.emulate import accumulate_gradients, count_tokens, emulate_updates, get_gradient
from shoal.testing.verify.trace import Choices, Tracer
from shoal.training.dry_run.dry_run import make_samples
from shoal.training.step.curvature import SHIFT


@dataclass(frozen=True)
class ComparisonJob:
    """One comparison of a layout with one device."""

    rules: dict[str, RunConfig]  # the run with each update rule, by name
    shape: ModelShape
    steps: int
    folder: Path  # of the reference's files
    inject: str = ""  # a fault of `shoal.testing.verify.faults`
    transport: str = ""  # of the ranks' mesh; "" takes that of `choose_transport`
    trace: bool = False  # whether to compare the activations of the last step


@dataclass(frozen=True)
class StepTotals:
    """Results of one step that both sides report."""

    loss: float  # mean over the global batch's unmasked tokens [nats]
    gradient_norm: float  # before clipping
    routing: Tensor | None  # counts of each expert layer, [layers, `Router.tally`]; None on a rank without any
    choices: dict[int, int]  # hash of the experts of all tokens, by layer (`shoal.testing.verify.trace.Choices`)
    # counts of each Mixture-of-Depths layer, [layers, `MixtureOfDepths.tally`]; None on a rank without any
    depths: Tensor | None


@dataclass(frozen=True)
class StepFacts(StepTotals):
    """Results of one step on one device; the tensors are in a file (see `step_file`)."""

    tokens: tuple[int, ...]  # unmasked targets of each sample of the global batch
    # largest absolute value of each parameter's clipped gradient, and of each expert's part of it (`with_experts`)
    gradients: dict[str, float]
    weights: dict[str, float]  # the same of each updated parameter


def with_experts(name: str, tensor: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter by name and, if its dim 0 is the experts, each part as ``NAME[EXPERT]``, from ``first`` on."""
    yield name, tensor
    if ".experts." in name:
        yield from ((f"{name}[{expert}]", part) for expert, part in enumerate(tensor, first))


def strip_expert(name: str) -> str:
    return name.partition("[")[0]


def step_file(folder: Path, rule: str, step: int) -> Path:
    """Return the file of a step's unsharded float64 tensors, ``gradient/NAME`` and ``weight/NAME``."""
    return folder / f"{rule}-{step}.safetensors"


def trace_file(folder: Path) -> Path:
    """Return the file of the traced step's activations: ``forward/MODULE``, ``backward/MODULE``; dim 0 is samples."""
    return folder / "trace.safetensors"


def run_reference(job: ComparisonJob, rule: str) -> list[StepFacts]:
    """Train on one device for the steps of a job with one of its rules, and write a `step_file` for each.

    Only asynchronous pipelines use ``parallel``: it determines which micro-batch uses and updates which weights.
    """
    config, samples = job.rules[rule], make_samples(job.rules[rule], job.shape)
    model = Transformer(job.shape, seed=config.train.seed).double()
    initialise(model, config.train.seed)
    history = multiply_in_float8(model, config)
    update = plain_optimizer(model, config.optimizer)
    facts = []
    for step in range(job.steps):
        tracer = Tracer(model) if job.trace and step == job.steps - 1 else None
        if isinstance(update, Sophia) and update.due:
            update.learn(estimate_curvature(model, config, _batches(config, samples, step), step))
        facts.append(_train_step(model, update.step, config, samples, step, step_file(job.folder, rule, step)))
        if history:
            history.end_step()
        if tracer is not None:
            # Entry m of the trace is sample m; losses of several samples together cannot be separated.
            separate = _samples_per_forward(config) == 1
            taken = {k: parts for k, parts in tracer.taken().items() if separate or not k.endswith("/loss")}
            save_file({key: torch.cat(parts) for key, parts in taken.items()}, trace_file(job.folder))
    return facts


def _samples_per_forward(config: RunConfig) -> int:
    """Return 1, which bounds the memory of activations; with 8-bit products a micro-batch, which shares its scales."""
    in_float8 = FORMATS[config.train.precision].products != "compute"
    return config.parallel.micro_batch if in_float8 else 1


def _batches(config: RunConfig, samples: Dataset, step: int, size: int = 1) -> list[Batch]:
    n = config.train.global_batch
    return [samples.batch(range(step * n + i, step * n + i + size)) for i in range(0, n, size)]


def plain_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> Rule | PlainTorch:
    """Return torch's own AdamW or SGD, or another rule as it is on one device. Weight decay is for matrices only."""
    if config.name in ("adamw", "sgd"):
        return PlainTorch(model, config)
    return build(config, build_shards(model, config))


def build_shards(model: torch.nn.Module, config: OptimizerConfig) -> Shards:
    """Return the trained parameters of a model and their gradients, zeros at first, for an update rule."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    return Shards.from_parameters(
        ((name, p.detach(), get_gradient(p)) for name, p in named.items()),
        lambda name, p: weight_decay(config, name, tuple(p.shape)), lambda name: rate_factor(config, name),
    )


class PlainTorch:
    def __init__(self, model: torch.nn.Module, config: OptimizerConfig):
        groups = [
            {"params": [p], "weight_decay": config.weight_decay if is_matrix(name, tuple(p.shape)) else 0.0,
             "rate": rate_factor(config, name)}
            for name, p in model.named_parameters()
        ]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, config.learning_rate, config.betas, config.eps, foreach=False)
            if config.name == "adamw" else torch.optim.SGD(groups, config.learning_rate, foreach=False)
        )

    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        self.optimizer.step()


def _train_step(
    model: Transformer, update: Callable[[float], None], config: RunConfig, samples: Dataset, step: int, file: Path
) -> StepFacts:
    n = config.train.global_batch
    counts = tuple(batch.unmasked() for batch in _batches(config, samples, step))
    batches = _batches(config, samples, step, _samples_per_forward(config))
    rate = learning_rate(step, config.train.steps, config.optimizer)
    routers, depths = find_modules(model, Router), find_modules(model, MixtureOfDepths)
    for counter in (*routers, *depths):
        counter.reset_tally()
    choices = Choices([model], model.shape, config.data.sequence_length)
    program = build_layout_program(config.parallel, config.parallel.microbatches(n))
    if program.updates > 1:
        size = len(batches) // program.microbatches
        losses = emulate_updates(model, program, [batches[i : i + size] for i in range(0, len(batches), size)])
    else:
        losses = iter([accumulate_gradients(model, batches, lambda i, batch: model(
            batch.tokens, batch.targets, batch.documents, samples=batch.samples, sequences=n
        ))])
    total, norms = 0.0, []
    for loss in losses:
        total += loss
        norms.append(_clip(model, config.optimizer.clip_norm))
        gradients = {name: get_gradient(p).clone() for name, p in model.named_parameters()}
        update(rate)
    for router in routers:
        router.rebalance(_tally(router)[SUMS:])
    routing = torch.stack([_tally(router) for router in routers]) if routers else torch.zeros(0, SUMS)
    chosen = torch.stack([_tally(depth) for depth in depths]) if depths else torch.zeros(0, COUNTS + 1)
    weights = {name: p.detach() for name, p in (*model.named_parameters(), *model.named_buffers())}
    save_file(
        {f"gradient/{name}": t for name, t in gradients.items()} | {f"weight/{name}": t for name, t in weights.items()},
        file,
    )
    return StepFacts(
        total / max(1, sum(counts)), sum(norms) / len(norms), routing, choices.taken(), chosen, counts,
        _largest(gradients), _largest(weights),
    )


def _tally(counted: Router | MixtureOfDepths) -> Tensor:
    assert counted.tally is not None
    return counted.tally


def _clip(model: Transformer, limit: float) -> float:
    """Clip the gradients to a norm, 0 for none; return the norm before."""
    gradients = [get_gradient(p) for p in model.parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
    return norm


def _largest(tensors: dict[str, Tensor]) -> dict[str, float]:
    parts = (part for name, t in tensors.items() for part in with_experts(name, t))
    return {name: part.abs().max().item() for name, part in parts}


# ---- Sophia's curvature estimates: full parameters, one sample at a time ---------------------------------------------


def estimate_curvature(model: Transformer, config: RunConfig, batches: Sequence[Batch], step: int) -> list[Tensor]:
    """Return the estimate of a step, from its single samples, for each parameter in order, flattened."""
    estimate = _from_drawn_labels if config.optimizer.name == "sophia-g" else _from_differences
    return [each.flatten() for each in estimate(model, config, batches, step)]


def _from_drawn_labels(model: Transformer, config: RunConfig, batches: Sequence[Batch], step: int) -> list[Tensor]:
    length = config.data.sequence_length
    key, first = label_key(config.train.seed, step), step * config.train.global_batch

    def compute_loss(i: int, batch: Batch) -> Tensor:
        logits = model(batch.tokens, None, batch.documents, samples=batch.samples)
        labels = draw_labels(logits, key, (first + i) * length + torch.arange(length)[None])
        labels[batch.targets == IGNORE] = IGNORE
        return F.cross_entropy(logits[0], labels[0], ignore_index=IGNORE, reduction="sum")

    accumulate_gradients(model, batches, compute_loss)
    return [count_tokens(batches) * get_gradient(p) ** 2 for p in model.parameters()]


def _from_differences(model: Transformer, config: RunConfig, batches: Sequence[Batch], step: int) -> list[Tensor]:
    parameters = dict(model.named_parameters())
    kept = [p.detach().clone() for p in parameters.values()]
    directions = [torch.empty_like(values) for values in kept]
    for name, direction in zip(parameters, directions, strict=True):
        shape = tuple(direction.shape)
        fill(
            direction, name=f"hutchinson.{step}.{name}", global_shape=shape, box=Box.full(shape),
            initial=Initial(0.0, 1.0), seed=config.train.seed,
        )
    size = SHIFT * torch.cat([values.flatten() for values in kept]).square().mean().sqrt().item()
    found = []
    for sign in (1, -1, 0):
        with torch.no_grad():
            for p, values, direction in zip(parameters.values(), kept, directions, strict=True):
                p.copy_(values + sign * size * direction)
        if sign:
            accumulate_gradients(model, batches, lambda i, batch: model(
                batch.tokens, batch.targets, batch.documents, samples=batch.samples
            ))
            found.append([get_gradient(p).clone() for p in parameters.values()])
    return [u * (one - other) / (2 * size) for u, one, other in zip(directions, *found, strict=True)]


# ---- products in 8 bits, in float64: the reference of `shoal.engine.parallel.float8.product` ------------------------


def multiply_in_float8(model: Transformer, config: RunConfig) -> AmaxHistory | None:
    """Make a model's layers multiply in the run's precision, in place; return the scales' history, if it has one."""
    products = POLICIES[config.train.precision].formats.products
    if products == "compute":
        return None
    recipe, groups = Recipe.from_config(products, config.float8), float8_products(model.shape, config.float8.keep)
    names = [name for name, *_ in groups]
    history = AmaxHistory(recipe, names, torch.float64, torch.device("cpu")) if recipe.history else None
    draws = RoundingDraws(config.train.seed)
    draws.follow(model)
    modules = dict(model.named_modules())
    for name, *others in groups:
        joined, rounded = [modules[each] for each in (name, *others)], Rounding(name, recipe, history, draws)
        modules[name].forward = partial(_forward, modules[name], rounded)
        if others:
            modules[name].together = partial(_together, joined, rounded)
    return history


def _forward(module: nn.Linear, rounded, x: Tensor) -> Tensor:
    y = RoundedProduct.apply(rounded, x, module.weight)
    return y if module.bias is None else y + module.bias


def _together(joined: list[nn.Linear], rounded, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Apply layers without biases as one product: [.., in] -> [.., out] of each."""
    assert [*layers] == joined
    weight = torch.cat([layer.weight for layer in layers])
    return RoundedProduct.apply(rounded, x, weight).split([len(layer.weight) for layer in layers], -1)


@dataclass(frozen=True)
class Rounding:
    """Rounding of the operands of one layer's products."""

    name: str
    recipe: Recipe
    history: AmaxHistory | None
    draws: RoundingDraws

    def __call__(self, what: int, x: Tensor, draws: Tensor | None = None) -> Tensor:
        kind, grain = self.recipe.kinds[what], self.recipe.grains[what]
        most = largest(x, grain)
        scale = None
        if self.history:
            self.history.note(self.name, what, most)
            scale = self.history.scale(self.name, what)
        scale = compute_scale(most, kind, grain) if scale is None else scale
        return encode(x, scale, kind, grain, draws).values(x.dtype)

    def gradient(self, d_y: Tensor, start: Tensor | int) -> Tensor:
        """Round dY along the output features."""
        return self(GRADIENT, d_y, self._draw(d_y, start)[0] if self.recipe.rotates else None)

    def across(self, d_y: Tensor, x: Tensor, start: Tensor | int) -> tuple[Tensor, Tensor]:
        """Round dY^T and X^T along the tokens."""
        if not self.recipe.rotates:
            return self(GRADIENT, d_y.t()), self(INPUT, x.t())
        d_y, x = rotate(d_y.t()), rotate(x.t())
        return self(GRADIENT, d_y, self._draw(d_y.t(), start)[1].t()), self(INPUT, x)

    def _draw(self, d_y: Tensor, start: Tensor | int) -> tuple[Tensor, Tensor]:
        tokens, width = d_y.shape
        return draw_rounding(self.draws.key(self.name), start, tokens, torch.arange(width))


class RoundedProduct(torch.autograd.Function):
    """x W^T with the operands of all three products rounded."""

    @staticmethod
    def forward(ctx, rounded: Rounding, x: Tensor, weight: Tensor) -> Tensor:
        ctx.rounded, ctx.start = rounded, rounded.draws.start
        ctx.save_for_backward(x, weight)
        return rounded(INPUT, x.flatten(0, -2)).matmul(rounded(WEIGHT, weight).t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        d_y = gradient.flatten(0, -2)
        d_x = ctx.rounded.gradient(d_y, ctx.start) @ ctx.rounded(WEIGHT, weight.t()).t()
        across, turned = ctx.rounded.across(d_y, x.flatten(0, -2), ctx.start)
        return None, d_x.view_as(x), across @ turned.t()
