"""Locate the first NaN or Inf: rerun the step without its update and check every tensor.

The weights are unchanged and the step number determines the samples, so the rerun computes the same values. Collectives
spread NaNs to nearly all ranks; the message names the rank and module where one occurred first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.engine.collectives.json_collectives import all_gather, world
from shoal.engine.parallel.apply import LocalStage
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite

WEIGHTS, FORWARD, BACKWARD = range(3)  # in the order in which NaNs spread
NAMED = 2  # maximum number of ranks named in a message

When = tuple[int, int, int]
"""Sort key of a value, smaller for values made earlier: the kind; the number of pipeline stages that the value may have
passed through; the number of values seen on this rank (equal order on ranks with the same stage)."""


class ValueWatch:
    """Pass each value of a step on this rank, forward and backward, to a function.

    Its hooks need the result of each linear layer. So a watched step computes apart what CUDA otherwise computes as one
    product for a fused operator (`shoal.engine.parallel.linear.Linear.joined`), and its values may differ by rounding.

    Args:
        see: function of the sort key, the module or parameter, and the value.
    """

    def __init__(self, engine: Engine, see: Callable[[When, str, Tensor], object]):
        self.depth, self.see = engine.program.depth, see
        self.position = 0

    def look(self, kind: int, part: int, what: str, value: Tensor) -> None:
        self.position += 1
        before = {WEIGHTS: 0, FORWARD: part, BACKWARD: self.depth - 1 - part}[kind]
        self.see((kind, before, self.position), what, value)

    def look_at_output(self, part: int, name: str, module: nn.Module, args: tuple, output: object) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            if not isinstance(value, Tensor):  # None, or token positions
                continue
            self.look(FORWARD, part, f"forward: the output of {name}", value)
            if value.requires_grad:
                gradient = f"backward: the gradient at the output of {name}"
                value.register_hook(partial(self.look, BACKWARD, part, gradient))

    def attach(self, stage: LocalStage) -> list[RemovableHandle]:
        """Watch the outputs of each module of a stage and every gradient."""
        names = {parameter: name for name, parameter in stage.module.named_parameters()}

        def look(parameter: nn.Parameter, total: Tensor) -> None:
            self.look(BACKWARD, stage.part, f"backward: the gradient of {names[parameter]}", total)

        stage.parameters.watch = look
        return [
            module.register_forward_hook(partial(self.look_at_output, stage.part, name or "the model"))
            for name, module in stage.module.named_modules()
            if not isinstance(module, nn.ModuleDict)
        ]

    def run(self, engine: Engine, step: int) -> None:
        """Run a step without its update. The losses of sources leave it out."""
        hooks = [hook for stage in engine.stages for hook in self.attach(stage)]
        add, engine.runtime.on_loss = engine.runtime.on_loss, None  # training runs the same step itself
        self.position = 0  # shards hold different numbers of weights
        try:
            engine.step(step, dry=True)
        finally:
            engine.runtime.on_loss = add
            for hook in hooks:
                hook.remove()
            for stage in engine.stages:
                stage.parameters.watch = None


def locate_nonfinite(engine: Engine, step: int, error: NonFinite) -> str:
    """Return a message that names the first rank and module with a non-finite value in ``step``. Collective."""
    first: list[Any] = []  # of this rank: sort key, description of the rank, module or parameter

    def see(when: When, what: str, value: Tensor) -> None:
        # Detached: otherwise autograd would save more, and recomputation would find a different number of tensors.
        if not first and not torch.isfinite(value.detach()).all():
            first.extend((when, engine.mesh.describe(), what))

    watch = ValueWatch(engine, see)
    for name, pieces in engine.parameters.weights().items():
        for piece in pieces:
            watch.look(WEIGHTS, 0, f"the weights of {name}", piece.tensor)
    watch.run(engine, step)
    every = all_gather(first, world() if engine.mesh.layout.world_size > 1 else None)
    found = [finding for finding in every if finding]
    if not found and not error.untouched:
        return f"{error}. A rerun with the current weights is finite on every rank."
    if not found:
        apart = " (except operators on joined products, which a rerun computes apart)"
        code = f"code{apart if engine.mesh.device.type == 'cuda' else ''}"
        return f"{error}. A rerun is finite on every rank: the fault was not in weights, data or {code}."
    earliest, _, what = min(found, key=itemgetter(0))
    ranks = [rank for when, rank, _ in found if when == earliest]
    named = " and ".join(ranks[:NAMED]) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    weights = "The weights are unchanged and saved" if error.untouched else "The last checkpoint is unaffected"
    spread = f"; it spread to {len(found) - len(ranks)} other ranks" if len(found) > len(ranks) else ""
    return f"{error}. First on {named}, {what}{spread}. {weights}."
