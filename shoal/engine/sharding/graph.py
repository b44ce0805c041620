"""The operators of one training step, forward and backward, as plain data.

    parameters, buffers, inputs ----> forward operators ----> outputs
                                          |  saved
    gradients of the outputs -------> backward operators ---> gradients of parameters (and of a stage's inputs)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from string import ascii_uppercase
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

FORWARD, BACKWARD = "forward", "backward"
RESHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"}
VIEWS = RESHAPES | {"permute", "transpose", "t", "expand", "slice", "select"}


@dataclass(frozen=True)
class Ref:
    """A tensor among an operator's arguments, by the name of the operator that makes it."""

    name: str


@dataclass(frozen=True)
class Operator:
    """An operator, or the source of a tensor from outside.

    Attributes:
        kind: parameter, buffer, input, boundary (what another stage makes), gradient (of an output), or call.
        target: of a call, as ``mm.default``; of a parameter, its name in the module.
        args, kwargs: of a call; tensors as `Ref`.
        phase: the latest possible one: backward if only backward operators need it.
    """

    name: str
    kind: str
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    phase: str = FORWARD

    @property
    def op(self) -> str:
        """The name of a call without its overload, such as ``mm``; else empty."""
        return self.target.split(".")[0] if self.kind == "call" else ""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it reads, in order, with repetitions."""
        return tuple(leaf.name for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The elements along each dim of its output, by the letters A, B, C, ... of a `Sharding`."""
        return dict(zip(ascii_uppercase, self.shape, strict=False))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def call(self, tensors: tuple[Tensor, ...]) -> Any:
        """Run it on tensors, or blocks of them, for its operands."""
        if self.op == "product":
            return torch.einsum(self.args[2], *tensors)
        left = iter(tensors)
        args, kwargs = tree_map_only(Ref, lambda _: next(left), (self.args, self.kwargs))
        return overload(self.target)(*args, **kwargs)


@dataclass(frozen=True)
class OperatorGraph:
    """The operators of a training step.

    Attributes:
        ops: in an order in which they can run.
        gradients: from a parameter or a boundary to the operator that makes its gradient.
    """

    ops: dict[str, Operator]
    outputs: tuple[str, ...]  # of the forward pass
    gradients: dict[str, str]

    @property
    def parameters(self) -> list[Operator]:
        return [op for op in self.ops.values() if op.kind == "parameter"]

    def users(self) -> dict[str, list[Operator]]:
        """Return the operators that read each operator's output."""
        found: dict[str, list[Operator]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for name in dict.fromkeys(op.operands):
                found[name].append(op)
        return found


@cache
def overload(target: str) -> Any:
    """Return the ATen (or other) operator of a name."""
    namespace, _, name = target.rpartition("::")
    name, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), name), kind)


def assign_phases(ops: dict[str, Operator], outputs: tuple[str, ...], gradients: dict[str, str]) -> OperatorGraph:
    """Drop operators without effect, and give each of the others the latest possible phase."""
    after_gradient: set[str] = set()
    for op in ops.values():
        if op.kind == "gradient" or after_gradient.intersection(op.operands):
            after_gradient.add(op.name)
    forward, needed = set(outputs), {*outputs, *gradients.values()}
    for op in reversed(ops.values()):
        if op.name in forward:
            forward.update(op.operands)
        if op.name in needed:
            needed.update(op.operands)
    kept = {}
    for name, op in ops.items():
        if op.kind != "call" or name in needed:
            late = name in after_gradient or (op.kind == "call" and name not in forward)
            kept[name] = replace(op, phase=BACKWARD if late else FORWARD)
    return OperatorGraph(kept, outputs, gradients)
