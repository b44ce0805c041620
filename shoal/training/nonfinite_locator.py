"""Locate the first NaN or Inf: rerun the step without its update and check every tensor.

The weights are unchanged and the step number determines the samples, so the rerun computes the same values. Collectives
spread NaNs to nearly all ranks; the message names the rank and module where one occurred first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.engine.collectives.json_collectives import all_gather, world
from shoal.engine.parallel.apply import LocalStage
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite

WEIGHTS, FORWARD, BACKWARD = range(3)  # in the order in which NaNs spread
NAMED = 2  # maximum number of ranks named in a message


@dataclass(frozen=True)
class _Finding:
    """First non-finite value on one rank.

    Attributes:
        when: sort key, smallest where the value occurred first (see `ValueWatch.see`).
        where: description of the rank.
        what: module or parameter.
    """

    when: tuple[int, int, int]
    where: str
    what: str


class ValueWatch(ABC):
    """Base class that passes each value of a step on this rank, forward and backward, to `see`."""

    def __init__(self, engine: Engine):
        self.mesh, self.depth = engine.mesh, engine.program.depth
        self.position = 0

    @abstractmethod
    def see(self, when: tuple[int, int, int], what: str, value: Tensor) -> None:
        """Process one value.

        Args:
            when: sort key, smaller for values made earlier: the kind; the number of pipeline stages that the value
                may have passed through; the number of values seen on this rank (equal order on ranks with the same
                stage).
            what: module or parameter.
        """

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
        """Run a step without its update."""
        hooks = [hook for stage in engine.stages for hook in self.attach(stage)]
        self.position = 0  # shards hold different numbers of weights
        try:
            engine.step(step, dry=True)
        finally:
            for hook in hooks:
                hook.remove()
            for stage in engine.stages:
                stage.parameters.watch = None


class _Watch(ValueWatch):
    """Watch that keeps the first non-finite value of this rank."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.found: _Finding | None = None

    def see(self, when: tuple[int, int, int], what: str, value: Tensor) -> None:
        if self.found is None and not _finite(value):
            self.found = _Finding(when, self.mesh.describe(), what)


def locate_nonfinite(engine: Engine, step: int, error: NonFinite) -> str:
    """Return a message that names the first rank and module with a non-finite value in ``step``. Collective."""
    watch = _Watch(engine)
    for name, pieces in engine.parameters.weights().items():
        for piece in pieces:
            watch.look(WEIGHTS, 0, f"the weights of {name}", piece.tensor)
    watch.run(engine, step)
    every = all_gather(watch.found and astuple(watch.found), world() if engine.mesh.layout.world_size > 1 else None)
    found = [_Finding(*finding) for finding in every if finding is not None]
    if not found and not error.untouched:
        return f"{error}. Run again with the weights as they are now, the step is finite everywhere."
    if not found:
        return f"{error}. Run again, the step is finite everywhere: the fault was not in weights, data or code."
    first = min(found, key=lambda finding: finding.when)
    where = [finding.where for finding in found if finding.when == first.when]
    at_once = " and ".join(where[:NAMED]) + (f" and {len(where) - NAMED} more at once" if len(where) > NAMED else "")
    weights = "The weights are unchanged and saved" if error.untouched else "The last checkpoint stands"
    spread = f"; it spread to {len(found) - len(where)} other ranks" if len(found) > len(where) else ""
    return f"{error}. First on {at_once}, {first.what}{spread}. {weights}."


def _finite(value: Tensor) -> bool:
    # Detached: otherwise autograd would save more, and recomputation would find a different number of tensors.
    return bool(torch.isfinite(value.detach()).all())
