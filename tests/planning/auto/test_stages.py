"""The dynamic programs over layers and over stages find what trying every cut and every pipeline finds."""

from itertools import combinations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planning.auto.capture.layers import DELTA, _cut
from shoal.planning.auto.stages import AssignedStage, find_pipeline, latency, list_parts


def every(layers, nodes, per_node):
    """All ways to cut layers into stages, with all parts that use every device."""
    for stages in range(1, layers + 1):
        for cuts in combinations(range(1, layers), stages - 1):
            ends = (0, *cuts, layers)
            for chosen in product(list_parts(nodes, per_node), repeat=stages):
                if sum(n * m for n, m in chosen) == nodes * per_node:
                    yield [(a, b, part, stages - i) for i, (a, b, part) in
                           enumerate(zip(ends, ends[1:], chosen, strict=False))]  # fmt: skip


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32), layers=st.integers(1, 4),
    shape=st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (1, 3), (2, 6)]),
    microbatches=st.integers(1, 8), impossible=st.sampled_from([0.0, 0.4]),
)  # fmt: skip
def test_the_best_of_all_pipelines_is_found(seed, layers, shape, microbatches, impossible):
    rng = np.random.default_rng(seed)
    times: dict = {}

    def cost(first, last, part, left):
        key = (first, last, part, left)
        if key not in times:
            work = (last - first) / (part[0] * part[1])
            times[key] = float("inf") if rng.random() < impossible else work * rng.uniform(0.5, 2)
        return times[key]

    all_of_them = [
        tuple(AssignedStage(a, b, part, cost(a, b, part, left)) for a, b, part, left in way)
        for way in every(layers, *shape)
    ]
    can = [stages for stages in all_of_them if all(stage.seconds < float("inf") for stage in stages)]
    least = min((latency(stages, microbatches) for stages in can), default=float("inf"))
    found = find_pipeline(cost, layers, *shape, microbatches, most=layers)
    if found is None:
        assert least == float("inf")
        return
    assert abs(latency(found, microbatches) - least) <= 1e-12 * least
    assert sum(stage.devices for stage in found) == shape[0] * shape[1]
    assert [stage.first for stage in found[1:]] == [stage.last for stage in found[:-1]]
    begin, per_node = 0, shape[1]
    for devices in sorted((stage.devices for stage in found), reverse=True):  # as they are laid out
        assert devices % per_node == 0 or begin // per_node == (begin + devices - 1) // per_node, "inside a node"
        begin += devices


def test_parts_of_a_node_divide_one_another():
    assert list_parts(2, 6) == [(1, 1), (1, 2), (1, 6), (2, 6)], "three parts of 4 cannot be laid out on two nodes of 6"
    assert list_parts(1, 8) == [(1, 1), (1, 2), (1, 4), (1, 8)]


@settings(max_examples=100)
@given(
    operators=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1.0, 2.0, 30.0])), min_size=2, max_size=9),
    count=st.integers(1, 5),
)
def test_of_all_cuts_that_share_the_work_the_narrowest_is_found(operators, count):
    carried, work = [wide for wide, _ in operators] + [0], [0.0]
    for _, flops in operators:
        work.append(work[-1] + flops)
    last = len(operators)
    count = min(count, last)

    def heaviest(ends):
        return max(work[end] - work[start] for start, end in zip((0, *ends), ends, strict=False))

    every = [(*inner, last) for inner in combinations(range(1, last), count - 1)]
    share = (1 + DELTA) * work[-1] / count
    some = [ends for ends in every if heaviest(ends) <= share] or every
    found = _cut(list(range(last + 1)), carried, work, count)
    least = min((max((carried[end] for end in ends[:-1]), default=0), heaviest(ends)) for ends in some)
    assert (max((carried[end] for end in found[:-1]), default=0), heaviest(found)) == least
    assert tuple(found) in some
