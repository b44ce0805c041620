"""Where a number that is not finite came from: the step is run again, without its update, and every value watched.

The weights are those before the step and its samples follow from its number, so the run shows the same values. The
first module, in the order of execution, whose output or gradient is not finite is named, with its rank.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.train.engine import Engine, NonFinite


def blame(engine: Engine, step: int, error: NonFinite) -> str:
    """A message that names the first rank and module where a value of ``step`` is not finite. Collective."""
    findings: list[str] = []
    hooks = [
        hook
        for name, module in engine.stage.module.named_modules()
        if not isinstance(module, nn.ModuleDict)
        for hook in (module.register_forward_hook(partial(_watch_output, findings, name or "the model")),)
    ]
    hooks += [
        parameter.register_hook(partial(_watch, findings, f"backward: the gradient of {name}"))
        for name, parameter in engine.stage.module.named_parameters()
    ]
    weights = [name for name, p in engine.stage.parameters.weights().items() if not all(_finite(x.tensor) for x in p)]
    try:
        engine.step(step, dry=True)
    finally:
        for hook in hooks:
            hook.remove()
    own = f"the weights of {weights[0]}" if weights else (findings[0] if findings else "")
    mine = f"{engine.mesh.describe()}, {own}" if own else ""
    every = [""] * engine.mesh.layout.world_size
    if dist.is_initialized() and len(every) > 1:
        dist.all_gather_object(every, mine)
    else:
        every = [mine]
    # Wherever it started, later values are not finite either: the earliest pass tells, and weights before any.
    found = sorted((line for line in every if line), key=_how_early)
    if not found:
        return f"{error}. Run again, the step is finite everywhere: the fault was not in weights, data or code."
    others = len(found) - 1
    return f"{error}. First on {found[0]}" + (f" (and on {others} other ranks)" if others else "") + \
        ". The weights are unchanged and saved."


def _how_early(line: str) -> int:
    return next(i for i, kind in enumerate(("the weights", "forward", "backward", "")) if kind in line)


def _watch_output(findings: list[str], name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
    _watch(findings, f"forward: the output of {name}", output)
    if output.requires_grad:
        output.register_hook(partial(_watch, findings, f"backward: the gradient at the output of {name}"))


def _watch(findings: list[str], where: str, value: Tensor) -> None:
    if not findings and not _finite(value):
        findings.append(where)


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())
