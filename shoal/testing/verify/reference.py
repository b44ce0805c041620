"""The single-device reference: a plain model, a plain loop over the whole global batch, a plain optimizer.

It shares with the engine the model's definition, its initial values and its data, and nothing of how they are run: no
mesh, no program, no bucket, no accumulation hook. It is always computed in float64, so that its own rounding is no part
of the errors that are printed.
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
from shoal.testing.verify.curvature import learn_curvature
from shoal.testing.verify.emulate import emulated_updates, gradient_of
from shoal.testing.verify.float8 import multiply_in_float8
from shoal.testing.verify.routing_trace import Choices
from shoal.testing.verify.trace import Tracer


@dataclass(frozen=True)
class ComparisonJob:
    """One comparison of a layout with one device.

    Attributes:
        rules: by name, the run with that optimizer.
        shape: the model.
        steps: training steps.
        folder: the reference's files.
        plant: a fault of `shoal.testing.verify.faults`, or "".
        trace: whether to compare the activations of the last step.
    """

    rules: dict[str, RunConfig]
    shape: ModelShape
    steps: int
    folder: Path
    plant: str = ""
    trace: bool = False


@dataclass(frozen=True)
class StepTotals:
    """What both sides report of one step.

    Attributes:
        loss: mean over the global batch's unmasked tokens [nats].
        gradient_norm: before clipping.
        routing: what each layer with experts has counted, [layers, numbers of a `Router.tally`]; of ranks None without.
        choices: which experts each token was given to, by layer (`shoal.testing.verify.routing_trace`).
        depths: what each layer that takes some tokens has, [layers, numbers of a `MixtureOfDepths.tally`]; as routing.
    """

    loss: float
    gradient_norm: float
    routing: Tensor | None
    choices: dict[int, int]
    depths: Tensor | None


@dataclass(frozen=True)
class StepFacts(StepTotals):
    """What one device computes in one step; the tensors themselves are in a file (see `step_file`).

    Attributes:
        tokens: unmasked targets of each sample of the global batch.
        gradients: the largest absolute value of each parameter's gradient, as the optimizer sees it (clipped), and of
            each expert's part of it, by `expert_name`.
        weights: the same of each updated parameter.
    """

    tokens: tuple[int, ...]
    gradients: dict[str, float]
    weights: dict[str, float]


def expert_name(name: str, expert: int) -> str:
    """The name of one expert's part of a parameter."""
    return f"{name}[{expert}]"


def with_experts(name: str, tensor: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter and, if its dim 0 are a layer's experts, each expert's part of it, by name.

    Args:
        first: the expert at index 0.
    """
    yield name, tensor
    if ".experts." in name:
        yield from ((expert_name(name, expert), part) for expert, part in enumerate(tensor, first))


def parameter_of(name: str) -> str:
    """The parameter that a name or an `expert_name` is of."""
    return name.partition("[")[0]


def step_file(folder: Path, rule: str, step: int) -> Path:
    """Where a step's tensors are: ``gradient/NAME`` and ``weight/NAME``, whole, float64."""
    return folder / f"{rule}-{step}.safetensors"


def trace_file(folder: Path) -> Path:
    """Where the traced step's activations are: ``forward/MODULE`` and ``backward/MODULE``, dim 0 the samples."""
    return folder / "trace.safetensors"


def synthetic(config: RunConfig, shape: ModelShape) -> SyntheticDataset:
    """The data of a verification: random tokens, strongly uneven masks, packed documents where the run has them."""
    data = config.data
    return SyntheticDataset(shape.vocab, data.sequence_length, config.train.seed, documents=data.document_mask)


def run_reference(job: ComparisonJob, rule: str) -> list[StepFacts]:
    """Train on one device for the steps of a job with one of its rules, and write a `step_file` for each.

    Of ``parallel`` only an asynchronous pipeline is read: which micro-batch uses and makes which weights.
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
            learn_curvature(model, config, update, _batches(config, samples, step), step)
        facts.append(_step(model, update.step, config, samples, step, step_file(job.folder, rule, step)))
        if history:
            history.end_step()
        if tracer is not None:
            # Entry m of the trace is sample m; of several at a time, nothing is known of each one's loss.
            taken = {k: parts for k, parts in tracer.taken().items() if at_once(config) == 1 or not k.endswith("/loss")}
            save_file({key: torch.cat(parts) for key, parts in taken.items()}, trace_file(job.folder))
    return facts


def at_once(config: RunConfig) -> int:
    """Samples that go through the model together. One bounds the memory of the activations; where products are in 8
    bits, a micro-batch, which has its scales in common."""
    in_float8 = FORMATS[config.train.precision].products != "compute"
    return config.parallel.micro_batch if in_float8 else 1


def plain_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> Rule | PlainTorch:
    """What updates the model: torch's own AdamW and SGD on the parameters, other rules as they are on one device.

    Weight decay on matrices only.
    """
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
        """Make one update."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        self.optimizer.step()


def _batches(config: RunConfig, samples: Dataset, step: int) -> list[Batch]:
    """The step's samples, one at a time: that bounds the memory of the activations."""
    n = config.train.global_batch
    return [samples.batch([step * n + i]) for i in range(n)]


def _step(
    model: Transformer, update: Callable[[float], None], config: RunConfig, samples: Dataset, step: int, file: Path
) -> StepFacts:
    n = config.train.global_batch
    counts = tuple(batch.unmasked() for batch in _batches(config, samples, step))
    some = at_once(config)
    batches = [samples.batch(range(step * n + i, step * n + i + some)) for i in range(0, n, some)]
    parameters = dict(model.named_parameters())
    rate = learning_rate(step, config.train.steps, config.optimizer)
    routers, depths = find_modules(model, Router), find_modules(model, MixtureOfDepths)
    for counter in (*routers, *depths):
        counter.reset_tally()
    choices = Choices([model], model.shape, config.data.sequence_length)
    program = build_layout_program(config.parallel, config.parallel.microbatches(n))
    if program.updates > 1:
        gradients: dict[str, Tensor] = {}

        def one_update() -> None:
            gradients.update((name, gradient_of(p).clone()) for name, p in parameters.items())
            update(rate)

        each = len(batches) // program.microbatches
        grouped = [batches[m * each : (m + 1) * each] for m in range(program.microbatches)]
        losses, norms = zip(*emulated_updates(model, program, grouped, one_update), strict=True)
        total, norm = sum(losses), sum(norms) / len(norms)
    else:
        total, norm, gradients = _one_update(model, batches, max(1, sum(counts)), config)
        update(rate)
    for router in routers:
        router.rebalance(_tally(router)[SUMS:])
    routing = torch.stack([_tally(router) for router in routers]) if routers else torch.zeros(0, SUMS)
    chosen = torch.stack([_tally(depth) for depth in depths]) if depths else torch.zeros(0, COUNTS + 1)
    weights = {name: p.detach() for name, p in parameters.items()} | dict(model.named_buffers())
    save_file(
        {f"gradient/{name}": t for name, t in gradients.items()} | {f"weight/{name}": t for name, t in weights.items()},
        file,
    )
    return StepFacts(
        total / max(1, sum(counts)), norm, routing, choices.taken(), chosen, counts, _largest(gradients),
        _largest(weights),
    )


def _tally(counted: Router | MixtureOfDepths) -> Tensor:
    """What a router has counted since the step began."""
    assert counted.tally is not None
    return counted.tally


def _one_update(
    model: Transformer, batches: list[Batch], tokens: int, config: RunConfig
) -> tuple[float, float, dict[str, Tensor]]:
    """The summed loss, the gradient norm before clipping, and the clipped gradients, which are left in the model."""
    model.zero_grad(set_to_none=False)  # the update may hold on to them
    total = 0.0
    for batch in batches:
        loss = model(
            batch.tokens, batch.targets, batch.documents, samples=batch.samples, sequences=config.train.global_batch
        )
        (loss / tokens).backward()
        total += loss.item()
    parameters = dict(model.named_parameters())
    norm = torch.stack([gradient_of(p).norm() for p in parameters.values()]).norm().item()
    clip = config.optimizer.clip_norm
    if clip and norm > clip:
        for p in parameters.values():
            gradient_of(p).mul_(clip / norm)
    return total, norm, {name: gradient_of(p).clone() for name, p in parameters.items()}


def _largest(tensors: dict[str, Tensor]) -> dict[str, float]:
    parts = (part for name, t in tensors.items() for part in with_experts(name, t))
    return {name: part.abs().max().item() for name, part in parts}
