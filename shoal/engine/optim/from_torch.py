"""Update rules from torch.optim on flat shards, fused where torch has a fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shards
from shoal.spec.config import OptimizerConfig


@dataclass(frozen=True)
class TorchRule:
    """Description of a torch.optim rule.

    Attributes:
        states: its per-element states.
        options: its arguments, except the choice of kernel.
        counts: whether it stores the number of updates.
    """

    make: Callable[..., torch.optim.Optimizer]
    states: tuple[str, ...]
    options: Callable[[OptimizerConfig], dict[str, Any]]
    counts: bool = True


MOMENTS = ("exp_avg", "exp_avg_sq")
TORCH = {
    "sgd": TorchRule(torch.optim.SGD, (), lambda c: {}, counts=False),
    # Polyak 1964; Sutskever et al. 2013, equation 4 (nesterov), in torch's form
    "momentum": TorchRule(
        torch.optim.SGD, ("momentum_buffer",),
        lambda c: {"momentum": c.momentum, "nesterov": c.nesterov and c.momentum > 0}, counts=False,
    ),
    # Duchi et al. 2011, figure 1 (diagonal)
    "adagrad": TorchRule(torch.optim.Adagrad, ("sum",), lambda c: {"eps": c.eps}),
    # Kingma & Ba 2015, algorithm 1; weight decay is added to the gradient
    "adam": TorchRule(torch.optim.Adam, MOMENTS, lambda c: {"betas": c.betas, "eps": c.eps}),
    # Loshchilov & Hutter 2019, algorithm 2; decoupled weight decay
    "adamw": TorchRule(torch.optim.AdamW, MOMENTS, lambda c: {"betas": c.betas, "eps": c.eps}),
}


def has_fused(name: str, device: torch.device) -> bool:
    """Return whether torch has a fused kernel of a rule for a device; Adagrad's for CUDA appeared in 2.13."""
    return name != "adagrad" or device.type == "cpu" or torch.__version__ >= "2.13"


class FromTorch(Rule):
    """A rule of `TORCH`, with its states allocated on construction."""

    def __init__(self, config: OptimizerConfig, shards: Shards, name: str):
        super().__init__(config, shards)
        made = self.made = TORCH[name]
        self.parameters: list[nn.Parameter] = []
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for shard in shards.shards:
            parameter = nn.Parameter(shard.weights)  # shares the memory of the weights
            parameter.grad = shard.gradient
            self.parameters.append(parameter)
            groups.setdefault((shard.decay, shard.rate), []).append(parameter)
        options = [
            {"params": parameters, "weight_decay": decay, "rate": rate} for (decay, rate), parameters in groups.items()
        ] or [{"params": [], "rate": 1.0}]  # a rank whose shards are all padding updates nothing
        fused = has_fused(name, shards.device)
        self.rule = made.make(
            options, lr=config.learning_rate, fused=fused, foreach=not fused, **made.options(config)
        )
        self.tensors = {kind: [torch.zeros_like(p) for p in self.parameters] for kind in made.states}
        for i, parameter in enumerate(self.parameters):
            if made.states:
                states = {kind: tensors[i] for kind, tensors in self.tensors.items()}
                if made.counts:
                    # Without a fused kernel, the host reads it in every update.
                    states["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
                self.rule.state[parameter] = states
        on_device = fused and shards.device.type == "cuda"
        # Fused kernels take the factor in float32.
        self.skips_on_device = self.fuses_scale = on_device and shards.dtype != torch.float64

    def apply(self, learning_rate: float, scale: Tensor | float, skip: Tensor | None) -> None:
        if not self.fuses_scale:
            super().apply(learning_rate, scale, skip)
            return
        # Attributes of torch's gradient scaler: fused kernels divide by the first and do nothing if the second is 1.
        divisor = None
        if isinstance(scale, Tensor):
            divisor = scale.float().reciprocal()
        elif scale != 1:
            divisor = torch.full((), 1 / scale, device=self.shards.device)
        self.rule.grad_scale, self.rule.found_inf = divisor, skip  # type: ignore[attr-defined]
        self.update(learning_rate)

    def update(self, learning_rate: float) -> None:
        for group in self.rule.param_groups:
            group["lr"] = learning_rate * group["rate"]
        self.rule.step()

    def resume_at(self, count: int) -> None:
        super().resume_at(count)
        for state in self.rule.state.values():
            if "step" in state:
                state["step"].fill_(count)
