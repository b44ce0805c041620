"""Plans from solutions of the integer program, and what is listed beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.engine.sharding.graph import BACKWARD, FORWARD
from shoal.engine.sharding.moves import SLICE, Move
from shoal.engine.sharding.named_axes import Sharding
from shoal.engine.sharding.plan import UPDATE, Key, OperatorSplit, Resharding, ShardingPlan, output_sharding
from shoal.planning.auto.intra.ilp import Solution
from shoal.planning.auto.intra.problem import Builder, ShardingProblem
from shoal.spec.layout import Layout


class Baseline(NamedTuple):
    """A split that people write by hand."""

    name: str
    plan: ShardingPlan | None  # the best one; None if it does not fit
    layout: Layout | None  # of `shoal train` for shoal's own models; None if it has none
    proven: bool = True  # of a missing plan, whether it is known not to fit; False if the time limit ended the search


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage, or a full module as the only stage."""

    rank: int  # its first device
    plan: ShardingPlan
    # its outputs, to later stages or of the module: (node of the forward pass, operator of the plan's graph)
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
            elements = sum(move.sent(prices.mesh, op.sizes) for move in path)
            seconds, sent = share * prices.move(op, before, after), elements * prices.get_itemsize(op)
            reshardings.append(Resharding(name, phase if share == 1 else "step", path, seconds, sent))

    for phase in (FORWARD, BACKWARD):
        done: set[Key] = set()
        for name, op in ops.items():
            if op.phase != phase or name not in splits:
                continue
            for operand, read in zip(op.operands, splits[name].operands, strict=True):
                made = output_sharding(splits, builder.graph, operand)
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
