"""A plan: the sharding of every operator of a graph, and every collective between them, with its price."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.engine.sharding.graph import OperatorGraph
from shoal.engine.sharding.moves import Move
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, replicated

UPDATE, GIVEN = "update ", "given "
"""Prefixes of added operators: of a parameter, the one that updates it, in the sharding of its optimizer states; of an
output, the one that returns it, with sums added up."""
ENDS = (UPDATE, GIVEN)

Key = tuple[str, Sharding, Sharding]
"""A tensor's name, and its shardings before and after some moves."""


@dataclass(frozen=True)
class OperatorSplit:
    """How an operator is split.

    Attributes:
        made: the sharding in which the local operators leave its output.
        out: the sharding in which others read it: as it was made, or after one collective.
    """

    operands: tuple[Sharding, ...]
    made: Sharding
    out: Sharding
    parts: int = 1


@dataclass(frozen=True)
class Resharding:
    """Moves of one tensor.

    Attributes:
        phase: forward, backward, or step: once per step, for all micro-batches.
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
        return output_sharding(self.splits, self.graph, name)

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


def output_sharding(splits: dict[str, OperatorSplit], graph: OperatorGraph, name: str) -> Sharding:
    return splits[name].out if name in splits else replicated(len(graph.ops[name].shape))
