"""Run a plan on real ranks, which hold their blocks alone, and compare it with one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.labs.autoshard.capture.forward import Forward, export_forward
from shoal.labs.autoshard.capture.graph import BACKWARD, FORWARD, RESHAPES, Operator, OperatorGraph
from shoal.labs.autoshard.capture.trace import differentiate
from shoal.labs.autoshard.intra.problem import ENDS, GIVEN, UPDATE
from shoal.labs.autoshard.notation.notation import Sharding
from shoal.labs.autoshard.notation.run import Runner, block_box
from shoal.labs.autoshard.plan import ShardingPlan, StagePlan
from shoal.labs.autoshard.search import OperatorPlan, StagedPlan, check_outputs
from shoal.spec.catalog.clusters import Cluster

EXACT = 1e-10
"""Largest relative difference, in float64, at which a plan counts as equal to one device."""
MOST_RANKS = 8


class ShardedStep:
    """One rank's training step.

    Args:
        plan: for all devices of the runner's mesh.
        given: unsharded parameters, buffers and inputs, by the names of the graph; this rank keeps its blocks.
    """

    def __init__(self, plan: ShardingPlan, runner: Runner, given: Mapping[str, Tensor]):
        self.plan, self.runner, self.ops = plan, runner, plan.graph.ops
        self.rank = runner.rank
        self.values: dict[str, Tensor] = {}
        self.moved: dict[tuple[str, Sharding], Tensor] = {}  # by name and sharding, for all readers in a phase
        for name, tensor in given.items():
            self.give(name, tensor)

    def give(self, name: str, tensor: Tensor) -> None:
        """Take this rank's block of an unsharded tensor from outside."""
        self.values[name] = self.block(name, tensor, self.plan.sharding(name)).clone()

    def run(self, phase: str) -> None:
        self.moved.clear()
        for op in self.ops.values():
            if op.kind == "call" and op.phase == phase:
                self.values[op.name] = self._run(op)

    def update(self, name: str, rate: float, master: Tensor) -> Tensor:
        """Return a parameter after a step of gradient descent, in the sharding in which it is kept.

        Args:
            master: the unsharded parameter, of which this rank updates the block whose optimizer state it keeps.
        """
        update = UPDATE + name
        new = self.block(name, master, self.plan.sharding(update)) - rate * self.values[update]
        return self._move(name, new, self.plan.sharding(update), self.plan.sharding(name))

    def block(self, name: str, tensor: Tensor, sharding: Sharding) -> Tensor:
        """Return this rank's block of an unsharded tensor."""
        return tensor[block_box(sharding, self.rank, self.ops[name].sizes, self.plan.mesh).slices]

    def _run(self, op: Operator) -> Tensor:
        split = self.plan.splits.get(op.name)
        if split is None:  # a constant
            return _run_local(op, tuple(self.values[name] for name in op.operands), op.shape)
        operands = zip(op.operands, split.operands, strict=True)
        tensors = tuple(self._read(name, sharding) for name, sharding in operands)
        shape = split.made.local_shape(op.sizes, self.plan.mesh)
        if op.op == "embedding":
            out = self._embedding(tensors, split.operands[0].dims[0][1])
        elif op.op == "embedding_dense_backward" and not op.args[4]:  # else scaled by token frequency, and not split
            out = self._embedding_backward(op, tensors, split.made.dims[0][1], shape[0])
        else:
            out = _run_local(op, tensors, shape)
        if isinstance(out, Tensor):
            if tuple(out.shape) != shape:
                raise RuntimeError(f"{op.name}: {op.target} of blocks has shape {tuple(out.shape)}, not {shape}")
            out = self._move(op.name, out, split.made, split.out)
        return out

    def _read(self, name: str, sharding: Sharding) -> Tensor:
        """Return a tensor in a sharding, moved once in a phase."""
        key = (name, sharding)
        if key not in self.moved:
            self.moved[key] = self._move(name, self.values[name], self.plan.sharding(name), sharding)
        return self.moved[key]

    def _move(self, name: str, x: Tensor, before: Sharding, after: Sharding) -> Tensor:
        return x if before == after else self.runner.move_all(self.plan.moves[name, before, after], x)

    def _embedding(self, tensors: tuple[Tensor, ...], axes: str) -> Tensor:
        """Read rows of this rank's part of the table; zeros for the tokens of other devices."""
        table, tokens = tensors
        row = tokens - self.plan.mesh.position(self.rank, axes) * len(table)
        mine = (row >= 0) & (row < len(table))
        return torch.where(mine.unsqueeze(-1), table[row.clamp(0, len(table) - 1)], 0.0)

    def _embedding_backward(self, op: Operator, tensors: tuple[Tensor, ...], axes: str, rows: int) -> Tensor:
        gradient, tokens = tensors
        row = tokens - self.plan.mesh.position(self.rank, axes) * rows
        mine = (row >= 0) & (row < rows) & (tokens != op.args[3])  # the padding's row has no gradient
        out = gradient.new_zeros(rows, gradient.shape[-1])
        return out.index_add_(0, row[mine], gradient[mine])


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


class Difference(NamedTuple):
    """The difference of a plan on real ranks from one device.

    Attributes:
        largest: relative difference, in float64.
        name: of the tensor with this difference.
        compared: the compared tensors, in words.
    """

    ranks: int
    largest: float
    name: str
    compared: str

    @property
    def exact(self) -> bool:
        """Whether the plan computes what one device does, up to rounding."""
        return self.largest <= EXACT

    @property
    def verdict(self) -> str:
        words = "equal to one device" if self.exact else f"not equal to one device: {self.name} differs"
        largest = f"largest difference {self.largest:.1e} ({self.name})"
        return f"run on {self.ranks} ranks in float64, {words}: {self.compared}; {largest}"


def check_ranks(machine: Cluster) -> None:
    """Refuse to run a plan on more than `MOST_RANKS` processes."""
    if machine.size > MOST_RANKS:
        raise UsageError(f"--check: {machine.size} processes, one for each device; at most {MOST_RANKS} are started")


def run_plan(found: OperatorPlan | StagedPlan, module: nn.Module, inputs: tuple[Any, ...]) -> Difference:
    """Run a plan on real ranks, one for each device, in float64, and compare it with the module on one device.

    Raises:
        UsageError: an output belongs to no stage.
    """
    from shoal.launch.worker_pool import Pool

    forward = export_forward(module, inputs)
    if isinstance(found, OperatorPlan):
        graph, stages = found.plan.graph, [single_stage(found.plan, forward)]
    else:
        check_outputs(node for node in forward.outputs if node.op == "placeholder")
        graph, stages = differentiate(forward), found.stages
    given, expected = reference(module, inputs, forward, graph)
    ranks = sum(stage.plan.mesh.ranks for stage in stages)
    with Pool(ranks) as pool:
        results = pool.run(compare, ranks, stages, given, expected)
    gradients = sum(name.startswith(UPDATE) for name in expected)
    outputs = f"{len(expected) - gradients} outputs and {gradients} gradients"
    return Difference(len(results), *find_worst(results), f"{outputs}, and every weight after a step")


def single_stage(plan: ShardingPlan, forward: Forward) -> StagePlan:
    sends = zip([node.name for node in forward.outputs], plan.graph.outputs, strict=True)
    return StagePlan(0, plan, tuple(sends))


def compare(
    stages: list[StagePlan], given: dict[str, Tensor], expected: dict[str, Tensor], rate: float = 0.1
) -> dict[str, float]:
    """Run one micro-batch forward and backward, and compare it with one device; to be called by every rank.

    Stages exchange unsharded tensors: the check is of their shardings and cuts.

    Returns:
        The largest difference on this rank of each output and gradient of its stage, and of each parameter after a step
        of gradient descent; relative to the largest number of all outputs, or of all gradients. (A gradient may
        be zero up to rounding, such as the one of the bias of keys.)
    """
    torch.set_num_threads(1)
    rank, tensors = dist.get_rank(), dict(given)
    mine = next(stage for stage in stages if stage.rank <= rank < stage.rank + stage.plan.mesh.ranks)
    graph = mine.plan.graph
    for stage in stages:
        if stage is mine:
            outside = [op.name for op in graph.ops.values() if op.kind not in ("call", "gradient")]
            step = ShardedStep(mine.plan, Runner(mine.plan.mesh, mine.rank), {name: tensors[name] for name in outside})
            step.run(FORWARD)
        if len(stages) > 1:
            made = {f"boundary {name}": op for name, op in mine.sends}
            _gather_tensors(_list_blocks(step, made) if stage is mine else [], tensors)
    for stage in reversed(stages):
        if stage is mine:
            for op in graph.ops.values():
                if op.kind == "gradient":
                    unread = torch.zeros(op.shape, dtype=op.dtype)  # or only read detached
                    step.give(op.name, tensors.get(op.name, unread))
            step.run(BACKWARD)
        if len(stages) > 1:
            boundaries = {name: op for name, op in graph.gradients.items() if name.startswith("boundary ")}
            made = {f"gradient {name.removeprefix('boundary ')}": op for name, op in boundaries.items()}
            _gather_tensors(_list_blocks(step, made) if stage is mine else [], tensors)
    largest = {update: max((x.abs().max().item() for name, x in expected.items() if name.startswith(UPDATE) == update),
                           default=1.0) or 1.0 for update in (False, True)}  # fmt: skip
    errors = {}

    def check(name: str, op: str, block: Tensor, expect: Tensor, *, update: bool) -> None:
        errors[name] = (block - step.block(op, expect, mine.plan.sharding(op))).abs().max().item() / largest[update]

    for node, made_by in mine.sends:
        if (name := f"output {node}") in expected:
            check(name, GIVEN + made_by, step.values[GIVEN + made_by], expected[name], update=False)
    for parameter in graph.parameters:
        name, update = parameter.name, UPDATE + parameter.name
        if update in mine.plan.splits:
            gradient = expected.get(update, torch.zeros(parameter.shape, dtype=parameter.dtype))
            check(update, update, step.values[update], gradient, update=True)
            new = given[name] - rate * gradient
            check(f"new {name}", name, step.update(name, rate, given[name]), new, update=True)
    return errors


def _list_blocks(step: ShardedStep, made: Mapping[str, str]) -> list[tuple]:
    """List this rank's blocks of the outputs of a stage, by name and operator: (name, shape, box, block)."""
    found = []
    for name, op in made.items():
        box = block_box(step.plan.sharding(GIVEN + op), step.rank, step.ops[op].sizes, step.plan.mesh)
        found.append((name, step.ops[op].shape, box, step.values[GIVEN + op].contiguous()))
    return found


def _gather_tensors(parts: list[tuple], tensors: dict[str, Tensor]) -> None:
    """Add the unsharded tensors, made of the blocks of all ranks, to ``tensors``."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, parts)
    found: dict[str, Tensor] = {}
    for name, shape, box, block in (piece for pieces in every for piece in pieces):
        found.setdefault(name, torch.empty(shape, dtype=block.dtype))[box.slices] = block
    for name, tensor in found.items():
        tensors[name] = tensors[name] + tensor if name in tensors else tensor


def find_worst(results: Iterable[Mapping[str, float]]) -> tuple[float, str]:
    """Find the largest difference on any rank, and its name; one that is not finite is larger than all others."""
    every = [(error, name) for errors in results for name, error in errors.items()]
    return next((found for found in every if not math.isfinite(found[0])), None) or max(every)


def reference(
    module: nn.Module, inputs: tuple, forward: Forward, graph: OperatorGraph, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the arguments of `compare` on one device, by autograd.

    Outputs other than scalars get random gradients.

    Returns:
        ``given``: unsharded parameters, buffers, inputs and gradients of outputs, by the names of the graph.
        ``expected``: by ``output`` and a node of the forward pass, or ``update`` and a parameter.

    Raises:
        UsageError: a parameter has a gradient that the graph lacks.
    """
    given: dict[str, Tensor] = {}
    for op in graph.ops.values():
        if op.kind in ("parameter", "buffer"):
            given[op.name] = forward.values[op.target].detach()
    names = [f"input {name}" for name, (kind, _) in forward.sources.items() if kind == "input"]
    tensors, spec = torch.utils._pytree.tree_flatten(inputs)
    leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in tensors]
    for name, leaf in zip(names, leaves, strict=True):
        if name in graph.ops:
            given[name] = leaf
    outs = module(*torch.utils._pytree.tree_unflatten(leaves, spec))
    outs = forward.drop_repeated([out for out in torch.utils._pytree.tree_leaves(outs) if isinstance(out, Tensor)])
    cotangents = [op for op in graph.ops.values() if op.kind == "gradient"]
    generator = torch.Generator().manual_seed(seed)
    trained = [out for out in outs if out.requires_grad]
    for op, out in zip(cotangents, trained, strict=True):
        given[op.name] = torch.ones_like(out) if out.dim() == 0 else torch.randn(
            out.shape, dtype=out.dtype, generator=generator)  # fmt: skip
    for parameter in module.parameters():
        parameter.grad = None
    torch.autograd.backward(trained, [given[op.name] for op in cotangents])
    parameters = dict(module.named_parameters())
    if lost := [name for name, p in parameters.items() if p.grad is not None and name not in graph.gradients]:
        raise UsageError(
            f"{type(module).__name__}: {lost[0]} has a gradient on one device, and none in the exported graph."
            "\n  Part of its forward pass is hidden from torch.export, so it cannot be planned."
        )
    expected = {f"output {node.name}": out.detach() for node, out in zip(forward.outputs, outs, strict=True)}
    for name in graph.gradients:
        gradient = parameters[name].grad
        expected[UPDATE + name] = torch.zeros_like(parameters[name]) if gradient is None else gradient
    return {name: x.detach() for name, x in given.items()}, expected
