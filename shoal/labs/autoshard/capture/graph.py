"""The operators of one training step, forward and backward, as plain data.

    parameters, buffers, inputs ----> forward operators ----> outputs
                                          |  saved
    gradients of the outputs -------> backward operators ---> gradients of parameters (and of a stage's inputs)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD = "forward", "backward"
RESHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"}
VIEWS = RESHAPES | {"permute", "transpose", "t", "expand", "slice", "select"}


@dataclass(frozen=True)
class Ref:
    """A tensor among an operator's arguments, by the operator that makes it."""

    name: str


@dataclass(frozen=True)
class Operator:
    """An operator, or where a tensor comes from outside.

    Attributes:
        name: of the one tensor that it makes.
        kind: parameter, buffer, input, boundary (what another stage makes), gradient (of an output), or call.
        target: of a call, as ``mm.default``; of a parameter, its name in the module.
        args, kwargs: of a call; tensors as `Ref`.
        phase: when it must be done: backward if only backward operators need it.
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
        """A call without its overload: ``mm``; else nothing."""
        return self.target.split(".")[0] if self.kind == "call" else ""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it reads, in order; one that is read twice is there twice."""
        return tuple(refs((self.args, self.kwargs)))

    @property
    def numel(self) -> int:
        """Elements of what it makes."""
        return math.prod(self.shape)

    def call(self, tensors: tuple[Tensor, ...], args: tuple | None = None) -> Any:
        """Do it, on other tensors of the same meaning.

        Args:
            args: in place of its own, where these name sizes of whole tensors.
        """
        if self.op == "product":
            return torch.einsum(self.args[2], *tensors)
        left = iter(tensors)
        return overload(self.target)(*put(args or self.args, left), **put(self.kwargs, left))


@dataclass(frozen=True)
class OperatorGraph:
    """The operators of a training step.

    Attributes:
        ops: in an order in which they can be done.
        outputs: what the forward pass gives back.
        gradients: from a parameter, a boundary or an input to the operator that makes its gradient.
    """

    ops: dict[str, Operator]
    outputs: tuple[str, ...]
    gradients: dict[str, str]

    @property
    def parameters(self) -> list[Operator]:
        """Where weights come from."""
        return [op for op in self.ops.values() if op.kind == "parameter"]

    def users(self) -> dict[str, list[Operator]]:
        """Who reads what an operator makes."""
        found: dict[str, list[Operator]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for name in dict.fromkeys(op.operands):
                found[name].append(op)
        return found


def refs(values: Any) -> list[str]:
    """The names of all tensors in nested arguments."""
    if isinstance(values, Ref):
        return [values.name]
    if isinstance(values, (tuple, list)):
        return [name for value in values for name in refs(value)]
    if isinstance(values, dict):
        return refs(tuple(values.values()))
    return []


def put(values: Any, tensors) -> Any:
    """The same arguments with tensors for their names, in order."""
    if isinstance(values, Ref):
        return next(tensors)
    if isinstance(values, (tuple, list)):
        return type(values)(put(value, tensors) for value in values)
    if isinstance(values, dict):
        return {key: put(value, tensors) for key, value in values.items()}
    return values


@cache
def overload(target: str) -> Any:
    """An operator by its name."""
    room, _, name = target.rpartition("::")
    name, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, room or "aten"), name), kind)


def phased(ops: dict[str, Operator], outputs: tuple[str, ...], gradients: dict[str, str]) -> OperatorGraph:
    """Without what nobody needs; each operator as late as it can be."""
    forward: set[str] = set()
    needed: set[str] = set()
    grown: set[str] = set()  # what depends on a gradient
    for op in ops.values():
        if op.kind == "gradient" or grown.intersection(op.operands):
            grown.add(op.name)
    forward.update(outputs)
    needed.update((*outputs, *gradients.values()))
    for op in reversed(ops.values()):
        if op.name in forward:
            forward.update(op.operands)
        if op.name in needed:
            needed.update(op.operands)
    kept = {}
    for name, op in ops.items():
        if op.kind != "call" or name in needed:
            late = name in grown or (op.kind == "call" and name not in forward)
            kept[name] = Operator(name, op.kind, op.target, op.shape, op.dtype, op.args, op.kwargs,
                            BACKWARD if late else FORWARD)  # fmt: skip
    return OperatorGraph(kept, outputs, gradients)
