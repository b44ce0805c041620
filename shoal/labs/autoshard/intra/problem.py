"""The choices of a whole graph as one problem: decisions with costs, and what pairs of them cost.

As in Alpa (Zheng et al. 2022, section 4.2), operators that compute little follow one of their operands, the largest and
latest, and are decided with it. What is left to decide: where weights, their optimizer states and inputs lie, how each
product of matrices is split, and sums of two tensors that were computed apart. All that a choice entails is priced:
moves of what followers need otherwise, and of each tensor into each state once in each of the two phases, however many
operators read it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from string import ascii_uppercase

import numpy as np

from shoal.labs.autoshard.capture.graph import BACKWARD, FORWARD, VIEWS, Operator, OperatorGraph, Ref
from shoal.labs.autoshard.intra.choices import OperatorSplit, follow, settled, splits, states, whole
from shoal.labs.autoshard.intra.price import Prices
from shoal.labs.autoshard.intra.spaces import LOOKUPS, IterationSpace, space_of
from shoal.labs.autoshard.notation.notation import Sharding

UPDATE, GIVEN = "update ", "given "
"""Before a parameter's name: the operator that changes it, which lies as the optimizer's state does; before the name of
what the graph gives back: where it lies then, parts of a sum added up."""
ENDS = (UPDATE, GIVEN)


@dataclass
class Decision:
    """One thing to decide, and all that follows from it.

    Attributes:
        name: of the operator that decides.
        choices: for each choice, how every operator of the decision is done.
        costs: of each [s].
        memory: of each, bytes of a device: weights, gradients, optimizer states.
        saved: of each, bytes of what the backward pass needs of one micro-batch.
    """

    name: str
    choices: list[dict[str, OperatorSplit]]
    costs: np.ndarray
    memory: np.ndarray
    saved: np.ndarray


@dataclass(frozen=True)
class TensorMoves:
    """The moves of one tensor from the decision that makes it to those that read it: each state is made once.

    Attributes:
        source: the decision that makes it.
        rows: for each of its choices, the row of ``seconds``.
        seconds: [rows, states] of the moves.
        readers: for each decision that reads, the states that each of its choices needs.
    """

    source: int
    rows: np.ndarray
    seconds: np.ndarray
    readers: tuple[tuple[int, tuple[frozenset[int], ...]], ...]

    def cost(self, chosen: list[int]) -> float:
        """Seconds of one choice for each decision."""
        needed = set().union(*(needs[chosen[reader]] for reader, needs in self.readers))
        return float(sum(self.seconds[self.rows[chosen[self.source]], state] for state in needed))


@dataclass
class ShardingProblem:
    """What to decide, and the moves between decisions."""

    decisions: list[Decision]
    moves: list[TensorMoves] = field(default_factory=list)

    def cost(self, chosen: list[int]) -> float:
        """Seconds of one choice for each decision; infinite if it cannot be done."""
        total = sum(d.costs[c] for d, c in zip(self.decisions, chosen, strict=True))
        return float(total + sum(group.cost(chosen) for group in self.moves))

    def memory(self, chosen: list[int], in_flight: float = 1) -> float:
        """Bytes of one choice for each decision, with so many micro-batches kept for the backward pass."""
        return float(sum(
            d.memory[c] + in_flight * d.saved[c] for d, c in zip(self.decisions, chosen, strict=True)
        ))  # fmt: skip

    def restricted(self, allowed: Callable[[dict[str, OperatorSplit]], bool]) -> ShardingProblem:
        """With only some choices.

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


@dataclass(frozen=True)
class Bytes:
    """What a parameter needs besides itself, bytes of an element.

    Attributes:
        gradient: of its gradient.
        state: of the optimizer's state, a master copy of the weight in it.
    """

    gradient: float
    state: float


class Builder:
    """Makes the problem of a graph.

    Args:
        microbatches: of a step: gradients are reduced, and weights updated, once for all of them.
    """

    def __init__(self, graph: OperatorGraph, prices: Prices, bytes_: Bytes, microbatches: int = 1):
        self.prices, self.bytes, self.once = prices, bytes_, 1 / microbatches
        self.graph = with_ends(graph)
        self.ops, self.mesh = self.graph.ops, prices.mesh
        self.spaces = {name: _space(op, self.ops) for name, op in self.ops.items()}
        self.users = self.graph.users()
        self.constants = _constants(self.graph)
        self.stored = _stored(self.graph)
        self.leader: dict[str, str] = {}
        self.members: dict[str, list[str]] = {}
        self.main: dict[str, int] = {}
        self._lead()
        self.kept = self._kept()

    def problem(self) -> ShardingProblem:
        """The decisions with their costs."""
        decisions = [self._decision(name) for name in self.members]
        number = {d.name: i for i, d in enumerate(decisions)}
        problem = ShardingProblem(decisions)
        for name in self.leader:
            for phase in (FORWARD, BACKWARD):
                self._moves(name, phase, problem, number)
        for update, name in ((d.name, d.name.removeprefix(UPDATE)) for d in decisions if d.name.startswith(UPDATE)):
            self._renewal(number[update], number[name], self.ops[name], problem)
        return problem

    # ---- who follows whom --------------------------------------------------------------------------------------------

    def _lead(self) -> None:
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
        """Whether it is a product, or joins what came on different ways."""
        if op.op == "product" or op.op in LOOKUPS or op.name.startswith(ENDS):
            return True
        leaders = {self.leader[name] for name in op.operands if name in self.leader}
        return space.together and len(leaders) > 1 and all(self.ops[n].shape == op.shape for n in op.operands)

    def _kept(self) -> set[str]:
        """Tensors of the forward pass whose memory lives until the backward pass: not those of weights and inputs; of a
        stage's boundaries each micro-batch has its own."""
        return {
            self.stored[operand] for op in self.ops.values() if op.phase == BACKWARD and op.kind == "call"
            for operand in op.operands
            if self.ops[operand].phase != BACKWARD and self.ops[self.stored[operand]].kind in ("call", "boundary")
            and operand not in self.constants
        }  # fmt: skip

    # ---- one decision ------------------------------------------------------------------------------------------------

    def _decision(self, name: str) -> Decision:
        choices = [self.followed(name, split) for split in self._root(name)]
        kinds = [self._priced(choice) for choice in choices]
        costs, memory, saved = (np.array(column) for column in zip(*kinds, strict=True))
        return Decision(name, choices, costs, memory, saved)

    def _root(self, name: str) -> list[OperatorSplit]:
        op, space = self.ops[name], self.spaces[name]
        if op.kind != "call":
            return [OperatorSplit((), state, state, 1) for state in states(op.shape, self.mesh)]
        if space is None:
            operands = tuple(whole(len(self.ops[operand].shape)) for operand in op.operands)
            return [OperatorSplit(operands, whole(len(op.shape)), whole(len(op.shape)))]
        return [
            replace(split, out=out)
            for split in splits(space, self.mesh) for out in settled(split.made, op.shape, self.mesh)
        ]  # fmt: skip

    def followed(self, name: str, root: OperatorSplit) -> dict[str, OperatorSplit]:
        done = {name: root}
        for member in self.members[name][1:]:
            op, space, main = self.ops[member], self.spaces[member], self.main[member]
            if space is None:  # one of several outputs of what is done whole
                done[member] = OperatorSplit((whole(0),), whole(len(op.shape)), whole(len(op.shape)))
            else:
                done[member] = follow(space, main, done[op.operands[main]].out, self.mesh)
        return done

    def _priced(self, choice: dict[str, OperatorSplit]) -> tuple[float, float, float]:
        seconds = memory = saved = 0.0
        moved: set[tuple] = set()
        for name, split in choice.items():
            op = self.ops[name]
            held = [(self.ops[operand], lies) for operand, lies in zip(op.operands, split.operands, strict=True)]
            space = self.spaces[name]
            if op.kind == "call" and not name.startswith(ENDS):
                seconds += self.prices.work(op, space.flops / split.parts if space else 0.0, held, split.made)
                seconds += self.prices.move(op, split.made, split.out)
            for operand, lies in held:
                key = (operand.name, op.phase, lies)
                if operand.name in choice and key not in moved:
                    moved.add(key)
                    seconds += self.prices.move(operand, choice[operand.name].out, lies)
            elements = self.prices.local(op, split.out) / self.prices.bytes_of(op)
            memory += self.prices.local(op, split.out) if op.kind == "parameter" else 0.0
            memory += elements * self.bytes.state if name.startswith(UPDATE) else 0.0
            memory += elements * self.bytes.gradient * self._gradient(name)
            saved += self.prices.local(op, split.out) if name in self.kept else 0.0
        return seconds, memory, saved

    def _gradient(self, name: str) -> bool:
        return any(user.name.startswith(UPDATE) for user in self.users[name])

    # ---- between decisions -------------------------------------------------------------------------------------------

    def _moves(self, name: str, phase: str, problem: ShardingProblem, number: dict[str, int]) -> None:
        """What others need of a tensor in a phase."""
        here = self.leader[name]
        uses: dict[str, list[tuple[str, int]]] = {}
        for user in self.users[name]:
            if user.phase == phase and self.leader.get(user.name) not in (here, None):
                for at, operand in enumerate(user.operands):
                    if operand == name:
                        uses.setdefault(self.leader[user.name], []).append((user.name, at))
        if not uses:
            return
        op, source = self.ops[name], problem.decisions[number[here]]
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
            key = (choice[name].out, frozenset(self._inside(name, phase, choice)))
            if key not in rows:
                rows[key] = len(rows)
                weight = self.weight(name, phase)
                seconds.append([0.0 if state in key[1] else weight * self.prices.move(op, key[0], state)
                                for state in targets])  # fmt: skip
            index.append(rows[key])
        problem.moves.append(TensorMoves(number[here], np.array(index), np.array(seconds), tuple(readers)))

    def _renewal(self, update: int, parameter: int, op: Operator, problem: ShardingProblem) -> None:
        """New weights go from where they are made to where they are read."""
        made = [choice[UPDATE + op.name].out for choice in problem.decisions[update].choices]
        read = [choice[op.name].out for choice in problem.decisions[parameter].choices]
        rows, states = list(dict.fromkeys(made)), list(dict.fromkeys(read))
        seconds = self.once * np.array([[self.prices.move(op, row, state) for state in states] for row in rows])
        reader = (parameter, tuple(frozenset({states.index(state)}) for state in read))
        problem.moves.append(TensorMoves(update, np.array([rows.index(row) for row in made]), seconds, (reader,)))

    def _inside(self, name: str, phase: str, choice: dict[str, OperatorSplit]) -> list[Sharding]:
        """The states into which the decision that makes a tensor moves it itself."""
        return [
            lies for user in self.users[name] if user.phase == phase and user.name in choice
            for operand, lies in zip(user.operands, choice[user.name].operands, strict=True) if operand == name
        ]  # fmt: skip

    def weight(self, name: str, phase: str) -> float:
        """Of moves that are made once in a step, for all micro-batches."""
        updates = [user.name.startswith(UPDATE) for user in self.users[name] if user.phase == phase]
        return self.once if updates and all(updates) else 1.0


def with_ends(graph: OperatorGraph) -> OperatorGraph:
    """With an operator for each trained parameter that turns its gradient into its new value, and one for all that is
    given back."""
    ops = dict(graph.ops)

    def end(kind: str, name: str, of: str, phase: str) -> None:
        ops[kind + name] = Operator(
            kind + name, "call", f"{kind.strip()}.end", ops[of].shape, ops[of].dtype, (Ref(of),), phase=phase
        )

    for name in dict.fromkeys(graph.outputs):
        end(GIVEN, name, name, FORWARD)
    for name, gradient in graph.gradients.items():
        parameter = ops[name].kind == "parameter"
        end(UPDATE if parameter else GIVEN, name if parameter else gradient, gradient, BACKWARD)
    return OperatorGraph(ops, graph.outputs, graph.gradients)


def _space(op: Operator, ops: dict[str, Operator]) -> IterationSpace | None:
    if op.kind != "call" or op.op == "getitem":
        return None
    if op.name.startswith(ENDS):
        letters = tuple(ascii_uppercase[: len(op.shape)])
        return IterationSpace(dict(zip(letters, op.shape, strict=True)), (letters,), letters)
    return space_of(op, tuple(ops[operand].shape for operand in op.operands))


def _constants(graph: OperatorGraph) -> set[str]:
    """What depends on nothing from outside: every device makes it, whole."""
    found: set[str] = set()
    for op in graph.ops.values():
        if op.kind == "call" and all(operand in found for operand in op.operands):
            found.add(op.name)
    return found


def _stored(graph: OperatorGraph) -> dict[str, str]:
    """Whose memory each tensor lies in: that of the operator which wrote it."""
    found: dict[str, str] = {}
    for name, op in graph.ops.items():
        found[name] = found[op.operands[0]] if op.op in VIEWS else name
    return found
