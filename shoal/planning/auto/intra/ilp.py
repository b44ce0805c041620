"""The cheapest choice for every decision: Alpa's integer linear program (Zheng et al. 2022, equation 1), by HiGHS.

    minimise   sum_v  s_v . c_v  +  sum_g  sum_rj  z_g[r,j] R_g[r,j]
    with       s_v one choice of v,   e_gu[r,k] = (the source of g lies as row r) (reader u needs the set k of states),
               made linear by its sums over rows and over sets,
               z_g[r,j] >= the sum of e_gu[r,k] over the sets k with state j, for every reader u,
               sum_v s_v . m_v <= memory

Choices of a decision with the same sharding, or that need the same states, share one row or one column of e. A state
that several decisions read is paid once; with a single reader, e already has these seconds and z is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.base.errors import UsageError
from shoal.planning.auto.intra.problem import ShardingProblem, TensorMoves

SECONDS = 120.0  # time limit of a solve
INFEASIBLE = 2  # among the codes of `scipy.optimize.milp`
GAP = 1e-6  # relative to the cost: a solution this near to the optimum is accepted


class NothingFits(UsageError):
    """No choice for all decisions fits into the memory, or is possible at all."""

    def __init__(self, proven: bool = True):
        why = "fits into the memory of a device" if proven else f"was found within {SECONDS:.0f} s per solve"
        super().__init__(f"no split of the operators {why}.\n  Give more devices, more memory, or smaller inputs.")
        self.proven = proven  # False if the time limit ended the search before it found a choice


@dataclass(frozen=True)
class Solution:
    """A choice for every decision."""

    chosen: list[int]  # the index of the choice, for each decision
    cost: float  # seconds
    proven: bool = True  # whether no other solution costs less; False if the time limit ended the search


def solve(
    problem: ShardingProblem, capacity: float | None = None, in_flight: float = 1, seconds: float = SECONDS
) -> Solution:
    """Find the cheapest choices, or the best found within the time limit.

    Args:
        capacity: bytes of a device's memory, met to one in a million; None for no limit.
        in_flight: micro-batches kept for the backward pass at the same time, times the allocator's overhead.

    Raises:
        NothingFits: no solution fits, or none was found in time.
    """
    chosen, proven = _IntegerProgram(problem, capacity, in_flight).solve(seconds)
    if chosen is None or np.isinf(problem.cost(chosen)):
        raise NothingFits(proven)
    return Solution(chosen, problem.cost(chosen), proven)


class _IntegerProgram:
    """Variables (a cost and an upper bound), the binaries first, and rows (entries between two bounds)."""

    def __init__(self, problem: ShardingProblem, capacity: float | None, in_flight: float):
        self.objective: list[float] = []
        self.upper: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        self.least: list[float] = []
        self.most: list[float] = []
        self.choices = [[self._add_variable(cost) for cost in d.costs] for d in problem.decisions]
        self.binaries = len(self.objective)
        for variables in self.choices:
            self._add_row([(variable, 1.0) for variable in variables], 1.0, 1.0)
        for group in problem.moves:
            self._add_moves(group)
        if capacity is not None:
            scale = max(capacity, 1.0)
            row = [
                (variable, size / scale)
                for d, variables in zip(problem.decisions, self.choices, strict=True)
                for variable, size in zip(variables, d.memory + in_flight * d.saved, strict=True)
            ]
            self._add_row(row, -np.inf, capacity / scale)

    def solve(self, seconds: float) -> tuple[list[int] | None, bool]:
        """Return the best choices that were found, or None; and whether that is proven."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        unit = max(max(self.objective), 1e-30)
        rows, columns, values = (np.array(part) for part in zip(*self.entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.least), len(self.objective))).tocsr()
        found = milp(
            np.array(self.objective) / unit,
            constraints=LinearConstraint(matrix, self.least, self.most),
            integrality=np.arange(len(self.objective)) < self.binaries,
            bounds=Bounds(0.0, np.array(self.upper)),
            options={"mip_rel_gap": GAP, "time_limit": seconds},
        )
        if found.x is None:
            return None, found.status == INFEASIBLE
        return [int(np.argmax(found.x[variables])) for variables in self.choices], found.status == 0

    def _add_variable(self, cost: float) -> int:
        """Add a variable from 0 to 1, fixed at 0 if its cost is infinite."""
        self.objective.append(0.0 if np.isinf(cost) else float(cost))
        self.upper.append(0.0 if np.isinf(cost) else 1.0)
        return len(self.objective) - 1

    def _add_row(self, entries: list[tuple[int, float]], least: float, most: float) -> None:
        self.entries += [(len(self.least), column, value) for column, value in entries]
        self.least.append(least)
        self.most.append(most)

    def _add_moves(self, group: TensorMoves) -> None:
        rows, row_of_choice = np.unique(group.rows, return_inverse=True)
        seconds = group.seconds[rows]
        single = len(group.readers) == 1
        z = [] if single else [[self._add_variable(cost) for cost in row] for row in seconds]
        for reader, needs in group.readers:
            sets = list(dict.fromkeys(needs))
            costs = np.stack([seconds[:, sorted(states)].sum(1) for states in sets], 1)
            e = [[self._add_variable(cost if single or np.isinf(cost) else 0.0) for cost in row] for row in costs]
            self._add_sums(e, self.choices[group.source], row_of_choice.tolist())
            self._add_sums(list(zip(*e, strict=True)), self.choices[reader], [sets.index(states) for states in needs])
            for paid, using in zip(z, e, strict=False):
                for state, variable in enumerate(paid):
                    readers = [(u, -1.0) for u, states in zip(using, sets, strict=True) if state in states]
                    self._add_row([(variable, 1.0), *readers], 0.0, np.inf)

    def _add_sums(self, e: Sequence[Sequence[int]], choices: Sequence[int], classes: Sequence[int]) -> None:
        """Require that the e of each class sum to its choices."""
        for number, variables in enumerate(e):
            members = [(choice, -1.0) for choice, its in zip(choices, classes, strict=True) if its == number]
            self._add_row([(variable, 1.0) for variable in variables] + members, 0.0, 0.0)
