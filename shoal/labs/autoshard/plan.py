"""A plan: the sharding of every operator of a graph, and every collective between them, with its price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.labs.autoshard.capture.graph import BACKWARD, FORWARD, OperatorGraph
from shoal.labs.autoshard.intra.choices import OperatorSplit, replicated
from shoal.labs.autoshard.intra.ilp import Solution
from shoal.labs.autoshard.intra.problem import UPDATE, Builder, ShardingProblem
from shoal.labs.autoshard.notation.moves import SLICE, Move, count_sent
from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding
from shoal.spec.layout import Layout

Key = tuple[str, Sharding, Sharding]
"""A tensor's name, and its shardings before and after some moves."""


@dataclass(frozen=True)
class Resharding:
    """Moves of one tensor.

    Attributes:
        phase: forward, backward, or step: once per step, for all micro-batches.
        seconds: of all moves.
        sent: bytes that the busiest device sends.
    """

    name: str
    phase: str
    moves: tuple[Move, ...]
    seconds: float
    sent: float


@dataclass(frozen=True)
class ShardingPlan:
    """A training step of every device.

    Attributes:
        graph: with the updates of parameters and all outputs as operators.
        splits: of each operator; constants, which every device computes, have none.
        moves: from the sharding in which a tensor is made to one in which it is read.
        reshardings: the moves that send something, in the order of the graph.
        seconds: of one micro-batch, with its share of the collectives of a step.
        memory: bytes of the fullest device for weights, gradients and optimizer states.
        saved: bytes that it keeps of a micro-batch for the backward pass.
        proven: whether no sharding costs less by these prices, as long as operators that follow others do.
    """

    mesh: NamedMesh
    graph: OperatorGraph
    splits: dict[str, OperatorSplit]
    moves: dict[Key, tuple[Move, ...]]
    reshardings: tuple[Resharding, ...]
    seconds: float
    memory: float
    saved: float
    proven: bool = True

    @property
    def communication(self) -> float:
        """Seconds of all moves of a micro-batch, with its share of the collectives of a step."""
        return sum(resharding.seconds for resharding in self.reshardings)

    def sharding(self, name: str) -> Sharding:
        """Return the sharding in which a tensor is made."""
        return _output_sharding(self.splits, self.graph, name)

    def weight_shardings(self) -> dict[str, tuple[Sharding, Sharding, Sharding | None]]:
        """Return the shardings in which each parameter is kept, first multiplied, and its optimizer state is kept.

        Parameters that are not read are left out; frozen ones have no optimizer state (None).
        """
        found = {}
        for op in self.graph.parameters:
            first = next((user for user in self.graph.ops.values() if op.name in user.operands), None)
            if first is not None:
                used = self.splits[first.name].operands[first.operands.index(op.name)]
                state = self.sharding(UPDATE + op.name) if UPDATE + op.name in self.splits else None
                found[op.name] = (self.sharding(op.name), used, state)
        return found


class Baseline(NamedTuple):
    """A split that people write by hand.

    Attributes:
        plan: the best one; None if it does not fit.
        layout: of `shoal train` for shoal's own models; None if it has none.
        proven: of a missing plan, whether it is known not to fit; False if the time limit ended the search.
    """

    name: str
    plan: ShardingPlan | None
    layout: Layout | None
    proven: bool = True


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage, or a full module as the only stage.

    Attributes:
        sends: its outputs, to later stages or of the module: (node of the forward pass, operator of the plan's graph).
    """

    rank: int  # its first device
    plan: ShardingPlan
    sends: tuple[tuple[str, str], ...]


def build_plan(builder: Builder, problem: ShardingProblem, solution: Solution) -> ShardingPlan:
    splits: dict[str, OperatorSplit] = {}
    for decision, choice in zip(problem.decisions, solution.chosen, strict=True):
        splits.update(decision.choices[choice])
    ops, prices = builder.ops, builder.prices
    moves: dict[Key, tuple[Move, ...]] = {}
    reshardings: list[Resharding] = []

    def add(name: str, before: Sharding, after: Sharding, phase: str, share: float = 1.0) -> None:
        if before == after:
            return
        op = ops[name]
        path = moves.setdefault((name, before, after), prices.moves(op, before, after))
        if any(move.kind != SLICE for move in path):
            elements, _ = count_sent(path, prices.mesh, op.sizes)
            seconds, sent = share * prices.move(op, before, after), elements * prices.get_itemsize(op)
            reshardings.append(Resharding(name, phase if share == 1 else "step", path, seconds, sent))

    for phase in (FORWARD, BACKWARD):
        done: set[Key] = set()
        for name, op in ops.items():
            if op.phase != phase or name not in splits:
                continue
            for operand, read in zip(op.operands, splits[name].operands, strict=True):
                made = _output_sharding(splits, builder.graph, operand)
                if (operand, made, read) not in done:
                    done.add((operand, made, read))
                    add(operand, made, read, phase, builder.step_share(operand, phase))
            add(name, splits[name].made, splits[name].out, phase)
            if name.startswith(UPDATE):
                weight = name.removeprefix(UPDATE)
                add(weight, splits[name].out, splits[weight].out, phase, builder.once)
    memory = problem.memory(solution.chosen, 0)
    saved = problem.memory(solution.chosen, 1) - memory
    return ShardingPlan(
        prices.mesh, builder.graph, splits, moves, tuple(reshardings), solution.cost, memory, saved, solution.proven
    )


def _output_sharding(splits: dict[str, OperatorSplit], graph: OperatorGraph, name: str) -> Sharding:
    return splits[name].out if name in splits else replicated(len(graph.ops[name].shape))
