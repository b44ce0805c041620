"""The single-device reference: a plain model, a plain loop over the whole global batch, a plain optimizer.

It shares with the engine the model's definition, its initial values and its data, but not the code that runs them: no
mesh, no program, no bucket, no accumulation hook. It is always computed in float64, so that its own rounding does not
contribute to the printed errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.engine.data.batches import Batch, Dataset, SyntheticDataset
from shoal.engine.models.experts.router import SUMS, Router, find_modules
from shoal.engine.models.mixture_of_depths import COUNTS, MixtureOfDepths
from shoal.engine.models.transformer import Transformer, initialise
from shoal.engine.optim.build import build, rate_factor, weight_decay
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.schedule import learning_rate
from shoal.engine.optim.shards import Shards
from shoal.engine.optim.sophia import Sophia
from shoal.pipeline.from_layout import build_layout_program
from shoal.spec.catalog import ModelShape
from shoal.spec.config import OptimizerConfig, RunConfig
from shoal.spec.number_formats import FORMATS
from shoal.testing.verify.curvature import estimate_curvature
from shoal.testing.verify.emulate import accumulate_gradients, emulate_updates, gradient_of
from shoal.testing.verify.float8 import multiply_in_float8
from shoal.testing.verify.trace import Choices, Tracer


@dataclass(frozen=True)
class ComparisonJob:
    """One comparison of a layout with one device."""

    rules: dict[str, RunConfig]  # the run with each update rule, by name
    shape: ModelShape
    steps: int
    folder: Path  # of the reference's files
    inject: str = ""  # a fault of `shoal.testing.verify.faults`
    trace: bool = False  # whether to compare the activations of the last step


@dataclass(frozen=True)
class StepTotals:
    """Results of one step that both sides report.

    Attributes:
        loss: mean over the global batch's unmasked tokens [nats].
        gradient_norm: before clipping.
        routing: counts of each expert layer, [layers, `Router.tally`]; None on a rank without any.
        choices: hash of the experts of all tokens, by layer (`shoal.testing.verify.trace.Choices`).
        depths: counts of each Mixture-of-Depths layer, [layers, `MixtureOfDepths.tally`]; None on a rank without any.
    """

    loss: float
    gradient_norm: float
    routing: Tensor | None
    choices: dict[int, int]
    depths: Tensor | None


@dataclass(frozen=True)
class StepFacts(StepTotals):
    """Results of one step on one device; the tensors are in a file (see `step_file`).

    Attributes:
        tokens: unmasked targets of each sample of the global batch.
        gradients: largest absolute value of each parameter's clipped gradient, and of each expert's part of it, by
            `expert_name`.
        weights: the same of each updated parameter.
    """

    tokens: tuple[int, ...]
    gradients: dict[str, float]
    weights: dict[str, float]


def expert_name(name: str, expert: int) -> str:
    """Return the name of one expert's part of a parameter."""
    return f"{name}[{expert}]"


def with_experts(name: str, tensor: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter by name and, if its dim 0 is the experts, each expert's part, counting from ``first``."""
    yield name, tensor
    if ".experts." in name:
        yield from ((expert_name(name, expert), part) for expert, part in enumerate(tensor, first))


def parameter_of(name: str) -> str:
    """Return the parameter of a name or an `expert_name`."""
    return name.partition("[")[0]


def step_file(folder: Path, rule: str, step: int) -> Path:
    """Return the file of a step's unsharded float64 tensors, ``gradient/NAME`` and ``weight/NAME``."""
    return folder / f"{rule}-{step}.safetensors"


def trace_file(folder: Path) -> Path:
    """Return the file of the traced step's activations, ``forward/MODULE`` and ``backward/MODULE``; dim 0 is samples.
    """
    return folder / "trace.safetensors"


def synthetic(config: RunConfig, shape: ModelShape) -> SyntheticDataset:
    """Return random tokens with very uneven masks, and packed documents if the run has them."""
    data = config.data
    return SyntheticDataset(shape.vocab, data.sequence_length, config.train.seed, documents=data.document_mask)


def run_reference(job: ComparisonJob, rule: str) -> list[StepFacts]:
    """Train on one device for the steps of a job with one of its rules, and write a `step_file` for each.

    Only asynchronous pipelines use ``parallel``: it determines which micro-batch uses and updates which weights.
    """
    config, samples = job.rules[rule], synthetic(job.rules[rule], job.shape)
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
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    return build(config, Shards.of(
        ((name, p.detach(), gradient_of(p)) for name, p in named.items()),
        lambda name, p: weight_decay(config, p.shape), lambda name: rate_factor(config, name),
    ))


class PlainTorch:
    """torch's AdamW or SGD, parameter by parameter."""

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig):
        groups = [
            {"params": [p], "weight_decay": config.weight_decay if p.dim() > 1 else 0.0,
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
        gradients = {name: gradient_of(p).clone() for name, p in model.named_parameters()}
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
    gradients = [gradient_of(p) for p in model.parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
    return norm


def _largest(tensors: dict[str, Tensor]) -> dict[str, float]:
    parts = (part for name, t in tensors.items() for part in with_experts(name, t))
    return {name: part.abs().max().item() for name, part in parts}
