"""Both levels together: stages that take as long as their own best shardings, and a pipeline of them on real ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.labs.autoshard.capture.graph import BACKWARD, FORWARD
from shoal.labs.autoshard.capture.layers import Layers
from shoal.labs.autoshard.execute import ShardedStep
from shoal.labs.autoshard.intra.choices import sizes_of
from shoal.labs.autoshard.intra.ilp import NothingFits, solve
from shoal.labs.autoshard.intra.price import Prices
from shoal.labs.autoshard.intra.problem import GIVEN, UPDATE, Builder, Bytes
from shoal.labs.autoshard.notation.notation import NamedMesh
from shoal.labs.autoshard.notation.run import Runner, box
from shoal.labs.autoshard.plan import ShardingPlan, plan_of
from shoal.labs.autoshard.stages import AssignedStage, Part, pipeline
from shoal.planning.cost.time.communication import ring_of
from shoal.planning.cost.time.engine_layer import attained
from shoal.spec.catalog.clusters import Cluster

TRACED = 8  # bytes of an element of the traced graph


@dataclass(frozen=True)
class StagePlan:
    """A stage as it is run.

    Attributes:
        rank: its first device.
        sends: what it gives to stages behind it and at the end: (name of the boundary, operator).
    """

    stage: AssignedStage
    rank: int
    plan: ShardingPlan
    sends: tuple[tuple[str, str], ...]


@dataclass
class Pipelined:
    """Stages of a forward pass in layers, on a cluster.

    Attributes:
        kind, itemsize: number format of the products, and bytes of an element.
        capacity: bytes of a device.
        besides: of the bytes that come and go, how many an allocator has besides.
        proven: whether all that was said not to fit does not; else time was up for some of it.
    """

    layers: Layers
    cluster: Cluster
    kind: str
    itemsize: int
    bytes: Bytes
    microbatches: int
    capacity: float
    besides: float = 0.0
    proven: bool = True
    _known: dict[tuple, float] = field(default_factory=dict)

    @cached_property
    def count(self) -> int:
        """Layers."""
        return len(self.layers.ends)

    def stages(self, most: int) -> tuple[AssignedStage, ...] | None:
        """The best pipeline of up to ``most`` stages; None if nothing fits."""
        return pipeline(self.cost, self.count, self.cluster.nodes, self.cluster.per_node, self.microbatches, most)

    def cost(self, first: int, last: int, part: Part, left: int) -> float:
        """Seconds of a micro-batch of some layers on a part of the cluster; the same layers are planned once."""
        if self.layers.shares(first, last):
            return inf
        key = (self.layers.like(first, last), part, min(left, self.microbatches))
        if key not in self._known:
            try:
                self._known[key] = self.plan(first, last, part, left)[0].seconds
            except NothingFits as nothing:
                self._known[key], self.proven = inf, self.proven and nothing.proven
        return self._known[key] + self._receives(first, part)

    def _receives(self, first: int, part: Part) -> float:
        """Seconds in which a stage gets what is before it, and gives the gradients back: each device its share."""
        size = self.layers.boundary(first) * self.itemsize / TRACED / (part[0] * part[1])
        apart = self.cluster.per_node if self.cluster.nodes > 1 else 1
        return 2 * ring_of(attained(self.cluster), 2, apart).send(size) if size and self.cluster.size > 1 else 0.0

    def plan(self, first: int, last: int, part: Part, left: int) -> tuple[ShardingPlan, tuple[str, ...]]:
        """The best sharding of some layers on a part, and the operators of its outputs.

        Args:
            left: stages from this one on: the micro-batches that it keeps at once in 1F1B, if a step has so many.

        Raises:
            NothingFits: on no grid.
        """
        graph, best, proven = self.layers.graph(first, last), None, True
        alive = min(left, self.microbatches) * (1 + self.besides)
        for mesh in grids(*part):
            prices = Prices.on(self.cluster, mesh, self.kind, self.itemsize)
            builder = Builder(graph, prices, self.bytes, self.microbatches)
            problem = builder.problem()
            try:
                found = solve(problem)
                if problem.memory(found.chosen, alive) > self.capacity:
                    found = solve(problem, self.capacity, alive)
            except NothingFits as nothing:
                proven = proven and nothing.proven
                continue
            if best is None or found.cost < best.seconds:
                best = plan_of(builder, problem, found)
        if best is None:
            raise NothingFits(proven)
        return best, graph.outputs

    def planned(self, stages: tuple[AssignedStage, ...]) -> list[StagePlan]:
        """Every stage with its sharding, on devices one after another: whole nodes first, then the largest parts."""
        found, rank = {}, 0
        for number in sorted(range(len(stages)), key=lambda i: -stages[i].devices):
            stage = stages[number]
            plan, outputs = self.plan(stage.first, stage.last, stage.part, len(stages) - number)
            names = [node.name for node in self.layers.part(stage.first, stage.last).outputs]
            found[number] = StagePlan(stage, rank, plan, tuple(zip(names, outputs, strict=True)))
            rank += stage.devices
        return [found[number] for number in range(len(stages))]


def grids(nodes: int, per_node: int) -> list[NamedMesh]:
    """All devices in a row; and as a grid, of nodes by their devices, or inside a node in every way."""
    n = nodes * per_node
    if n == 1:
        return [NamedMesh("", ())]
    pairs = [(nodes, per_node)] if nodes > 1 else [(a, n // a) for a in range(2, n) if n % a == 0]
    return [NamedMesh("x", (n,)), *(NamedMesh("xy", pair) for pair in pairs if min(pair) > 1)]


# ---- on real ranks ---------------------------------------------------------------------------------------------------


def compare_stages(
    stages: list[StagePlan], given: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, float]:
    """One micro-batch through a pipeline, forward and back, beside one device; to be called by every rank.

    Stages hand over whole tensors here, so that what is checked is their shardings and where they were cut.

    Args:
        given: whole parameters, buffers, inputs and gradients of outputs.
        outputs: expected, by the names of the boundary.
        expected: gradients by ``update`` and the parameter's name.

    Returns:
        The largest difference on this rank, relative to the largest number of all outputs, or of all gradients.
    """
    torch.set_num_threads(1)
    rank, tensors = dist.get_rank(), dict(given)
    mine = next(s for s in stages if s.rank <= rank < s.rank + s.stage.devices)
    step: ShardedStep | None = None
    for stage in stages:
        parts = []
        if stage is mine:
            here = [op.name for op in stage.plan.graph.ops.values() if op.kind not in ("call", "gradient")]
            step = ShardedStep(stage.plan, Runner(stage.plan.mesh, stage.rank), {name: tensors[name] for name in here})
            step.run(FORWARD)
            parts = [(f"boundary {name}", *_piece(step, op)) for name, op in stage.sends]
        tensors.update(_assembled(parts))
    for stage in reversed(stages):
        parts = []
        if stage is mine:
            assert step is not None
            for op in stage.plan.graph.ops.values():
                if op.kind == "gradient":
                    unread = torch.zeros(op.shape, dtype=op.dtype)  # or read without a gradient alone
                    step.give(op.name, tensors.get(op.name, unread))
            step.run(BACKWARD)
            parts = [(f"gradient {name.removeprefix('boundary ')}", *_piece(step, op))
                     for name, op in stage.plan.graph.gradients.items() if name.startswith("boundary ")]  # fmt: skip
        for name, gradient in _assembled(parts).items():
            tensors[name] = tensors[name] + gradient if name in tensors else gradient
    assert step is not None
    errors = {}
    largest = max(x.abs().max().item() for x in outputs.values()) or 1.0
    for name, expect in outputs.items():
        errors[name] = (tensors[f"boundary {name}"] - expect).abs().max().item() / largest
    largest = max((x.abs().max().item() for x in expected.values()), default=1.0) or 1.0
    for op in mine.plan.graph.parameters:
        if (name := UPDATE + op.name) in mine.plan.splits:
            expect = expected.get(name, torch.zeros(op.shape, dtype=op.dtype))  # nothing flows back to it
            part = step.block(op.name, expect, mine.plan.lies(name))
            errors[name] = (step.values[name] - part).abs().max().item() / largest
    return errors


def _piece(step: ShardedStep, op: str) -> tuple:
    """This rank's block of what a stage gives back: where it is in the whole, and the shape of that."""
    shape = step.ops[op].shape
    place = box(step.plan.lies(GIVEN + op), step.rank, sizes_of(shape), step.plan.mesh)
    return shape, place, step.given(op).contiguous()


def _assembled(parts: list[tuple]) -> dict[str, Tensor]:
    """Whole tensors of the blocks of all ranks."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, parts)
    found: dict[str, Tensor] = {}
    for name, shape, place, block in (piece for pieces in every for piece in pieces):
        whole = found.setdefault(name, torch.empty(shape, dtype=block.dtype))
        whole[place.slices] = block
    return found
