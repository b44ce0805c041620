"""The cheapest choice for every decision: Alpa's integer linear program (Zheng et al. 2022, equation 1), by HiGHS.

    minimise   sum_v  s_v . c_v  +  sum_(v,u)  sum_ij  e_vu[i,j] R_vu[i,j]
    with       s_v one choice of v,   e_vu[i,j] = s_v[i] s_u[j], made linear by its sums over rows and columns,
               sum_v s_v . m_v <= memory

Here choices of a decision that are alike for a pair are one row of its e, and a state that several decisions read is
paid once: z[i,b] >= e[i,b] of each of them. Before, choices go that a bound excludes
(`shoal.labs.autoshard.intra.bound`), and those that another is never worse than, whatever is chosen elsewhere: an
optimum is among what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shoal.labs.autoshard.intra.bound import within_bound
from shoal.labs.autoshard.intra.problem import ShardingProblem

SECONDS = 120.0  # of a solve, at most
INFEASIBLE = 2  # among the codes of `scipy.optimize.milp`
GAP = 1e-6  # of the cost: how near to the optimum is near enough


class NothingFits(Exception):
    """No choice of all decisions needs as little memory as there is, or can be done at all.

    Attributes:
        proven: whether that is known; else time was up before one was found.
    """

    def __init__(self, proven: bool = True):
        super().__init__()
        self.proven = proven


@dataclass(frozen=True)
class Solution:
    """What was chosen.

    Attributes:
        chosen: a choice for each decision, by its number in the problem that was given.
        cost: s.
        proven: whether it is known to be the least; else time was up.
    """

    chosen: list[int]
    cost: float
    proven: bool = True


def solve(
    problem: ShardingProblem, capacity: float | None = None, in_flight: float = 1, seconds: float = SECONDS
) -> Solution:
    """The cheapest choices; when time is up, the best that were met.

    Args:
        capacity: bytes of a device's memory; None for no limit.
        in_flight: micro-batches that are kept for the backward pass at once, with what an allocator has besides.
        seconds: that the integer program may take.

    Raises:
        NothingFits: none needs so little memory, or none was met in time.
    """
    least = sum((d.memory + in_flight * d.saved).min() for d in problem.decisions)
    if capacity is not None and least > capacity:
        raise NothingFits
    near, met = within_bound(problem, capacity, in_flight)
    small = problem.only(near)
    kept = undominated(small, capacity is not None)
    small = small.only(kept)
    chosen: list[int] | None
    if all(len(d.choices) == 1 for d in small.decisions):
        chosen, proven = [0] * len(small.decisions), True
        if capacity is not None and small.memory(chosen, in_flight) > capacity:
            raise NothingFits
    else:
        chosen, proven = _Program(small, capacity, in_flight).solve(seconds)
    found = [] if chosen is None else [[n[k[c]] for n, k, c in zip(near, kept, chosen, strict=True)]]
    if met is not None and not proven:
        found.append(met)
    best = min(found, key=problem.cost, default=None)
    if best is None or np.isinf(problem.cost(best)):
        raise NothingFits(proven)
    return Solution(best, problem.cost(best), proven)


# ---- before ----------------------------------------------------------------------------------------------------------


def undominated(problem: ShardingProblem, memory: bool) -> list[list[int]]:
    """The choices of each decision that may be part of an optimum.

    Choice b goes if a is never worse: its own cost and the most that any neighbour can make it dearer do not exceed
    that of b, and neither does its memory, where that counts.
    """
    kept = [list(range(len(d.choices))) for d in problem.decisions]
    while True:
        small, before = problem.only(kept), sum(map(len, kept))
        for number, d in enumerate(small.decisions):
            if len(d.choices) > 1:
                with np.errstate(invalid="ignore"):
                    worse = _worse(small, number)
                if memory:
                    for bytes_ in (d.memory, d.saved):
                        worse[bytes_[:, None] > bytes_[None, :]] = np.inf
                goes = _beaten(worse)
                if goes:
                    kept[number] = [k for i, k in enumerate(kept[number]) if i not in goes]
                    small = problem.only(kept)
        if sum(map(len, kept)) == before:
            return kept


def _worse(problem: ShardingProblem, number: int) -> np.ndarray:
    """[a, b]: how much dearer a can be than b, at most."""
    d = problem.decisions[number]
    worse = _less(d.costs[:, None], d.costs[:, None])
    for (i, j), matrix in problem.pairs.items():
        if number in (i, j):
            rows = matrix if i == number else matrix.T
            worse = worse + _less(rows, rows)
    for group in problem.shared:
        if group.source == number:
            rows = group.seconds[group.rows]
            more = np.maximum(0.0, _finite_difference(rows[:, None], rows[None]))
            worse = worse + more.sum(-1)
        for reader, needs in group.readers:
            if reader == number:
                most = group.seconds[np.unique(group.rows)].max(0)
                worse = worse + np.array([[sum(most[s] for s in a - b) for b in needs] for a in needs])
    return np.where(np.isnan(worse), np.inf, worse)  # neither can be done with some choice of a neighbour


def _less(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[i, j]: the most that row i of a exceeds row j of b."""
    return _finite_difference(a[:, None], b[None]).max(-1)


def _finite_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b, where what is infinite in b is never better than what is in a."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(b), -np.inf, a - np.where(np.isinf(b), 0.0, b))


def _beaten(worse: np.ndarray) -> set[int]:
    """Those that one which stays is no worse than; of equals the first stays."""
    goes: set[int] = set()
    for b in range(len(worse)):
        for a in np.flatnonzero(worse[:, b] <= 0):
            if a != b and a not in goes and (a < b or worse[b, a] > 0):
                goes.add(b)
                break
    return goes


# ---- the program -----------------------------------------------------------------------------------------------------


@dataclass
class _Program:
    """Variables and rows, as they are found."""

    problem: ShardingProblem
    capacity: float | None
    in_flight: float
    objective: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def solve(self, seconds: float) -> tuple[list[int] | None, bool]:
        """The best that was found, None if nothing was in time; and whether it is known to be the best.

        Raises:
            NothingFits: there is nothing.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        own, pairs = self._reduced()
        self.first = []
        for costs in own:
            self.first.append(len(self.objective))
            at = [self._variable(cost) for cost in costs]
            self._row([(i, 1.0) for i in at], 1.0, 1.0)
        binaries = len(self.objective)
        for (i, j), matrix in pairs.items():
            self._pair(i, j, matrix)
        for group in self.problem.shared:
            self._shared(group)
        if self.capacity is not None:
            scale = max(self.capacity, 1.0)
            row = [
                (self.first[number] + c, (d.memory[c] + self.in_flight * d.saved[c]) / scale)
                for number, d in enumerate(self.problem.decisions) for c in range(len(d.choices))
            ]  # fmt: skip
            self._row(row, -np.inf, self.capacity / scale)
        unit = max(max(self.objective), 1e-30)
        rows, columns, values = (np.array(part) for part in zip(*self.entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.least), len(self.objective))).tocsr()
        found = milp(
            np.array(self.objective) / unit,
            constraints=LinearConstraint(matrix, self.least, self.most),
            integrality=np.array([1] * binaries + [0] * (len(self.objective) - binaries)),
            bounds=Bounds(0.0, np.array(self.upper)),
            options={"mip_rel_gap": GAP, "time_limit": seconds},
        )
        if found.status == INFEASIBLE:
            raise NothingFits
        if found.x is None:
            return None, False
        chosen = [
            int(np.argmax(found.x[start : start + len(d.choices)]))
            for start, d in zip(self.first, self.problem.decisions, strict=True)
        ]
        return chosen, found.status == 0

    def _reduced(self) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
        """Costs of pairs without what each row and each column costs at least, which is the choice's own."""
        own = [d.costs.astype(float).copy() for d in self.problem.decisions]
        pairs = {}
        for (i, j), matrix in self.problem.pairs.items():
            rest = matrix.astype(float).copy()
            for axis, number in ((1, i), (0, j)):
                least = rest.min(axis)
                own[number] = own[number] + least
                rest -= np.where(np.isinf(least), 0.0, least).reshape((-1, 1) if axis else (1, -1))
            if rest.any():
                pairs[i, j] = rest
        return own, pairs

    def _variable(self, cost: float, upper: float = 1.0) -> int:
        self.objective.append(0.0 if np.isinf(cost) else float(cost))
        self.upper.append(0.0 if np.isinf(cost) else upper)
        return len(self.objective) - 1

    def _row(self, entries: list[tuple[int, float]], least: float, most: float) -> None:
        self.entries += [(len(self.least), column, value) for column, value in entries]
        self.least.append(least)
        self.most.append(most)

    def _pair(self, i: int, j: int, matrix: np.ndarray) -> None:
        rows, of_row = np.unique(matrix, axis=0, return_inverse=True)
        reduced, of_column = np.unique(rows, axis=1, return_inverse=True)
        e = [[self._variable(cost) for cost in row] for row in reduced]
        self._sums(i, of_row, e)
        self._sums(j, of_column, [list(column) for column in zip(*e, strict=True)])

    def _sums(self, number: int, classes: np.ndarray, e: list[list[int]]) -> None:
        """The e of a class add up to the choices in it."""
        for row, variables in enumerate(e):
            members = [(self.first[number] + int(c), -1.0) for c in np.flatnonzero(classes.reshape(-1) == row)]
            self._row([(v, 1.0) for v in variables] + members, 0.0, 0.0)

    def _shared(self, group) -> None:
        rows, again = np.unique(group.rows, return_inverse=True)
        z = [[self._variable(cost) for cost in group.seconds[row]] for row in rows]
        for reader, needs in group.readers:
            sets = list(dict.fromkeys(needs))
            classes = np.array([sets.index(states) for states in needs])
            e = [
                [self._variable(float("inf") if np.isinf(group.seconds[row][sorted(states)]).any() else 0.0)
                 for states in sets]
                for row in rows
            ]  # fmt: skip
            self._sums(group.source, again, e)
            self._sums(reader, classes, [list(column) for column in zip(*e, strict=True)])
            for r in range(len(rows)):
                for state in set().union(*sets):
                    if group.seconds[rows[r]][state] > 0 and not np.isinf(group.seconds[rows[r]][state]):
                        using = [(e[r][k], -1.0) for k, states in enumerate(sets) if state in states]
                        self._row([(z[r][state], 1.0), *using], 0.0, np.inf)
