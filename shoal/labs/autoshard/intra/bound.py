"""Choices that no optimum has, by a bound: the integer program is left with the others.

Costs can be moved between decisions and what several of them cost together without changing any total. In turn each
decision takes all that is certain from what joins it to others, and gives shares of it to those whose turn comes later;
then all the way back (Kolmogorov 2006, section 3; 2015 for more than two together): a coordinate ascent on the dual of
the program without whole numbers. At any time the least of every term, added up, is a bound. Where the bound with one
choice is above the cost of a solution at hand, the choice is in no better one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from shoal.labs.autoshard.intra.problem import ShardingProblem, Shared

ROUNDS, EACH = 60, 6  # there and back, and after how many of them choices are left out
LARGEST = 300_000  # numbers in a term of more than two decisions
SLACK = 1e-9  # relative: by how much sums differ in rounding
RAISE, RAISES = 4.0, 6  # of a price that is too low, and how often before the memory is taken for too small


def within_bound(
    problem: ShardingProblem, capacity: float | None = None, in_flight: float = 1
) -> tuple[list[list[int]], list[int] | None]:
    """The choices of each decision that may be in an optimum, and the best solution that was met and fits the memory.

    All choices and None, if none was met. Where memory is short, a byte has a price, which every solution that fits
    pays for no more than the capacity.

    Args:
        capacity, in_flight: as `shoal.labs.autoshard.intra.ilp.solve` has them.
    """
    kept = [np.arange(len(d.choices)) for d in problem.decisions]
    best, left, bound, price = math.inf, problem, _Bound(problem), _Price(capacity)
    met: list[int] | None = None
    for number in range(ROUNDS):
        bound.round()
        if number % EACH:
            continue
        chosen = bound.solution()
        cost = left.cost(chosen)
        fits = capacity is None or left.memory(chosen, in_flight) <= capacity
        if fits and cost < best:
            best, met = cost, [int(k[c]) for k, c in zip(kept, chosen, strict=True)]
        paid = price.now * (capacity or 0.0)
        least = bound.least() - paid
        goes = [each - paid > best + SLACK * (best + paid) for each in bound.with_each()]
        if any(out.any() for out in goes):
            stay = [np.flatnonzero(~out) for out in goes]
            if not all(map(len, stay)):
                break  # what is at hand is the best but for rounding
            kept = [k[s] for k, s in zip(kept, stay, strict=True)]
            left = left.only([list(s) for s in stay])
            bound = bound.only(stay, left)
        if all(len(k) == 1 for k in kept) or least >= best * (1 - SLACK) or price.raises > RAISES:
            break
        if more := price.change(cost, fits):
            bound.charge([more * (d.memory + in_flight * d.saved) for d in left.decisions])
    return [k.tolist() for k in kept], met


class _Price:
    """Seconds for a byte: raised until what is found fits, then between the last two that did and did not."""

    def __init__(self, capacity: float | None):
        self.capacity, self.now, self.low, self.high, self.raises = capacity, 0.0, 0.0, math.inf, 0

    def change(self, cost: float, fits: bool) -> float:
        """By how much it is another from now on."""
        if self.capacity is None or math.isinf(cost) or (fits and not self.now):
            return 0.0
        self.low, self.high = (self.low, self.now) if fits else (self.now, self.high)
        before = self.now
        if self.high < math.inf:
            self.now = (self.low + self.high) / 2
        else:
            self.now, self.raises = RAISE * self.now or cost / self.capacity / RAISE, self.raises + 1
        return self.now - before


class _Term:
    """What some decisions cost together, by classes of choices that cost the same.

    Attributes:
        costs: [classes of the first, of the second, ...].
        classes: of each decision, [choices] the class of each.
    """

    def __init__(self, decisions: Sequence[int], costs: np.ndarray, classes: Sequence[np.ndarray]):
        self.decisions, self.costs, self.classes = tuple(decisions), costs, list(classes)

    def only(self, stay: Sequence[np.ndarray]) -> _Term:
        """With only these choices."""
        costs, classes = self.costs, []
        for axis, decision in enumerate(self.decisions):
            used, of = np.unique(self.classes[axis][stay[decision]], return_inverse=True)
            costs = costs.take(used, axis)
            classes.append(of.reshape(-1))
        return _Term(self.decisions, costs, classes)

    def taken(self, decision: int) -> np.ndarray:
        """[choices] what each choice costs here at least, which is then no longer here."""
        axis = self.decisions.index(decision)
        least = self.costs.min(tuple(i for i in range(self.costs.ndim) if i != axis))
        self._add(axis, -np.where(np.isinf(least), 0.0, least))
        return least[self.classes[axis]]

    def given(self, decision: int, costs: np.ndarray) -> np.ndarray:
        """[choices] what of their costs has come here: of each class the least."""
        axis = self.decisions.index(decision)
        least = np.full(self.costs.shape[axis], np.inf)
        np.minimum.at(least, self.classes[axis], costs)
        least[np.isinf(least)] = 0.0
        self._add(axis, least)
        return least[self.classes[axis]]

    def _add(self, axis: int, costs: np.ndarray) -> None:
        self.costs = self.costs + costs.reshape([-1 if i == axis else 1 for i in range(self.costs.ndim)])

    def with_chosen(self, chosen: Sequence[int | None], decision: int) -> np.ndarray:
        """[choices] what each choice of a decision costs here at least, with what is chosen of others."""
        index = tuple(
            slice(None) if d == decision or chosen[d] is None else self.classes[axis][chosen[d]]
            for axis, d in enumerate(self.decisions)
        )
        rest = [d for d in self.decisions if d == decision or chosen[d] is None]
        axis = rest.index(decision)
        costs = self.costs[index].min(tuple(i for i in range(len(rest)) if i != axis))
        return costs[self.classes[self.decisions.index(decision)]]


class _Bound:
    """A problem whose costs are moved."""

    def __init__(self, problem: ShardingProblem, own: Sequence[np.ndarray] | None = None, terms: Sequence[_Term] = ()):
        self.problem = problem
        self.own = [d.costs.astype(float) for d in problem.decisions] if own is None else list(own)
        self.terms = list(terms) if own is not None else list(_terms(problem))
        self.of: list[list[_Term]] = [[] for _ in self.own]
        for term in self.terms:
            for decision in term.decisions:
                self.of[decision].append(term)

    def only(self, stay: Sequence[np.ndarray], problem: ShardingProblem) -> _Bound:
        """With only these choices, costs as they lie now."""
        own = [costs[s] for costs, s in zip(self.own, stay, strict=True)]
        return _Bound(problem, own, [term.only(stay) for term in self.terms])

    def round(self) -> None:
        """There and back."""
        for order in (range(len(self.own)), range(len(self.own))[::-1]):
            onward = order.step > 0
            for decision in order:
                self._take(decision)
                later = [t for t in self.of[decision] if (max if onward else min)(t.decisions) != decision]
                before = [t for t in self.of[decision] if (min if onward else max)(t.decisions) != decision]
                share = self.own[decision] / max(len(later), len(before), 1)
                for term in later:
                    self._give(decision, term, share)

    def _take(self, decision: int) -> None:
        for term in self.of[decision]:
            self.own[decision] = self.own[decision] + term.taken(decision)

    def _give(self, decision: int, term: _Term, costs: np.ndarray) -> None:
        self.own[decision] = self.own[decision] - term.given(decision, costs)

    def least(self) -> float:
        """No solution costs less."""
        return float(sum(own.min() for own in self.own) + sum(term.costs.min() for term in self.terms))

    def charge(self, costs: Sequence[np.ndarray]) -> None:
        """Add to what each choice costs."""
        self.own = [own + more for own, more in zip(self.own, costs, strict=True)]

    def with_each(self) -> Iterator[np.ndarray]:
        """Of each decision, [choices] the bound with each choice."""
        whole = self.least()
        if math.isinf(whole):  # nothing can be done at all
            yield from (np.zeros_like(own) for own in self.own)
            return
        for decision in range(len(self.own)):
            rest = whole - self._around(decision)
            self._take(decision)
            yield rest + self._around(decision) - self.own[decision].min() + self.own[decision]
            share = self.own[decision] / max(1, len(self.of[decision]))
            for term in self.of[decision]:
                self._give(decision, term, share)
            whole = rest + self._around(decision)

    def _around(self, decision: int) -> float:
        """The part of the bound that a decision has a hand in."""
        return self.own[decision].min() + sum(term.costs.min() for term in self.of[decision])

    def solution(self) -> list[int]:
        """A choice for each decision, one after the other, each with those before it."""
        chosen: list[int | None] = [None] * len(self.own)
        for _ in range(4):
            before = list(chosen)
            for decision, own in enumerate(self.own):
                costs = own + sum(term.with_chosen(chosen, decision) for term in self.of[decision])
                chosen[decision] = int(np.argmin(costs))
            if chosen == before:
                break
        return [choice for choice in chosen if choice is not None]  # all of them


def _terms(problem: ShardingProblem) -> Iterator[_Term]:
    """All that is paid by several decisions together, or a bound of it."""
    for pair, matrix in problem.pairs.items():
        yield _term(pair, matrix, [np.arange(n) for n in matrix.shape])
    for group in problem.shared:
        yield from _of_shared(group)


def _term(decisions: Sequence[int], costs: np.ndarray, classes: Sequence[np.ndarray]) -> _Term:
    """Choices that cost the same in one class."""
    found = []
    for axis, of in enumerate(classes):
        rows = np.moveaxis(costs, axis, 0).reshape(costs.shape[axis], -1)
        _, first, again = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        costs = costs.take(first, axis)
        found.append(again.reshape(-1)[of])
    return _Term(decisions, costs, found)


def _of_shared(group: Shared) -> Iterator[_Term]:
    """Of moves that several decisions share. Where that is too large for a table, they cost no less than the mean of
    what each reader needs for itself."""
    rows, of_row = np.unique(group.rows, return_inverse=True)
    seconds = group.seconds[rows]
    needed, classes = [], []
    for _, needs in group.readers:
        sets = list(dict.fromkeys(needs))
        needed.append(np.array([[state in states for state in range(seconds.shape[1])] for states in sets]))
        classes.append(np.array([sets.index(states) for states in needs]))
    parts = [list(range(len(needed)))]
    if len(rows) * math.prod(map(len, needed)) > LARGEST:
        parts = [[i] for i in parts[0]]
    for part in parts:
        costs = np.zeros((len(rows), *(len(needed[i]) for i in part)))
        for state in range(seconds.shape[1]):
            some = np.zeros(costs.shape[1:], bool)
            for axis, i in enumerate(part):
                some |= needed[i][:, state].reshape([-1 if axis == a else 1 for a in range(len(part))])
            costs[:, some] += seconds[:, state, None] / len(parts)
        decisions = [group.source, *(group.readers[i][0] for i in part)]
        yield _term(decisions, costs, [of_row.reshape(-1), *(classes[i] for i in part)])
