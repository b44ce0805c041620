"""The integer program finds what trying everything finds, also after dominated choices have gone, and with memory."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.labs.autoshard.capture.trace import graph_of
from shoal.labs.autoshard.intra.bound import within_bound
from shoal.labs.autoshard.intra.ilp import NothingFits, solve, undominated
from shoal.labs.autoshard.intra.problem import Decision, ShardingProblem, Shared
from shoal.labs.autoshard.notation.notation import NamedMesh
from tests.labs.autoshard.modules import builder


def best(problem, capacity=None, in_flight=1):
    """The least cost of all choices, infinite if none can be."""
    return min(
        (problem.cost(chosen) for chosen in product(*(range(len(d.choices)) for d in problem.decisions))
         if capacity is None or problem.memory(chosen, in_flight) <= capacity),
        default=np.inf,
    )  # fmt: skip


@st.composite
def problems(draw):
    """Decisions with costs, pairs of them, and moves that several share; some of it impossible."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    digits = draw(st.sampled_from([0, 3]))  # whole numbers make ties

    def numbers(*shape, impossible=0.0):
        values = np.round(rng.exponential(3.0, shape), digits)
        values[rng.random(shape) < impossible] = np.inf
        return values

    decisions = [Decision(str(i), [{}] * n, numbers(n), numbers(n), numbers(n)) for i, n in enumerate(counts)]
    pairs = {
        (i, j): numbers(counts[i], counts[j], impossible=0.15)
        for i in range(len(counts)) for j in range(i) if rng.random() < 0.6
    }  # fmt: skip
    pairs = {(j, i): matrix.T for (i, j), matrix in pairs.items()}
    shared = []
    if len(counts) > 2:
        source, *readers = rng.permutation(len(counts))[:3]
        states = 3
        shared.append(Shared(
            int(source), rng.integers(0, 2, counts[source]), numbers(2, states, impossible=0.1),
            tuple((int(r), tuple(frozenset(map(int, rng.integers(0, states, rng.integers(1, 3)))) for _ in
                                 range(counts[r]))) for r in readers),
        ))  # fmt: skip
    return ShardingProblem(decisions, pairs, shared)


@settings(max_examples=60)
@given(problem=problems(), share=st.one_of(st.none(), st.floats(0.1, 1.0)), in_flight=st.integers(1, 3))
def test_the_program_finds_the_best_of_all(problem, share, in_flight):
    most = problem.memory([int(np.argmax(d.memory + in_flight * d.saved)) for d in problem.decisions], in_flight)
    capacity = None if share is None else share * most
    least = best(problem, capacity, in_flight)
    if np.isinf(least):
        with pytest.raises(NothingFits):
            solve(problem, capacity, in_flight)
        return
    found = solve(problem, capacity, in_flight)
    assert found.proven
    assert found.cost == pytest.approx(least, rel=1e-6, abs=1e-9)
    assert capacity is None or problem.memory(found.chosen, in_flight) <= capacity * (1 + 1e-6)


@settings(max_examples=60)
@given(problem=problems())
def test_choices_that_go_are_not_missed(problem):
    assert best(problem.only(undominated(problem, False))) == best(problem)


@settings(max_examples=100)
@given(problem=problems(), share=st.one_of(st.none(), st.floats(0.1, 1.0)), in_flight=st.integers(1, 3))
def test_choices_that_a_bound_excludes_are_not_missed(problem, share, in_flight):
    most = problem.memory([int(np.argmax(d.memory + in_flight * d.saved)) for d in problem.decisions], in_flight)
    capacity = None if share is None else share * most
    kept, met = within_bound(problem, capacity, in_flight)
    least = best(problem, capacity, in_flight)
    assert best(problem.only(kept), capacity, in_flight) == pytest.approx(least, rel=1e-9, abs=1e-12)
    if met is not None:
        assert problem.cost(met) >= least * (1 - 1e-9)
        assert capacity is None or problem.memory(met, in_flight) <= capacity


def test_when_time_is_up_the_best_that_was_met_is_taken(monkeypatch):
    """Found by the bound, where the program has no time at all; without one it is not said that nothing fits."""
    rng = np.random.default_rng(3)
    decisions = [Decision(str(i), [{}] * 4, rng.random(4), rng.random(4), rng.random(4)) for i in range(8)]
    problem = ShardingProblem(decisions, {(i, j): rng.random((4, 4)) for j in range(8) for i in range(j)})
    capacity = sum(float(np.median(d.memory + d.saved)) for d in decisions)
    exact, hurried = solve(problem, capacity), solve(problem, capacity, seconds=0.0)
    assert exact.proven and not hurried.proven
    assert exact.cost <= hurried.cost < np.inf and problem.memory(hurried.chosen) <= capacity
    monkeypatch.setattr("shoal.labs.autoshard.intra.ilp.within_bound", lambda problem, *_: (
        [list(range(len(d.choices))) for d in problem.decisions], None
    ))  # fmt: skip
    with pytest.raises(NothingFits) as raised:
        solve(problem, capacity, seconds=0.0)
    assert not raised.value.proven


@pytest.mark.parametrize("rows, name", [(64, "4xA100"), (8192, "4xA100")])
def test_a_real_product_is_split_as_well_as_can_be(rows, name):
    with torch.device("meta"):
        graph = graph_of(torch.nn.Linear(512, 1024, bias=False), (torch.empty(rows, 512),))
    problem = builder(graph, name, NamedMesh("x", (4,))).problem()
    small = problem.only(undominated(problem, False))
    assert solve(problem).cost == pytest.approx(best(small), rel=1e-9)
