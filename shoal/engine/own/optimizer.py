"""Optimizers of one's own: any ``torch.optim.Optimizer`` on a rank's shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.boxes import Piece
from shoal.base.errors import UsageError
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import ShardPart, Shards
from shoal.engine.own.user_code import explained
from shoal.spec.config import OptimizerConfig

Groups = list[dict[str, Any]]
"""Groups of parameters as torch takes them, with "params", "lr" and "weight_decay" (0 for norms and biases)."""

MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]


class OwnRule(Rule):
    """An optimizer of a definition, on views of the shards in the shapes of their boxes.

    Its states are saved: tensors of a parameter's shape by box, others as they are. Whole numbers are set to the
    count of updates.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards, make: MakeOptimizer):
        super().__init__(config, shards)
        self.make = make
        self.held: list[tuple[ShardPart, nn.Parameter]] = []
        self.rates: dict[nn.Parameter, float] = {}
        self.groups: Groups = []
        for shard in shards.shards:
            group: list[nn.Parameter] = []
            for part in shard.parts:
                parameter = nn.Parameter(part.piece(shard.weights).tensor)  # shares the memory of the weights
                parameter.grad = part.piece(shard.gradient).tensor
                self.held.append((part, parameter))
                self.rates[parameter] = shard.rate
                group.append(parameter)
            if group:
                self.groups.append({"params": group, "lr": config.learning_rate * shard.rate,
                                    "weight_decay": shard.decay})  # fmt: skip
        self.rule = self._make()

    def _make(self) -> torch.optim.Optimizer | None:
        """Build the optimizer; a rank whose shards are all padding has none."""
        return make_optimizer(self.make, [dict(group) for group in self.groups]) if self.groups else None

    def update(self, learning_rate: float) -> None:
        if self.rule is None:
            return
        if self.count == 1:  # `_allocate` may have made an update
            self.rule = self._make()
        assert self.rule is not None, "the groups are the same"
        for group in self.rule.param_groups:
            group["lr"] = learning_rate * self.rates[group["params"][0]]
        with explained("its optimizer"):
            self.rule.step()

    def states(self) -> dict[str, dict[str, list[Piece]]]:
        found: dict[str, dict[str, list[Piece]]] = {}
        if self.rule is None:
            return found
        if not self.rule.state:
            self._allocate(self.rule)
        for part, parameter in self.held:
            for kind, value in self.rule.state[parameter].items():
                if not isinstance(value, Tensor):
                    continue
                pieces = found.setdefault(kind, {}).setdefault(part.name, [])
                if value.shape == parameter.shape:
                    pieces.append(Piece(part.global_shape, part.box, value, part.primary))
                else:
                    first = not any(part.box.offset)  # one rank has the first element
                    pieces.append(Piece.full(value, part.primary and first))
        return found

    def _allocate(self, rule: torch.optim.Optimizer) -> None:
        """Allocate the states by an update without a gradient, which is undone."""
        before = [parameter.detach().clone() for _, parameter in self.held]
        for _, parameter in self.held:
            assert parameter.grad is not None, "set when it was built"
            parameter.grad.zero_()
        with explained("its optimizer"):
            rule.step()
        with torch.no_grad():
            for (_, parameter), value in zip(self.held, before, strict=True):
                parameter.copy_(value)

    def resume_at(self, count: int) -> None:
        super().resume_at(count)
        for state in self.rule.state.values() if self.rule else ():
            for kind, value in state.items():
                if type(value) is int:
                    state[kind] = count


def make_optimizer(make: MakeOptimizer, groups: Groups) -> torch.optim.Optimizer:
    """Call a definition's function.

    Raises:
        UsageError: it fails, or returns something else.
    """
    with explained("its make_optimizer()"):
        made = make(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"model.module: its make_optimizer() returns {type(made).__name__}, not a torch.optim."
                         "Optimizer.\n  Give a function of groups, such as lambda groups: torch.optim.RMSprop(groups).")
    return made


def check_optimizer(make: MakeOptimizer, config: OptimizerConfig, *, sharded: bool) -> None:
    """Update a small matrix as a full one and in parts, by which an optimizer that needs full tensors is found.

    Raises:
        UsageError: it has another result in parts although parameters are sharded; its groups keep numbers, which
            checkpoints do not have; or it fails.
    """
    values = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    full = _updated(make, config, [values])
    if sharded and not torch.allclose(full, _updated(make, config, [values[:1, :3], values[:1, 3:], values[1:]])):
        raise UsageError("model.module: its optimizer updates a part of a parameter in another way than the full one, "
                         "and parallel.zero and parallel.tp split parameters.\n  Leave both out, or give one that "
                         "updates each element by itself.")


def count_states(make: MakeOptimizer, config: OptimizerConfig) -> float:
    """Return the number of states per element of a parameter."""
    parameter = nn.Parameter(torch.ones(6, 4))
    rule = make_optimizer(make, [{"params": [parameter], "lr": config.learning_rate, "weight_decay": 0.0}])
    parameter.grad = torch.ones_like(parameter)
    with explained("its optimizer"):
        rule.step()
    held = [value.numel() for value in rule.state[parameter].values() if isinstance(value, Tensor)]
    return sum(number for number in held if number > 1) / parameter.numel()


def _updated(make: MakeOptimizer, config: OptimizerConfig, parts: list[Tensor]) -> Tensor:
    held = [nn.Parameter(part.clone()) for part in parts]
    rule = make_optimizer(make, [{"params": held, "lr": config.learning_rate, "weight_decay": config.weight_decay}])
    before = _read_groups(rule)
    for step in range(3):
        for parameter, start in zip(held, parts, strict=True):
            parameter.grad = (start * (7 + step)).sin()
        with explained("its optimizer"):
            rule.step()
    after = _read_groups(rule)
    if changed := {key for old, new in zip(before, after, strict=True) for key, _ in new.items() - old.items()}:
        raise UsageError(f"model.module: the steps of its optimizer change {', '.join(sorted(changed))} of its groups, "
                         "which checkpoints do not store.\n  Give one that keeps them in the state of each parameter.")
    return torch.cat([parameter.detach().flatten() for parameter in held])


def _read_groups(rule: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Return the settings of an optimizer's groups as text, without the rate, which each update sets."""
    return [{key: repr(value) for key, value in group.items() if key not in ("params", "lr")}
            for group in rule.param_groups]
