"""A plan on real ranks: each holds its blocks, does its part of every operator, and moves tensors as was planned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.labs.autoshard.capture.graph import BACKWARD, FORWARD, Operator, OperatorGraph
from shoal.labs.autoshard.intra.choices import OperatorSplit, sizes_of
from shoal.labs.autoshard.intra.problem import ENDS, GIVEN, UPDATE
from shoal.labs.autoshard.intra.spaces import RESHAPES
from shoal.labs.autoshard.notation.notation import Sharding
from shoal.labs.autoshard.notation.run import Runner, box
from shoal.labs.autoshard.plan import ShardingPlan


class ShardedStep:
    """One rank's training step.

    Args:
        plan: of as many devices as the runner's mesh has.
        given: whole parameters, buffers, inputs and gradients of outputs, by the names of the graph; only this rank's
            blocks of them are kept.
    """

    def __init__(self, plan: ShardingPlan, runner: Runner, given: Mapping[str, Tensor]):
        self.plan, self.runner, self.ops = plan, runner, plan.graph.ops
        self.rank = runner.rank
        self.values: dict[str, Tensor] = {}
        self.moved: dict[tuple[str, Sharding], Tensor] = {}  # what is still to be read in this phase
        self.reads: Counter[tuple[str, Sharding]] = Counter()  # and how often
        for name, tensor in given.items():
            self.give(name, tensor)

    def give(self, name: str, tensor: Tensor) -> None:
        """Take a block of a whole tensor from outside."""
        self.values[name] = self.block(name, tensor, self.plan.lies(name)).clone()

    def run(self, phase: str) -> None:
        """Every operator of a phase. A copy that was moved is there until its last reader."""
        todo = [op for op in self.ops.values() if op.kind == "call" and op.phase == phase]
        self.reads = Counter(
            read for op in todo if op.name in self.plan.splits
            for read in zip(op.operands, self.plan.splits[op.name].operands, strict=True)
        )  # fmt: skip
        for op in todo:
            self.values[op.name] = self._done(op)

    def updated(self, name: str, rate: float, master: Tensor) -> Tensor:
        """A parameter after a step of gradient descent, as it is kept.

        Args:
            master: the whole parameter, of which this rank changes the block whose optimizer state it keeps.
        """
        update = UPDATE + name
        new = self.block(name, master, self.plan.lies(update)) - rate * self.values[update]
        return self._moved(name, new, self.plan.lies(update), self.plan.lies(name))

    def given(self, name: str) -> Tensor:
        """This rank's block of something that the graph gives back."""
        return self.values[GIVEN + name]

    def block(self, name: str, tensor: Tensor, lies: Sharding) -> Tensor:
        """This rank's block of a whole tensor."""
        return tensor[box(lies, self.rank, sizes_of(self.ops[name].shape), self.plan.mesh).slices]

    def _done(self, op: Operator) -> Tensor:
        split = self.plan.splits.get(op.name)
        if split is None:  # a constant
            tensors = tuple(self.values[name] for name in op.operands)
            same = op.op in RESHAPES or op.name.startswith(ENDS)
            return tensors[0].reshape(op.shape) if same else op.call(tensors)
        tensors = tuple(
            self._read(name, lies) for name, lies in zip(op.operands, split.operands, strict=True)
        )
        out = self._local(op, split, tensors)
        if isinstance(out, Tensor):
            shape = split.made.local_shape(sizes_of(op.shape), self.plan.mesh)
            if tuple(out.shape) != shape:
                raise RuntimeError(f"{op.name}: {op.target} of blocks gives {tuple(out.shape)}, not {shape}")
            out = self._moved(op.name, out, split.made, split.out)
        return out

    def _read(self, name: str, lies: Sharding) -> Tensor:
        """A tensor as an operator needs it, moved once in a phase."""
        key = (name, lies)
        if key not in self.moved:
            self.moved[key] = self._moved(name, self.values[name], self.plan.lies(name), lies)
        self.reads[key] -= 1
        return self.moved[key] if self.reads[key] else self.moved.pop(key)

    def _moved(self, name: str, x: Tensor, before: Sharding, after: Sharding) -> Tensor:
        for transfer in self.plan.moves[name, before, after] if before != after else ():
            x = self.runner.move(transfer, x)
        return x

    def _local(self, op: Operator, split: OperatorSplit, tensors: tuple[Tensor, ...]) -> Tensor:
        """An operator on blocks: those that name sizes get the block's."""
        shape = split.made.local_shape(sizes_of(op.shape), self.plan.mesh)
        if op.name.startswith(ENDS):
            return tensors[0]
        if op.op in RESHAPES:
            return tensors[0].reshape(shape)
        if op.op == "expand":
            return tensors[0].expand(shape)
        if op.op == "getitem":
            return tensors[0][op.args[1]]
        if op.op == "embedding":
            return self._embedding(tensors, split.operands[0].dims[0][1])
        if op.op == "embedding_dense_backward" and not op.args[4]:  # else scaled by how often a token comes, and whole
            return self._embedding_backward(op, tensors, split.made.dims[0][1], shape[0])
        return op.call(tensors)

    def _embedding(self, tensors: tuple[Tensor, ...], axes: str) -> Tensor:
        """Rows of the table, zeros for those that other devices have."""
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


def compare(
    plan: ShardingPlan, given: dict[str, Tensor], expected: dict[str, Tensor], rate: float = 0.1
) -> dict[str, float]:
    """One step of a plan beside one device; to be called by every rank of the mesh.

    Args:
        given: whole parameters, buffers, inputs and gradients of outputs.
        expected: outputs by the name of their operator, gradients by ``update`` and the parameter's name.

    Returns:
        The largest difference on this rank of each output, of each gradient, and of each parameter after a step of
        gradient descent; relative to the largest number of all outputs, or of all gradients. (One gradient's own may
        all be zero but for rounding, as those of the bias of keys are.)
    """
    torch.set_num_threads(1)
    step = ShardedStep(plan, Runner(plan.mesh), given)
    step.run(FORWARD)
    step.run(BACKWARD)
    errors = {}
    largest = {update: max((x.abs().max().item() for name, x in expected.items() if name.startswith(UPDATE) == update),
                           default=1.0) or 1.0 for update in (False, True)}  # fmt: skip

    def check(name: str, mine: Tensor, expect: Tensor, lies: Sharding) -> None:
        part = expect[box(lies, dist.get_rank(), sizes_of(tuple(expect.shape)), plan.mesh).slices]
        errors[name] = (mine - part).abs().max().item() / largest[not name.startswith(GIVEN)]

    for name, expect in expected.items():
        lies = plan.lies(name)
        check(name, step.values[name], expect, lies)
        if name.startswith(UPDATE):
            weight = name.removeprefix(UPDATE)
            new = given[weight] - rate * expect
            check(f"new {weight}", step.updated(weight, rate, given[weight]), new, plan.lies(weight))
    return errors


def worst_of(results: Iterable[Mapping[str, float]]) -> tuple[float, str]:
    """The largest difference on any rank, and of what; one that is no finite number is larger than all others."""
    every = [(error, name) for errors in results for name, error in errors.items()]
    return next((found for found in every if not math.isfinite(found[0])), None) or max(every)


def reference(module: torch.nn.Module, inputs: tuple, graph: OperatorGraph, seed: int = 0) -> tuple[dict, dict]:
    """What `compare` takes: a module's own numbers on one device, by autograd.

    Outputs that are no scalars get random gradients.

    Raises:
        UsageError: a parameter of which the graph knows no gradient has one.
    """
    from shoal.labs.autoshard.capture.forward import forward_of

    forward = forward_of(module, inputs)
    given: dict[str, Tensor] = {}
    for op in graph.ops.values():
        if op.kind == "parameter" or op.kind == "buffer":
            given[op.name] = forward.values[op.target].detach()
    names = [node.name for node in forward.module.graph.nodes if node.op == "placeholder"]
    names = [name for name in names if forward.sources[name][0] == "input"]
    tensors = torch.utils._pytree.tree_leaves(inputs)
    leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in tensors]
    for name, leaf in zip(names, leaves, strict=True):
        if f"input {name}" in graph.ops:
            given[f"input {name}"] = leaf
            if f"input {name}" in graph.gradients:
                leaf.requires_grad_()
    _, spec = torch.utils._pytree.tree_flatten(inputs)
    outs = module(*torch.utils._pytree.tree_unflatten(leaves, spec))
    outs = forward.each([out for out in torch.utils._pytree.tree_leaves(outs) if isinstance(out, Tensor)])
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
            f"{type(module).__name__}: {lost[0]} has a gradient on one device, and none in the graph that was exported."
            "\n  Something in its forward pass is hidden from torch.export; it cannot be planned."
        )
    expected = {GIVEN + name: out.detach() for name, out in zip(graph.outputs, outs, strict=True)}
    for name, called in graph.gradients.items():
        if graph.ops[name].kind == "parameter":
            gradient = parameters[name].grad
            expected[UPDATE + name] = torch.zeros_like(parameters[name]) if gradient is None else gradient
        else:
            gradient = leaves[names.index(name.removeprefix("input "))].grad
            assert gradient is not None, "an input with a gradient in the graph has one here"
            expected[GIVEN + called] = gradient
    return {name: x.detach() for name, x in given.items()}, expected


