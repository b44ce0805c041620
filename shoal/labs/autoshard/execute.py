"""Run a plan on real ranks: each holds its blocks, does its part of every operator, and moves tensors as planned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.labs.autoshard.capture.forward import Forward, forward_of
from shoal.labs.autoshard.capture.graph import BACKWARD, FORWARD, RESHAPES, Operator, OperatorGraph
from shoal.labs.autoshard.capture.trace import differentiated
from shoal.labs.autoshard.intra.choices import OperatorSplit, sizes_of
from shoal.labs.autoshard.intra.problem import ENDS, GIVEN, UPDATE
from shoal.labs.autoshard.notation.notation import Sharding
from shoal.labs.autoshard.notation.run import Runner, box
from shoal.labs.autoshard.plan import ShardingPlan, StagePlan
from shoal.labs.autoshard.search import OperatorPlan, StagedPlan
from shoal.spec.catalog.clusters import Cluster

EXACT = 1e-10
"""The largest relative difference in float64 of a plan that computes what one device does."""
MOST_RANKS = 8


class ShardedStep:
    """One rank's training step.

    Args:
        plan: of as many devices as the runner's mesh has.
        given: whole parameters, buffers and inputs, by the names of the graph; this rank keeps its blocks.
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


class Difference(NamedTuple):
    """How far a plan on real ranks is from one device.

    Attributes:
        ranks: that ran it.
        largest: difference, in float64; ``name`` says of what.
        compared: what was compared, in words.
    """

    ranks: int
    largest: float
    name: str
    compared: str

    @property
    def exact(self) -> bool:
        """Whether the plan computes what one device does, but for rounding."""
        return self.largest <= EXACT

    @property
    def verdict(self) -> str:
        """The difference in words."""
        words = "as one device computes it" if self.exact else f"not what one device computes: {self.name} is off"
        largest = f"largest difference {self.largest:.1e} ({self.name})"
        return f"run on {self.ranks} ranks in float64, {words}: {self.compared}; {largest}"


def check_ranks(machine: Cluster) -> None:
    """Refuse to run a plan on more ranks than are started here.

    Raises:
        UsageError: naming how many.
    """
    if machine.size > MOST_RANKS:
        raise UsageError(f"--check: {machine.size} processes, one for each device; at most {MOST_RANKS} are started")


def run_plan(found: OperatorPlan | StagedPlan, module: nn.Module, inputs: tuple[Any, ...]) -> Difference:
    """Run a plan on real ranks, one for each device, in float64, beside the module on one device."""
    from shoal.launch.worker_pool import Pool

    forward = forward_of(module, inputs)
    graph = found.plan.graph if isinstance(found, OperatorPlan) else differentiated(forward)
    stages = [whole_stage(found.plan, forward)] if isinstance(found, OperatorPlan) else found.stages
    given, expected = reference(module, inputs, forward, graph)
    ranks = sum(stage.plan.mesh.ranks for stage in stages)
    with Pool(ranks) as pool:
        results = pool.run(compare, ranks, stages, given, expected)
    gradients = sum(name.startswith(UPDATE) for name in expected)
    outputs = f"{len(expected) - gradients} outputs and {gradients} gradients"
    return Difference(len(results), *worst_of(results), f"{outputs}, and every weight after a step")


def whole_stage(plan: ShardingPlan, forward: Forward) -> StagePlan:
    """A plan of a whole module as the only stage."""
    sends = zip([node.name for node in forward.outputs], plan.graph.outputs, strict=True)
    return StagePlan(0, 1, plan.seconds, 0, plan, tuple(sends))


def compare(
    stages: list[StagePlan], given: dict[str, Tensor], expected: dict[str, Tensor], rate: float = 0.1
) -> dict[str, float]:
    """Run one micro-batch forward and back, beside one device; to be called by every rank.

    Stages hand over whole tensors here, so that what is checked is their shardings and where they were cut.

    Args:
        given: whole parameters, buffers, inputs and gradients of outputs.
        expected: as from `reference`.

    Returns:
        The largest difference on this rank of each output and gradient of its stage, and of each parameter after a step
        of gradient descent; relative to the largest number of all outputs, or of all gradients. (One gradient's own may
        all be zero but for rounding, as those of the bias of keys are.)
    """
    torch.set_num_threads(1)
    rank, tensors = dist.get_rank(), dict(given)
    mine = next(stage for stage in stages if stage.rank <= rank < stage.rank + stage.plan.mesh.ranks)
    graph, lies = mine.plan.graph, mine.plan.lies
    for stage in stages:
        if stage is mine:
            outside = [op.name for op in graph.ops.values() if op.kind not in ("call", "gradient")]
            step = ShardedStep(mine.plan, Runner(mine.plan.mesh, mine.rank), {name: tensors[name] for name in outside})
            step.run(FORWARD)
        if len(stages) > 1:
            made = {f"boundary {name}": op for name, op in mine.sends}
            _hand_over(_blocks(step, made) if stage is mine else [], tensors)
    for stage in reversed(stages):
        if stage is mine:
            for op in graph.ops.values():
                if op.kind == "gradient":
                    unread = torch.zeros(op.shape, dtype=op.dtype)  # or read without a gradient alone
                    step.give(op.name, tensors.get(op.name, unread))
            step.run(BACKWARD)
        if len(stages) > 1:
            boundaries = {name: op for name, op in graph.gradients.items() if name.startswith("boundary ")}
            made = {f"gradient {name.removeprefix('boundary ')}": op for name, op in boundaries.items()}
            _hand_over(_blocks(step, made) if stage is mine else [], tensors)
    largest = {update: max((x.abs().max().item() for name, x in expected.items() if name.startswith(UPDATE) == update),
                           default=1.0) or 1.0 for update in (False, True)}  # fmt: skip
    errors = {}

    def check(name: str, op: str, block: Tensor, expect: Tensor, *, update: bool) -> None:
        errors[name] = (block - step.block(op, expect, lies(op))).abs().max().item() / largest[update]

    outputs = {f"output {name}": op for name, op in mine.sends}
    outputs |= {f"gradient {name}": op for name, op in graph.gradients.items() if graph.ops[name].kind == "input"}
    for name, made_by in outputs.items():
        if name in expected:
            check(name, GIVEN + made_by, step.values[GIVEN + made_by], expected[name], update=False)
    for parameter in graph.parameters:
        name, update = parameter.name, UPDATE + parameter.name
        if update in mine.plan.splits:
            gradient = expected.get(update, torch.zeros(parameter.shape, dtype=parameter.dtype))  # nothing flows back
            check(update, update, step.values[update], gradient, update=True)
            new = given[name] - rate * gradient
            check(f"new {name}", name, step.updated(name, rate, given[name]), new, update=True)
    return errors


def _blocks(step: ShardedStep, made: Mapping[str, str]) -> list[tuple]:
    """This rank's blocks of tensors that a stage gives back: (name, shape, place, block).

    Args:
        made: from the name of a tensor to the operator that makes it.
    """
    found = []
    for name, op in made.items():
        shape = step.ops[op].shape
        place = box(step.plan.lies(GIVEN + op), step.rank, sizes_of(shape), step.plan.mesh)
        found.append((name, shape, place, step.values[GIVEN + op].contiguous()))
    return found


def _hand_over(parts: list[tuple], tensors: dict[str, Tensor]) -> None:
    """Add up whole tensors on all ranks, from the blocks that some ranks have."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, parts)
    found: dict[str, Tensor] = {}
    for name, shape, place, block in (piece for pieces in every for piece in pieces):
        found.setdefault(name, torch.empty(shape, dtype=block.dtype))[place.slices] = block
    for name, tensor in found.items():
        tensors[name] = tensors[name] + tensor if name in tensors else tensor


def worst_of(results: Iterable[Mapping[str, float]]) -> tuple[float, str]:
    """The largest difference on any rank, and of what; one that is no finite number is larger than all others."""
    every = [(error, name) for errors in results for name, error in errors.items()]
    return next((found for found in every if not math.isfinite(found[0])), None) or max(every)


def reference(
    module: nn.Module, inputs: tuple, forward: Forward, graph: OperatorGraph, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `compare` takes: a module's own numbers on one device, by autograd.

    Outputs that are no scalars get random gradients.

    Returns:
        What is given: whole parameters, buffers, inputs and gradients of outputs, by the names of the graph. What is
        expected: ``output`` and a node of the forward pass, ``gradient`` and an input, ``update`` and a parameter.

    Raises:
        UsageError: a parameter of which the graph knows no gradient has one.
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
            given[name] = leaf.requires_grad_(name in graph.gradients)
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
    expected = {f"output {node.name}": out.detach() for node, out in zip(forward.outputs, outs, strict=True)}
    for name in graph.gradients:
        trainee = given[name] if graph.ops[name].kind == "input" else parameters[name]
        gradient = torch.zeros_like(trainee) if trainee.grad is None else trainee.grad
        expected[f"gradient {name}" if trainee is given[name] else UPDATE + name] = gradient
    return {name: x.detach() for name, x in given.items()}, expected
