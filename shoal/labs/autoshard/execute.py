"""Run a plan on real ranks, which hold their blocks alone, and compare it with one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.engine.sharding.graph import BACKWARD, FORWARD, OperatorGraph
from shoal.engine.sharding.named_axes import block_box
from shoal.engine.sharding.plan import GIVEN, UPDATE, ShardingPlan
from shoal.engine.sharding.ranks import MeshRank, connect_ranks
from shoal.engine.sharding.step import ShardedStep, Values
from shoal.planning.auto.capture.forward import Forward, export_forward
from shoal.planning.auto.capture.trace import differentiate
from shoal.planning.auto.plan import StagePlan
from shoal.planning.auto.search import OperatorPlan, StagedPlan, check_outputs
from shoal.spec.catalog.clusters import Cluster

EXACT = 1e-10
"""Largest relative difference, in float64, at which a plan counts as equal to one device."""
MOST_RANKS = 8


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
            place = MeshRank(mine.plan.mesh, rank - mine.rank, partial(connect_ranks, first=mine.rank))
            step = ShardedStep(mine.plan, place, torch.device("cpu"))
            values = {name: step.block(name, tensors[name]) for name in outside}
            step.run(FORWARD, values)
        if len(stages) > 1:
            made = {f"boundary {name}": op for name, op in mine.sends}
            _gather_tensors(_list_blocks(step, values, made) if stage is mine else [], tensors)
    for stage in reversed(stages):
        if stage is mine:
            for op in graph.ops.values():
                if op.kind == "gradient":
                    unread = torch.zeros(op.shape, dtype=op.dtype)  # or only read detached
                    values[op.name] = step.block(op.name, tensors.get(op.name, unread))
            step.run(BACKWARD, values)
        if len(stages) > 1:
            boundaries = {name: op for name, op in graph.gradients.items() if name.startswith("boundary ")}
            made = {f"gradient {name.removeprefix('boundary ')}": op for name, op in boundaries.items()}
            _gather_tensors(_list_blocks(step, values, made) if stage is mine else [], tensors)
    largest = {update: max((x.abs().max().item() for name, x in expected.items() if name.startswith(UPDATE) == update),
                           default=1.0) or 1.0 for update in (False, True)}  # fmt: skip
    errors = {}

    def check(name: str, op: str, block: Tensor, expect: Tensor, *, update: bool) -> None:
        errors[name] = (block - step.block(op, expect)).abs().max().item() / largest[update]

    for node, made_by in mine.sends:
        if (name := f"output {node}") in expected:
            check(name, GIVEN + made_by, values[GIVEN + made_by], expected[name], update=False)
    for parameter in graph.parameters:
        name, update = parameter.name, UPDATE + parameter.name
        if update in mine.plan.splits:
            gradient = expected.get(update, torch.zeros(parameter.shape, dtype=parameter.dtype))
            check(update, update, values[update], gradient, update=True)
            states, kept = mine.plan.sharding(update), mine.plan.sharding(name)
            new = step.move(name, step.block(name, given[name], states) - rate * values[update], states, kept)
            check(f"new {name}", name, new, given[name] - rate * gradient, update=True)
    return errors


def _list_blocks(step: ShardedStep, values: Values, made: Mapping[str, str]) -> list[tuple]:
    """List this rank's blocks of the outputs of a stage, by name and operator: (name, shape, box, block)."""
    found = []
    for name, op in made.items():
        box = block_box(step.plan.sharding(GIVEN + op), step.rank.rank, step.ops[op].sizes, step.plan.mesh)
        found.append((name, step.ops[op].shape, box, values[GIVEN + op].contiguous()))
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
    module: nn.Module, inputs: tuple, forward: Forward, graph: OperatorGraph
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
    generator = torch.Generator().manual_seed(0)
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
