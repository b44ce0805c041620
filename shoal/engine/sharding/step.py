"""Execution of a plan: the operators of its forward or backward pass, on one rank's blocks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.engine.sharding.graph import BACKWARD, FORWARD, RESHAPES, Operator
from shoal.engine.sharding.named_axes import Sharding
from shoal.engine.sharding.plan import ENDS, ShardingPlan
from shoal.engine.sharding.ranks import MeshRank

MASK = "bernoulli.p"
"""Target of the operator that draws a mask of dropout from a shape."""

Values = dict[str, Tensor]
"""Blocks of a rank, by the operators that make them."""


class ShardedStep:
    """A training step of one rank, with a plan for all ranks of a mesh."""

    def __init__(self, plan: ShardingPlan, rank: MeshRank, device: torch.device):
        self.plan, self.rank = plan, rank
        self.ops = {name: _place(op, device) for name, op in plan.graph.ops.items()}
        self._unread = self._find_unread()

    def block(self, name: str, tensor: Tensor, sharding: Sharding | None = None) -> Tensor:
        """Return this rank's block of an unsharded tensor of the graph, by default as the plan keeps it."""
        return self.rank.block(tensor, sharding or self.plan.sharding(name), self.ops[name].sizes)

    def run(self, phase: str, values: Values, *, drops: bool = True) -> None:
        """Run a phase on the blocks of what it reads; add the blocks that it makes, and drop those without readers.

        Args:
            drops: whether masks of dropout are drawn, in full on each rank; else they are their mean, as in evaluation.
        """
        moved: dict[str, dict[Sharding, Tensor]] = {}  # for all readers in the phase
        for op in self.ops.values():
            if op.kind == "call" and op.phase == phase:
                if op.target == MASK and not drops:
                    values[op.name] = torch.full_like(values[op.operands[0]], op.args[1])
                else:
                    values[op.name] = self._run(op, values, moved)
                for name, later in self._unread.get(op.name, ()):
                    moved.pop(name, None)
                    if not later:
                        del values[name]

    def move(self, name: str, x: Tensor, before: Sharding, after: Sharding) -> Tensor:
        """Return this rank's block of a tensor in another sharding."""
        return x if before == after else self.rank.move_all(self.plan.moves[name, before, after], x)

    def _find_unread(self) -> dict[str, list[tuple[str, bool]]]:
        """Find, by operator, the tensors that it reads last in its phase, and whether the other phase reads them."""
        last: dict[tuple[str, str], str] = {}
        for op in self.ops.values():
            if op.kind == "call":
                last.update(((op.phase, name), op.name) for name in op.operands)
        found: dict[str, list[tuple[str, bool]]] = {}
        for (phase, name), reader in last.items():
            found.setdefault(reader, []).append((name, phase == FORWARD and (BACKWARD, name) in last))
        return found

    def _run(self, op: Operator, values: Values, moved: dict[str, dict[Sharding, Tensor]]) -> Tensor:
        split, mesh = self.plan.splits.get(op.name), self.plan.mesh
        if split is None:  # a constant
            return _run_local(op, tuple(values[name] for name in op.operands), op.shape)
        tensors = []
        for name, sharding in zip(op.operands, split.operands, strict=True):
            made = moved.setdefault(name, {})
            if sharding not in made:
                made[sharding] = self.move(name, values[name], self.plan.sharding(name), sharding)
            tensors.append(made[sharding])
        shape = split.made.local_shape(op.sizes, mesh)
        if op.op == "embedding":
            out = self._embedding(tensors, split.operands[0].dims[0][1])
        elif op.op == "embedding_dense_backward" and not op.args[4]:  # else scaled by token frequency, and not split
            out = self._embedding_backward(op, tensors, split.made.dims[0][1], shape[0])
        else:
            out = _run_local(op, tuple(tensors), shape)
        if isinstance(out, Tensor):
            if tuple(out.shape) != shape:
                raise RuntimeError(f"{op.name}: {op.target} of blocks has shape {tuple(out.shape)}, not {shape}")
            out = self.move(op.name, out, split.made, split.out)
        return out

    def _embedding(self, tensors: list[Tensor], axes: str) -> Tensor:
        """Read rows of this rank's part of the table; zeros for the tokens of other ranks."""
        table, tokens = tensors
        row = tokens - self.plan.mesh.position(self.rank.rank, axes) * len(table)
        mine = (row >= 0) & (row < len(table))
        return torch.where(mine.unsqueeze(-1), table[row.clamp(0, len(table) - 1)], 0.0)

    def _embedding_backward(self, op: Operator, tensors: list[Tensor], axes: str, rows: int) -> Tensor:
        gradient, tokens = tensors
        row = tokens - self.plan.mesh.position(self.rank.rank, axes) * rows
        mine = (row >= 0) & (row < rows) & (tokens != op.args[3])  # the padding's row has no gradient
        out = gradient.new_zeros(rows, gradient.shape[-1])
        return out.index_add_(0, row[mine], gradient[mine])


def _place(op: Operator, device: torch.device) -> Operator:
    """Let an operator that makes a tensor make it on a device."""
    args, kwargs = tree_map_only(torch.device, lambda _: device, (op.args, op.kwargs))
    return replace(op, args=args, kwargs=kwargs)


def _run_local(op: Operator, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """Run an operator on blocks; where its arguments name sizes, use the shape of its block."""
    if op.name.startswith(ENDS):
        return tensors[0]
    if op.op in RESHAPES:
        return tensors[0].reshape(shape)
    if op.op == "expand":
        return tensors[0].expand(shape)
    if op.op == "getitem":
        return tensors[0][op.args[1]]
    return op.call(tensors)
