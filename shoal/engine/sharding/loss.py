"""A plan of a definition's loss, and one rank's part of it in training.

The exported loss and its backward run operator by operator on blocks (`ShardedStep`), as one node of autograd whose
inputs are this rank's blocks of the parameters. Around it nothing differs from other models: buckets, optimizers,
checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Number
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.utils._pytree import tree_leaves

from shoal.base.errors import UsageError
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.sharding.graph import BACKWARD, FORWARD
from shoal.engine.sharding.named_axes import block_box
from shoal.engine.sharding.plan import GIVEN, UPDATE, ShardingPlan
from shoal.engine.sharding.ranks import MeshRank
from shoal.engine.sharding.step import ShardedStep, Values

Format = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True)
class LossPlan:
    """A plan of a loss for batches of one shape in one precision.

    Attributes:
        plan: of the graph of the loss, for the ranks of ``parallel.tp``. A weight's optimizer states are kept as it is.
        leaves: of a batch: the format of a tensor, or another value.
        inputs: name of each tensor of a batch in the graph.
        returned: of the loss, the terms, and each metric's sum and terms: a number, or the operator that makes it.
        constants: tensors that the code makes from values, by their names.
    """

    plan: ShardingPlan
    precision: str
    micro_batch: int
    leaves: tuple[Any, ...]
    inputs: tuple[str, ...]
    returned: tuple[Any, ...]
    metrics: tuple[str, ...]
    constants: dict[str, Tensor]

    def kept(self) -> dict[str, str]:
        """Return how each weight is kept, by name: `[Ax, B]` is split along its first dim over the mesh axis x."""
        return {name: str(way) for name, (way, *_) in self.plan.weight_shardings().items()}

    def suits(self, tp: int, micro_batch: int, precision: str) -> bool:
        return (self.plan.mesh.ranks, self.micro_batch, self.precision) == (tp, micro_batch, precision)

    def split(self, module: nn.Module, rank: int) -> dict[str, ParamPlacement]:
        """Replace the split parameters of a module by a rank's blocks, without values; return their placements.

        Parameters that all ranks hold in full are left as they are. Gradients of blocks are summed by the plan.
        """
        mesh, found = self.plan.mesh, dict[str, ParamPlacement]()
        owners = [(owner, key, p) for owner in module.modules() for key, p in owner._parameters.items()]
        for name, full in list(module.named_parameters()):
            if UPDATE + name not in self.plan.splits:
                continue
            sharding, sizes = self.plan.sharding(name), self.plan.graph.ops[name].sizes
            if not sharding.used:
                continue
            box = block_box(sharding, rank, sizes, mesh)
            block = nn.Parameter(full.new_empty(box.shape))
            for owner, key, p in owners:
                if p is full:
                    setattr(owner, key, block)
            rest = "".join(axis for axis in mesh.axes if axis not in sharding.used)
            found[name] = ParamPlacement(name, tuple(full.shape), box, box.shape, copies=sharding.copies(mesh),
                                         primary=mesh.position(rank, rest) == 0)
        return found


class PlannedLoss:
    """A rank's part of a planned loss of a module, whose parameters are its blocks.

    Args:
        mesh: of the run; ``tp`` are the ranks of the plan.
    """

    def __init__(self, loss: LossPlan, module: nn.Module, mesh: Mesh):
        self.loss, self.module, self.mesh = loss, module, mesh
        self.step = ShardedStep(loss.plan, MeshRank(loss.plan.mesh, mesh.index("tp"), self._connect), mesh.device)
        ops = loss.plan.graph.ops.values()
        self.gradient = next(op.name for op in ops if op.kind == "gradient")
        self.outside = {op.name: op for op in ops if op.kind in ("parameter", "buffer")}
        self.training = True
        self.constants = {name: value.to(mesh.device) for name, value in loss.constants.items()}

    def check_same(self) -> None:
        """Raise `UsageError` if the ranks have other plans: each may have searched by itself. Collective."""
        digest = float(crc32(repr(self.loss.plan.splits).encode()))
        found = torch.tensor([digest, -digest], dtype=torch.float64, device=self.mesh.device)
        most, least = to_host(all_reduce(found, self.mesh.required_group("tp"), ReduceOp.MAX))
        if most != -least:
            raise UsageError("model.module: tensor_parallel = 'auto' found other splits on other ranks.\n  Start the "
                             "run with shoal train or shoal.Run, which search once, or give a table.")

    def compute(self, batch: Any) -> tuple[Tensor, Any, dict[str, list[Any]]]:
        """Return what `OwnModel.compute` does of the full module.

        Raises:
            UsageError: the batch is not as the plan's.
        """
        loss = self.loss
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers()) | self.constants
        trained = {name: p for name, p in parameters.items() if UPDATE + name in loss.plan.splits}
        values = {name: p.detach() for name, p in trained.items()}
        for name, op in self.outside.items():
            if name not in trained:
                full = (parameters if op.kind == "parameter" else buffers)[op.target]
                values[name] = self.step.block(name, full.detach())
        for name, tensor in zip(loss.inputs, self._check(batch), strict=True):
            if name in self.step.ops:
                values[name] = self.step.block(name, tensor)
        self.training = torch.is_grad_enabled()
        total = _Step.apply(self, values, list(trained), *trained.values())
        made = [total, *(each if isinstance(each, Number) else values[GIVEN + each] for each in loss.returned[1:])]
        pairs = zip(made[2::2], made[3::2], strict=True)
        return total, made[1], {name: [*pair] for name, pair in zip(loss.metrics, pairs, strict=True)}

    def run(self, phase: str, values: Values) -> None:
        """Run a phase; the graph has the casts of mixed precision as operators."""
        with torch.autocast(self.mesh.device.type, enabled=False):
            self.step.run(phase, values, drops=self.training)

    def _check(self, batch: Any) -> list[Tensor]:
        """Return the tensors of a batch."""
        leaves = tree_leaves(batch)
        found = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        if tuple(found) != self.loss.leaves:
            raise UsageError(f"model.module: its batch is {show_formats(found)}, and the split was planned for "
                             f"{show_formats(self.loss.leaves)}.\n  Make batches of one size, such as by padding in "
                             "collate, or lower parallel.tp to 1.")
        return [x for x in leaves if isinstance(x, Tensor)]

    def _connect(self, ranks: tuple[int, ...]) -> Group:
        everyone = len(ranks) == self.loss.plan.mesh.ranks
        return self.mesh.required_group("tp" if everyone else f"tp:{','.join(map(str, ranks))}")


class _Step(torch.autograd.Function):
    """The forward of a planned loss, and its backward by the plan."""

    @staticmethod
    def forward(ctx, loss: PlannedLoss, values: Values, names: list[str], *trained: Tensor) -> Tensor:
        loss.run(FORWARD, values)
        ctx.loss, ctx.values, ctx.names = loss, values, names
        return values[GIVEN + loss.loss.returned[0]].view(()).clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        loss, values = ctx.loss, ctx.values
        values[loss.gradient] = gradient.view(loss.step.ops[loss.gradient].shape)
        loss.run(BACKWARD, values)
        return None, None, None, *(values.get(UPDATE + name) for name in ctx.names)


def show_formats(leaves: Any) -> str:
    """Return the leaves of a batch as text."""
    return ", ".join(f"{list(x[0])} of {str(x[1]).removeprefix('torch.')}" if isinstance(x, tuple) else repr(x)
                     for x in leaves)  # fmt: skip
