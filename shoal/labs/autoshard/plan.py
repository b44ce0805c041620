"""A sharding of a whole graph: how every operator is done, and every collective between them, with its price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.labs.autoshard.capture.graph import BACKWARD, FORWARD, OperatorGraph
from shoal.labs.autoshard.intra.choices import OperatorSplit, sizes_of, whole
from shoal.labs.autoshard.intra.ilp import Solution
from shoal.labs.autoshard.intra.problem import UPDATE, Builder, ShardingProblem
from shoal.labs.autoshard.notation.moves import SLICE
from shoal.labs.autoshard.notation.notation import NamedMesh, Sharding
from shoal.labs.autoshard.notation.route import RoutedMove, elements_of
from shoal.spec.layout import Layout

Key = tuple[str, Sharding, Sharding]
"""A tensor's name, how it lies, and how it shall lie."""


@dataclass(frozen=True)
class Resharding:
    """Moves of one tensor.

    Attributes:
        name: of the tensor.
        phase: forward, backward, or once in a step, for all micro-batches.
        seconds: of all of it.
        sent: bytes that the busiest device sends.
    """

    name: str
    phase: str
    transfers: tuple[RoutedMove, ...]
    seconds: float
    sent: float


@dataclass(frozen=True)
class ShardingPlan:
    """What every device does in a training step.

    Attributes:
        graph: with the updates of parameters and all that is given back as operators.
        splits: how each operator is done; constants have none, every device makes them.
        moves: from how tensors lie to how they are read.
        found: the moves that send something, in the order of the graph.
        seconds: of a step of one micro-batch, with its share of what is done once.
        memory, saved: bytes of the fullest device: weights, gradients and optimizer states; what a micro-batch keeps.
        proven: whether no sharding costs less by these prices, operators that follow others left as they are.
    """

    mesh: NamedMesh
    graph: OperatorGraph
    splits: dict[str, OperatorSplit]
    moves: dict[Key, tuple[RoutedMove, ...]]
    found: tuple[Resharding, ...]
    seconds: float
    memory: float
    saved: float
    proven: bool = True

    @property
    def communication(self) -> float:
        """Seconds of all moves, those that are made once with their share."""
        return sum(move.seconds for move in self.found)

    def lies(self, name: str) -> Sharding:
        """How a tensor lies where it is made."""
        return self.splits[name].out if name in self.splits else whole(len(self.graph.ops[name].shape))

    def weights(self) -> dict[str, tuple[Sharding, Sharding, Sharding | None]]:
        """Of each parameter that is read: how it is kept, how it is first multiplied, how its optimizer's state is kept
        (None of one that is frozen)."""
        found = {}
        for op in self.graph.parameters:
            first = next((user for user in self.graph.ops.values() if op.name in user.operands), None)
            if first is not None:
                used = self.splits[first.name].operands[first.operands.index(op.name)]
                state = self.lies(UPDATE + op.name) if UPDATE + op.name in self.splits else None
                found[op.name] = (self.lies(op.name), used, state)
        return found


class HandSplit(NamedTuple):
    """A split that people write by hand.

    Attributes:
        plan: the best with it; None if it does not fit.
        layout: of shoal's own models, where `shoal train` has one.
        proven: whether it is known not to fit; else time was up.
    """

    name: str
    plan: ShardingPlan | None
    layout: Layout | None
    proven: bool = True


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage as it is run, or a whole module as the only stage.

    Attributes:
        first, last: its layers, [first, last).
        seconds: of a micro-batch.
        rank: its first device.
        sends: what it gives to later stages and at the end: (node of the forward pass, operator of the plan's graph).
    """

    first: int
    last: int
    seconds: float
    rank: int
    plan: ShardingPlan
    sends: tuple[tuple[str, str], ...]


def build_plan(builder: Builder, problem: ShardingProblem, solution: Solution) -> ShardingPlan:
    """The plan that a solution of a problem means."""
    splits: dict[str, OperatorSplit] = {}
    for decision, choice in zip(problem.decisions, solution.chosen, strict=True):
        splits.update(decision.choices[choice])
    ops, prices = builder.ops, builder.prices
    moves: dict[Key, tuple[RoutedMove, ...]] = {}
    found: list[Resharding] = []

    def moved(name: str, before: Sharding, after: Sharding, phase: str, share: float = 1.0) -> None:
        op = ops[name]
        path = moves.setdefault((name, before, after), prices.path(op, before, after))
        if any(transfer.move.kind != SLICE for transfer in path):
            elements, _ = elements_of(path, prices.mesh, sizes_of(op.shape))
            seconds = share * prices.move(op, before, after)
            found.append(
                Resharding(name, phase if share == 1 else "step", path, seconds, elements * prices.bytes_of(op))
            )

    for phase in (FORWARD, BACKWARD):
        done: set[Key] = set()
        for name, op in ops.items():
            if op.phase != phase or name not in splits:
                continue
            for operand, lies in zip(op.operands, splits[name].operands, strict=True):
                before = splits[operand].out if operand in splits else whole(len(ops[operand].shape))
                if before != lies and (operand, before, lies) not in done:
                    done.add((operand, before, lies))
                    moved(operand, before, lies, phase, builder.weight(operand, phase))
            if splits[name].made != splits[name].out:
                moved(name, splits[name].made, splits[name].out, phase)
            if name.startswith(UPDATE):
                weight = name.removeprefix(UPDATE)
                if splits[name].out != splits[weight].out:
                    moved(weight, splits[name].out, splits[weight].out, phase, builder.once)
    return ShardingPlan(
        prices.mesh, builder.graph, splits, moves, tuple(found), solution.cost,
        problem.memory(solution.chosen, 0), problem.memory(solution.chosen, 1) - problem.memory(solution.chosen, 0),
        solution.proven,
    )  # fmt: skip
