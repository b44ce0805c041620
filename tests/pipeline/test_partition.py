"""PipeDream's partition is the best of all, and its time is what a simulated pipeline needs."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.base.errors import UsageError
from shoal.pipeline.partition import pipedream_partition
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.simulator import ActionTimes
from tests.testing.own import plain

LAYERS = st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=4)


@given(LAYERS, st.integers(1, 4))
def test_no_other_stages_and_replicas_are_faster(layers, ranks):
    seconds, weights, sent = map(list, zip(*layers, strict=True))
    n, bandwidth = len(layers), 2.0

    def price(cuts, replicas):
        stages = [max(sum(seconds[a:b]), 2 * (m - 1) * sum(weights[a:b]) / bandwidth) / m
                  for (a, b), m in zip(pairwise(cuts), replicas, strict=True)]  # fmt: skip
        return max(*stages, *(2 * sent[cut - 1] / bandwidth for cut in cuts[1:-1]), 0)

    best = min(
        price((0, *cuts, n), replicas)
        for k in range(min(n, ranks)) for cuts in combinations(range(1, n), k)
        for replicas in product(range(1, ranks + 1), repeat=k + 1) if sum(replicas) == ranks
    )
    found = pipedream_partition(seconds, weights, sent, [(ranks, bandwidth)])
    assert found.seconds == pytest.approx(best)
    cuts = [layers.start for layers, _ in found.stages] + [n]
    assert price(cuts, [m for _, m in found.stages]) == pytest.approx(best)
    assert sum(m for _, m in found.stages) == ranks


def test_the_time_is_that_of_a_simulated_pipeline():
    """Replicas take micro-batches in turn, so a stage of m is m times as fast."""
    seconds = [3.0, 9.0, 2.0, 2.0]
    found = pipedream_partition(seconds, [0, 0, 1e9, 1e9], [0, 0, 0, 0], [(4, 1e8)])
    assert found.stages == ((range(2), 3), (range(2, 4), 1)) and found.in_flight == 2
    stages = np.array([sum(seconds[i] for i in layers) / replicas for layers, replicas in found.stages])
    program = shoal.build_program(EVERY["pipedream"], ranks=len(stages), microbatches=300)
    played = shoal.simulate(program, ActionTimes(stages / 3, backward=stages * 2 / 3))
    assert float(played.step_time) / 300 == pytest.approx(found.seconds, rel=0.01)
    assert found.seconds == 4 < found.data_parallel


def test_nodes_replicate_what_a_node_computes_best():
    """Weights that are slow to sum inside a node are cut there; the nodes are replicas."""
    found = pipedream_partition([1, 1], [1e9, 1e9], [0, 0], [(2, 1e8), (2, 1e12)])
    assert found.stages == ((range(1), 2), (range(1, 2), 2)) and found.seconds == 0.5


@pytest.mark.parametrize(("lists", "levels", "says"), [
    (([1], [1], []), [(2, 1)], "1 times, 1 sizes of weights and 0 of activations"),
    (([1], [1], [1]), [], "Give the ranks, from 1"),
    (([1, -4], [0, 0], [1, 0]), [(2, 1)], "-4 is no time or size"),
    (([1], [float("nan")], [1]), [(2, 1)], "nan is no time or size"),
])  # fmt: skip
def test_lists_that_do_not_fit_are_refused(lists, levels, says):
    with pytest.raises(UsageError, match=says):
        pipedream_partition(*lists, levels)


def test_a_model_of_ones_own_is_partitioned_by_its_counts(capsys):
    own = plain.tower
    run = shoal.Run(own.model, own.loss, own.data, pipeline=own.pipeline, layout=shoal.Layout(micro_batch=2))
    found = run.partition(cluster="4xH100")
    assert sum(replicas for _, replicas in found.stages) == 4 and found.seconds <= found.data_parallel
    assert "x parts.0" in capsys.readouterr().out
    with pytest.raises(UsageError, match="has no pipeline"):
        shoal.Run(own.model, own.loss, own.data).partition()
