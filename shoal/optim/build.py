"""An optimizer over flat runs of parameters, with its states allocated from the start."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal.config import OptimizerConfig

# The tensors that each rule keeps per parameter element.
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}


class FlatOptimizer:
    """An element-wise update of flat shards.

    Args:
        runs: (whether weight decay applies, weights, gradients), flat tensors of one length; both are used in place.
    """

    def __init__(self, config: OptimizerConfig, runs: Iterable[tuple[bool, Tensor, Tensor]]):
        self.name = config.name
        self.parameters: list[nn.Parameter] = []
        groups: dict[bool, list[nn.Parameter]] = {}
        for decay, weights, gradients in runs:
            parameter = nn.Parameter(weights)  # shares the memory of `weights`
            parameter.grad = gradients
            self.parameters.append(parameter)
            groups.setdefault(decay, []).append(parameter)
        options = [
            {"params": parameters, "weight_decay": config.weight_decay if decay else 0.0}
            for decay, parameters in groups.items()
        ] or [{"params": []}]  # a rank whose shards are padding alone updates nothing
        if config.name == "adamw":
            self.rule: torch.optim.Optimizer = torch.optim.AdamW(
                options, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
            )
        else:
            self.rule = torch.optim.SGD(options, lr=config.learning_rate, fused=True)
        for parameter in self.parameters:
            if STATES[config.name]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                states = {name: torch.zeros_like(parameter) for name in STATES[config.name]}
                self.rule.state[parameter] = {"step": step, **states}

    def step(self, learning_rate: float) -> None:
        """Update the weights from the gradients."""
        for group in self.rule.param_groups:
            group["lr"] = learning_rate
        self.rule.step()

    def states(self) -> dict[str, list[Tensor]]:
        """For each state's name, one flat tensor for each run, in order."""
        return {
            name: [self.rule.state[parameter][name] for parameter in self.parameters] for name in STATES[self.name]
        }

    def resume_at(self, step: int) -> None:
        """Continue as after ``step`` updates (Adam's bias correction counts them)."""
        for state in self.rule.state.values():
            if "step" in state:
                state["step"].fill_(step)

    def bytes(self) -> int:
        """Bytes of the states."""
        return sum(t.numel() * t.element_size() for tensors in self.states().values() for t in tensors)
