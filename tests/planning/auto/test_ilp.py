"""The integer program finds what trying everything finds, with a limit of memory and without."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.sharding.named_axes import NamedMesh
from shoal.planning.auto.capture.trace import capture_graph
from shoal.planning.auto.intra.ilp import NothingFits, solve
from shoal.planning.auto.intra.problem import Decision, ShardingProblem, TensorMoves
from tests.planning.auto.modules import builder


def best(problem, capacity=None, in_flight=1):
    """The least cost of all choices, infinite if none can be."""
    return min(
        (problem.cost(chosen) for chosen in product(*(range(len(d.choices)) for d in problem.decisions))
         if capacity is None or problem.memory(chosen, in_flight) <= capacity),
        default=np.inf,
    )  # fmt: skip


def pair(source: int, reader: int, seconds: np.ndarray) -> TensorMoves:
    """Moves between two decisions, each choice of which lies, or reads, in a way of its own."""
    rows, states = map(range, seconds.shape)
    return TensorMoves(source, np.array(rows), seconds, ((reader, tuple(frozenset({j}) for j in states)),))


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
    moves = [
        pair(i, j, numbers(counts[i], counts[j], impossible=0.15))
        for i in range(len(counts)) for j in range(len(counts)) if i != j and rng.random() < 0.4
    ]  # fmt: skip
    if len(counts) > 2:
        source, *readers = rng.permutation(len(counts))[:3]
        states = 3
        moves.append(TensorMoves(
            int(source), rng.integers(0, 2, counts[source]), numbers(2, states, impossible=0.1),
            tuple((int(r), tuple(frozenset(map(int, rng.integers(0, states, rng.integers(1, 3)))) for _ in
                                 range(counts[r]))) for r in readers),
        ))  # fmt: skip
    return ShardingProblem(decisions, moves)


@settings(max_examples=60)
@given(problem=problems(), share=st.one_of(st.none(), st.floats(0.1, 1.0)), in_flight=st.integers(1, 3))
def test_the_program_finds_the_best_of_all(problem, share, in_flight):
    most = problem.memory([int(np.argmax(d.memory + in_flight * d.saved)) for d in problem.decisions], in_flight)
    capacity = None if share is None else share * most
    least = best(problem, capacity, in_flight)
    tolerated = least if capacity is None else best(problem, capacity * (1 + 1e-6), in_flight)  # HiGHS's tolerance
    try:
        found = solve(problem, capacity, in_flight)
    except NothingFits as nothing:
        assert nothing.proven and np.isinf(least)
        return
    assert found.proven
    assert tolerated * (1 - 1e-6) - 1e-9 <= found.cost <= least * (1 + 1e-6) + 1e-9
    assert capacity is None or problem.memory(found.chosen, in_flight) <= capacity * (1 + 1e-6)


def test_when_time_is_up_the_best_that_was_found_is_taken(monkeypatch):
    """Where nothing was found, it is not said that nothing fits."""
    rng = np.random.default_rng(3)
    decisions = [Decision(str(i), [{}] * 4, rng.random(4), rng.random(4), rng.random(4)) for i in range(8)]
    problem = ShardingProblem(decisions, [pair(i, j, rng.random((4, 4))) for j in range(8) for i in range(j)])
    with pytest.raises(NothingFits) as raised:
        solve(problem, seconds=0.0)
    assert not raised.value.proven
    exact, milp = solve(problem), scipy.optimize.milp
    late = lambda *args, **options: scipy.optimize.OptimizeResult(milp(*args, **options), status=1)  # noqa: E731
    monkeypatch.setattr(scipy.optimize, "milp", late)
    assert exact.proven and solve(problem) == replace(exact, proven=False)


@pytest.mark.parametrize("rows, name", [(64, "4xA100"), (8192, "4xA100")])
def test_a_real_product_is_split_as_well_as_can_be(rows, name):
    with torch.device("meta"):
        graph = capture_graph(torch.nn.Linear(512, 1024, bias=False), (torch.empty(rows, 512),))
    problem = builder(graph, name, NamedMesh("x", (4,))).problem()
    assert solve(problem).cost == pytest.approx(best(problem), rel=1e-9)
