"""The choices for a graph as one problem: decisions with costs, and the costs of pairs of them.

As in Alpa (Zheng et al. 2022, section 4.2), operators that compute little follow one of their operands, the largest and
latest, and are decided with it. Decisions remain for weights, their optimizer states and inputs, products of matrices,
and sums of two tensors that were computed apart. The price of a choice includes the moves of operands that followers
read in another sharding. A tensor is moved into a sharding once in each of the two phases, however many operators read
it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from shoal.engine.sharding.graph import BACKWARD, FORWARD, VIEWS, Operator, OperatorGraph, Ref
from shoal.engine.sharding.named_axes import Sharding
from shoal.engine.sharding.plan import ENDS, GIVEN, UPDATE, OperatorSplit
from shoal.planning.auto.intra.choices import follow, list_reductions, list_shardings, list_splits, split_nothing
from shoal.planning.auto.intra.price import Prices
from shoal.planning.auto.intra.spaces import LOOKUPS, IterationSpace, build_space


@dataclass
class Decision:
    """The choices for an operator and its followers."""

    name: str  # of the operator that decides
    choices: list[dict[str, OperatorSplit]]  # for each choice, the split of every operator of the decision
    costs: np.ndarray  # of each [s]
    memory: np.ndarray  # of each, bytes of a device: weights, gradients, optimizer states
    saved: np.ndarray  # of each, bytes that the backward pass needs of one micro-batch


@dataclass(frozen=True)
class TensorMoves:
    """The moves of one tensor from the decision that makes it to its readers: each state is made once."""

    source: int  # the index of the decision that makes it
    rows: np.ndarray  # for each of its choices, the row of `seconds`
    seconds: np.ndarray  # [rows, states] of the moves
    # for each decision that reads, the states that each of its choices needs
    readers: tuple[tuple[int, tuple[frozenset[int], ...]], ...]

    def cost(self, chosen: list[int]) -> float:
        needed = set().union(*(needs[chosen[reader]] for reader, needs in self.readers))
        return float(sum(self.seconds[self.rows[chosen[self.source]], state] for state in needed))


@dataclass
class ShardingProblem:
    decisions: list[Decision]
    moves: list[TensorMoves] = field(default_factory=list)

    def cost(self, chosen: list[int]) -> float:
        """Return the seconds of one choice for each decision; infinite if it is impossible."""
        total = sum(d.costs[c] for d, c in zip(self.decisions, chosen, strict=True))
        return float(total + sum(group.cost(chosen) for group in self.moves))

    def memory(self, chosen: list[int], in_flight: float = 1) -> float:
        """Return the bytes of one choice for each decision, with ``in_flight`` micro-batches kept for the backward."""
        return float(sum(
            d.memory[c] + in_flight * d.saved[c] for d, c in zip(self.decisions, chosen, strict=True)
        ))  # fmt: skip

    def restricted(self, allowed: Callable[[dict[str, OperatorSplit]], bool]) -> ShardingProblem:
        """Return the problem with the allowed choices alone.

        Raises:
            ValueError: a decision has none left.
        """
        kept = [[i for i, choice in enumerate(d.choices) if allowed(choice)] for d in self.decisions]
        for d, k in zip(self.decisions, kept, strict=True):
            if not k:
                raise ValueError(f"no choice is left for {d.name}")
        decisions = [
            Decision(d.name, [d.choices[i] for i in k], d.costs[k], d.memory[k], d.saved[k])
            for d, k in zip(self.decisions, kept, strict=True)
        ]
        moves = [
            replace(g, rows=g.rows[kept[g.source]],
                    readers=tuple((r, tuple(needs[c] for c in kept[r])) for r, needs in g.readers))
            for g in self.moves
        ]  # fmt: skip
        return ShardingProblem(decisions, moves)


class Builder:
    """Builds the problem of a graph.

    Args:
        microbatches: per step: gradients are reduced, and weights updated, once for all of them.
        in_place: whether the optimizer states of a weight have to be kept as it is.
    """

    def __init__(self, graph: OperatorGraph, prices: Prices, microbatches: int = 1, *, in_place: bool = False):
        self.prices, self.once, self.in_place = prices, 1 / microbatches, in_place
        self.graph = _add_ends(graph)
        self.ops, self.mesh = self.graph.ops, prices.mesh
        self.spaces = {name: _build_space(op, self.ops) for name, op in self.ops.items()}
        self.users = self.graph.users()
        self.constants = _find_constants(self.graph)
        self.stored = _find_storage(self.graph)
        self.leader: dict[str, str] = {}
        self.members: dict[str, list[str]] = {}
        self.main: dict[str, int] = {}
        self._assign_leaders()
        self.kept = self._find_kept()

    def problem(self) -> ShardingProblem:
        decisions = [self._build_decision(name) for name in self.members]
        number = {d.name: i for i, d in enumerate(decisions)}
        problem = ShardingProblem(decisions)
        for name in self.leader:
            for phase in (FORWARD, BACKWARD):
                self._add_moves(name, phase, problem, number)
        for update, name in ((d.name, d.name.removeprefix(UPDATE)) for d in decisions if d.name.startswith(UPDATE)):
            self._add_update_moves(number[update], number[name], self.ops[name], problem)
        return problem

    # ---- leaders and followers ---------------------------------------------------------------------------------------

    def _assign_leaders(self) -> None:
        depth: dict[str, int] = {}
        for name, op in self.ops.items():
            if name in self.constants:
                continue
            live = [i for i, operand in enumerate(op.operands) if operand not in self.constants]
            depth[name] = 1 + max((depth[op.operands[i]] for i in live), default=0)
            main = max(live, key=lambda i: (self.ops[op.operands[i]].numel, depth[op.operands[i]]), default=None)
            space = self.spaces[name]
            if op.op == "getitem" or (space is not None and main is not None and not self._decides(op, space)):
                self.main[name] = main or 0
                self.leader[name] = self.leader[op.operands[main or 0]]
            else:
                self.leader[name] = name
            self.members.setdefault(self.leader[name], []).append(name)

    def _decides(self, op: Operator, space: IterationSpace) -> bool:
        """Whether it is a product, or adds tensors of different leaders."""
        if op.op == "product" or op.op in LOOKUPS or op.name.startswith(ENDS):
            return True
        leaders = {self.leader[name] for name in op.operands if name in self.leader}
        return space.together and len(leaders) > 1 and all(self.ops[n].shape == op.shape for n in op.operands)

    def _find_kept(self) -> set[str]:
        """Find the tensors that each micro-batch keeps for the backward pass: activations and a stage's boundaries."""
        return {
            self.stored[operand] for op in self.ops.values() if op.phase == BACKWARD and op.kind == "call"
            for operand in op.operands
            if self.ops[operand].phase != BACKWARD and self.ops[self.stored[operand]].kind in ("call", "boundary")
            and operand not in self.constants
        }  # fmt: skip

    # ---- one decision ------------------------------------------------------------------------------------------------

    def _build_decision(self, name: str) -> Decision:
        choices = [self.follow_root(name, split) for split in self._list_roots(name)]
        prices = [self._price_choice(choice) for choice in choices]
        costs, memory, saved = (np.array(column) for column in zip(*prices, strict=True))
        return Decision(name, choices, costs, memory, saved)

    def _list_roots(self, name: str) -> list[OperatorSplit]:
        op, space = self.ops[name], self.spaces[name]
        if op.kind != "call":
            return [OperatorSplit((), state, state) for state in list_shardings(op.sizes, self.mesh)]
        if space is None:
            return [split_nothing((self.ops[operand] for operand in op.operands), op)]
        return [
            replace(split, out=out)
            for split in list_splits(space, self.mesh) for out in list_reductions(split.made, op.sizes, self.mesh)
        ]  # fmt: skip

    def follow_root(self, name: str, root: OperatorSplit) -> dict[str, OperatorSplit]:
        """Split all operators of a decision by the split of the one that decides."""
        done = {name: root}
        for member in self.members[name][1:]:
            op, space, main = self.ops[member], self.spaces[member], self.main[member]
            if space is None:  # one of several outputs of an operator that is not split
                done[member] = split_nothing((self.ops[operand] for operand in op.operands), op)
            else:
                done[member] = follow(space, main, done[op.operands[main]].out, self.mesh)
        return done

    def _price_choice(self, choice: dict[str, OperatorSplit]) -> tuple[float, float, float]:
        seconds = memory = saved = 0.0
        moved: set[tuple] = set()
        for name, split in choice.items():
            op = self.ops[name]
            reads = [(self.ops[operand], state) for operand, state in zip(op.operands, split.operands, strict=True)]
            space = self.spaces[name]
            if op.kind == "call" and not name.startswith(ENDS):
                seconds += self.prices.work(op, space.flops / split.parts if space else 0.0, reads, split.made)
                seconds += self.prices.move(op, split.made, split.out)
            for operand, state in reads:
                key = (operand.name, op.phase, state)
                if operand.name in choice and key not in moved:
                    moved.add(key)
                    seconds += self.prices.move(operand, choice[operand.name].out, state)
            elements = self.prices.local_numel(op, split.out)
            size = elements * self.prices.get_itemsize(op)
            memory += size if op.kind == "parameter" else 0.0
            memory += elements * self.prices.state_bytes if name.startswith(UPDATE) else 0.0
            if any(user.name.startswith(UPDATE) for user in self.users[name]):
                memory += elements * self.prices.gradient_bytes
            saved += size if name in self.kept else 0.0
        return seconds, memory, saved

    # ---- between decisions -------------------------------------------------------------------------------------------

    def _add_moves(self, name: str, phase: str, problem: ShardingProblem, number: dict[str, int]) -> None:
        """Add the moves of a tensor to the other decisions that read it in a phase."""
        leader = self.leader[name]
        uses: dict[str, list[tuple[str, int]]] = {}
        for user in self.users[name]:
            if user.phase == phase and self.leader.get(user.name) not in (leader, None):
                for at, operand in enumerate(user.operands):
                    if operand == name:
                        uses.setdefault(self.leader[user.name], []).append((user.name, at))
        if not uses:
            return
        op, source = self.ops[name], problem.decisions[number[leader]]
        targets: dict[Sharding, int] = {}
        readers = []
        for reader, places in uses.items():
            needs = [
                frozenset(targets.setdefault(choice[user].operands[at], len(targets)) for user, at in places)
                for choice in problem.decisions[number[reader]].choices
            ]
            readers.append((number[reader], tuple(needs)))
        rows: dict[tuple, int] = {}
        index, seconds = [], []
        for choice in source.choices:
            key = (choice[name].out, frozenset(self._own_states(name, phase, choice)))
            if key not in rows:
                rows[key] = len(rows)
                share = self.step_share(name, phase)
                seconds.append([0.0 if state in key[1] else share * self.prices.move(op, key[0], state)
                                for state in targets])  # fmt: skip
            index.append(rows[key])
        problem.moves.append(TensorMoves(number[leader], np.array(index), np.array(seconds), tuple(readers)))

    def _add_update_moves(self, update: int, parameter: int, op: Operator, problem: ShardingProblem) -> None:
        """Add the moves of a new weight from its update to the sharding in which it is kept."""
        made = [choice[UPDATE + op.name].out for choice in problem.decisions[update].choices]
        read = [choice[op.name].out for choice in problem.decisions[parameter].choices]
        rows, states = list(dict.fromkeys(made)), list(dict.fromkeys(read))
        seconds = self.once * np.array([
            [np.inf if self.in_place and row != state else self.prices.move(op, row, state) for state in states]
            for row in rows
        ])  # fmt: skip
        reader = (parameter, tuple(frozenset({states.index(state)}) for state in read))
        problem.moves.append(TensorMoves(update, np.array([rows.index(row) for row in made]), seconds, (reader,)))

    def _own_states(self, name: str, phase: str, choice: dict[str, OperatorSplit]) -> list[Sharding]:
        """List the states into which the decision that makes a tensor moves it itself."""
        return [
            state for user in self.users[name] if user.phase == phase and user.name in choice
            for operand, state in zip(user.operands, choice[user.name].operands, strict=True) if operand == name
        ]  # fmt: skip

    def step_share(self, name: str, phase: str) -> float:
        """Return a micro-batch's share of moves of a tensor: below 1 for those made once per step, for an update."""
        updates = [user.name.startswith(UPDATE) for user in self.users[name] if user.phase == phase]
        return self.once if updates and all(updates) else 1.0


def _add_ends(graph: OperatorGraph) -> OperatorGraph:
    """Add an operator for each trained parameter, from its gradient to its new value, and one for each output."""
    ops = dict(graph.ops)

    def end(kind: str, name: str, source: str, phase: str) -> None:
        ops[kind + name] = Operator(
            kind + name, "call", f"{kind.strip()}.end", ops[source].shape, ops[source].dtype, (Ref(source),),
            phase=phase,
        )  # fmt: skip

    for name in dict.fromkeys(graph.outputs):
        end(GIVEN, name, name, FORWARD)
    for name, gradient in graph.gradients.items():
        parameter = ops[name].kind == "parameter"
        end(UPDATE if parameter else GIVEN, name if parameter else gradient, gradient, BACKWARD)
    return OperatorGraph(ops, graph.outputs, graph.gradients)


def _build_space(op: Operator, ops: dict[str, Operator]) -> IterationSpace | None:
    if op.kind != "call" or op.op == "getitem":
        return None
    if op.name.startswith(ENDS):
        return IterationSpace(op.sizes, (tuple(op.sizes),), tuple(op.sizes))
    return build_space(op, tuple(ops[operand].shape for operand in op.operands))


def _find_constants(graph: OperatorGraph) -> set[str]:
    """Find the operators that depend on nothing from outside: every device computes them in full."""
    found: set[str] = set()
    for op in graph.ops.values():
        if op.kind == "call" and all(operand in found for operand in op.operands):
            found.add(op.name)
    return found


def _find_storage(graph: OperatorGraph) -> dict[str, str]:
    """Find the operator that wrote the memory of each tensor, through views."""
    found: dict[str, str] = {}
    for name, op in graph.ops.items():
        found[name] = found[op.operands[0]] if op.op in VIEWS else name
    return found
