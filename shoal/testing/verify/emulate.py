"""An asynchronous pipeline on one device: every stage of every micro-batch with the version of the weights that the
program says, one sample after the other.

Stages are nothing but names of parameters here. Each micro-batch runs through the whole model at once, with the
parameters of each stage taken from that stage's version; its gradients go into the update that the program says. So the
order in which the pipeline overlaps micro-batches plays no part, and neither does anything that it keeps or sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.engine.data.batches import Batch
from shoal.engine.models.transformer import Transformer
from shoal.pipeline.partition import assign_layers
from shoal.pipeline.program import Op, Program
from shoal.spec.catalog import ModelShape

TIED = {"head.weight": "embed.token.weight"}


def emulated_updates(
    model: Transformer, program: Program, samples: list[list[Batch]], update: Callable[[], None]
) -> Iterator[tuple[float, float]]:
    """Run one step of a program; the model's gradients are left as the last update used them.

    Args:
        model: its parameters are the newest version.
        samples: of each micro-batch, of all replicas.
        update: updates the model from its gradients.

    Yields:
        For each update, (summed loss [nats], gradient norm).
    """
    whole = dict(model.named_parameters())
    used = {(a.stage, a.microbatch): a.version for a in program.select_actions(Op.FORWARD)}
    stages = stages_of(model.shape, program)
    for p in whole.values():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # which the update may hold on to
    versions = [{name: p.detach().clone() for name, p in whole.items()}]
    for number in range(program.updates):
        mine = [m for m in range(program.microbatches) if program.update_by_microbatch[m] == number]
        tokens = max(1, sum(batch.unmasked() for m in mine for batch in samples[m]))
        model.zero_grad(set_to_none=False)
        total = 0.0
        for m in mine:
            weights = {
                name: versions[used[stage, m]][owner(name, model.shape)].detach().requires_grad_()
                for name, stage in stages.items()
            }
            for batch in samples[m]:
                loss = functional_call(
                    model, weights, (batch.tokens, batch.targets, batch.documents), tie_weights=False
                )
                gradients = torch.autograd.grad(loss / tokens, list(weights.values()))
                for name, gradient in zip(weights, gradients, strict=True):
                    gradient_of(whole[owner(name, model.shape)]).add_(gradient)
                total += loss.item()
        norm = torch.stack([gradient_of(p).norm() for p in whole.values()]).norm().item()
        update()
        versions.append({name: p.detach().clone() for name, p in whole.items()})
        yield total, norm


def owner(name: str, shape: ModelShape) -> str:
    """The name under which a parameter's values are known: a tied head's are the embedding's."""
    return TIED.get(name, name) if shape.tied else name


def stages_of(shape: ModelShape, program: Program) -> dict[str, int]:
    """For each parameter that a forward uses, by its place in the model, the stage that it is on."""
    parts, depth = assign_layers(shape, program), program.depth
    layer_stage = {str(layer): stage for stage, layers in enumerate(parts) for layer in layers}
    with torch.device("meta"):
        names = [name for name, _ in Transformer(shape).named_parameters(remove_duplicate=False)]
    first, last = ("embed.",), ("norm.", "head.")
    return {
        name: 0 if name.startswith(first) else depth - 1 if name.startswith(last) else layer_stage[name.split(".")[1]]
        for name in names
    }


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient that backward left in a parameter."""
    assert parameter.grad is not None
    return parameter.grad
