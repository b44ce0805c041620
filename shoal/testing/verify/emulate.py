"""Emulate an asynchronous pipeline on one device: each stage with the weight version that the program names.

Stages are only names of parameters here. Each micro-batch runs through the full model, with the parameters of each
stage taken from that stage's version; its gradients go into the update that the program names. Hence neither the order
in which the pipeline overlaps micro-batches nor anything that it stores or sends matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.engine.data.batches import Batch
from shoal.engine.models.initial import on_meta
from shoal.engine.models.transformer import Transformer
from shoal.pipeline.partition import assign_layers
from shoal.pipeline.program import Op, Program
from shoal.spec.catalog import ModelShape

TIED = {"head.weight": "embed.token.weight"}


def emulate_updates(model: Transformer, program: Program, samples: list[list[Batch]]) -> Iterator[float]:
    """Run one step of a program; yield each update's summed loss [nats], with its gradients in the model.

    The caller updates the model before it continues.

    Args:
        samples: single samples of each micro-batch, of all replicas.
    """
    params = dict(model.named_parameters())
    used = {(a.stage, a.microbatch): a.version for order in program.actions for a in order if a.op is Op.FORWARD}
    stages = map_parameters_to_stages(model.shape, program)
    for p in params.values():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # the optimizer may hold references to gradients
    versions = []
    for number in range(program.updates):
        versions.append({name: p.detach().clone() for name, p in params.items()})
        microbatches = [m for m in range(program.microbatches) if program.update_by_microbatch[m] == number]
        tokens = count_tokens([batch for m in microbatches for batch in samples[m]])
        model.zero_grad(set_to_none=False)
        total = 0.0
        for m in microbatches:
            weights = {
                name: versions[used[stage, m]][owner(name, model.shape)].detach().requires_grad_()
                for name, stage in stages.items()
            }
            for batch in samples[m]:
                loss = functional_call(
                    model, weights, (batch.tokens, batch.targets, batch.documents), {"samples": batch.samples},
                    tie_weights=False,
                )
                gradients = torch.autograd.grad(loss / tokens, list(weights.values()))
                for name, gradient in zip(weights, gradients, strict=True):
                    get_gradient(params[owner(name, model.shape)]).add_(gradient)
                total += loss.item()
        yield total


def owner(name: str, shape: ModelShape) -> str:
    """Return the name of the parameter with these values: of a tied head, the embedding."""
    return TIED.get(name, name) if shape.tied else name


def map_parameters_to_stages(shape: ModelShape, program: Program) -> dict[str, int]:
    """Return the stage of each parameter that a forward uses, by its name in the model, tied ones included."""
    parts, depth = assign_layers(shape, program), program.depth
    layer_stage = {str(layer): stage for stage, layers in enumerate(parts) for layer in layers}
    with on_meta():
        names = [name for name, _ in Transformer(shape).named_parameters(remove_duplicate=False)]
    first, last = ("embed.",), ("norm.", "head.")
    return {
        name: 0 if name.startswith(first) else depth - 1 if name.startswith(last) else layer_stage[name.split(".")[1]]
        for name in names
    }


# ---- gradients -------------------------------------------------------------------------------------------------------


def accumulate_gradients(
    model: Transformer, batches: Sequence[Batch], compute_loss: Callable[[int, Batch], Tensor]
) -> float:
    """Leave in the model the gradients of the mean loss over unmasked tokens; return the summed loss [nats].

    Args:
        compute_loss: summed loss of a batch, from its index and the batch.
    """
    model.zero_grad(set_to_none=False)  # the optimizer may hold references to gradients
    tokens, total = count_tokens(batches), 0.0
    for i, batch in enumerate(batches):
        loss = compute_loss(i, batch)
        (loss / tokens).backward()
        total += loss.item()
    return total


def get_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def count_tokens(batches: Sequence[Batch]) -> int:
    """Return the unmasked tokens of some batches, at least 1."""
    return max(1, sum(batch.unmasked() for batch in batches))
