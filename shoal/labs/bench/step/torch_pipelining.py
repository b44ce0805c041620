"""The schedules of torch.distributed.pipelining as variants."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from shoal.engine.models.loss import CrossEntropy
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.pipeline_stage import keep_stage
from shoal.labs.bench.step.torch_baselines import build_adamw, build_model
from shoal.labs.bench.step.workload import Workload
from shoal.labs.bench.variant import Step
from shoal.pipeline.partition import even_layers

MICROBATCHES = 8

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Schedules that both have: torch's name by shoal's name."""


class StageModule(nn.Module):
    """A pipeline stage with the interface of torch's runtime: one tensor in, one out."""

    def __init__(self, part: Transformer):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens [b, s] in the first stage, hidden states [b, s, h] in the others."""
        return self.part(x) if self.part.embed is not None else self.part(x[..., 0], hidden=x)


def pipeline(workload: Workload, rank: int, ranks: int, *, schedule: str) -> Step:
    """A pipeline with the same stages as shoal's.

    Args:
        schedule: a class of ``torch.distributed.pipelining.schedules``, without its prefix ``Schedule``. Looped and
            V-shaped schedules have two stages on each rank.
    """
    kind = getattr(schedules, f"Schedule{schedule}")
    several = schedule not in ("GPipe", "1F1B")
    places = [rank]
    if several:
        places.append(2 * ranks - 1 - rank if "V" in schedule else ranks + rank)
    count = ranks * len(places)
    stages = []
    for place in places:
        part = build_model(workload)
        keep_stage(part, place, even_layers(part.shape, count))
        stages.append(pipelining.PipelineStage(StageModule(part), place, count, torch.device("cpu")))
    cross_entropy = CrossEntropy()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) / workload.tokens

    runner = kind(stages if several else stages[0], MICROBATCHES, loss_fn=loss, scale_grads=False)
    optimizer = build_adamw(parameter for stage in stages for parameter in stage.submod.parameters())
    first, last = 0 in places, count - 1 in places

    def step(number: int) -> float:
        batch = workload.batch(number)
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs = (batch.tokens,) if first else ()
        outputs = {"target": batch.targets, "losses": losses} if last else {}
        runner.step(*inputs, **outputs)
        optimizer.step()
        return sum(loss.item() for loss in losses)

    return step
