"""The dynamic program over stages finds what trying every pipeline finds."""

from itertools import combinations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.plan.auto.stages import Stage, latency, parts, pipeline


def every(layers, nodes, per_node):
    """All ways to cut layers into stages, with all parts that use every device."""
    for stages in range(1, layers + 1):
        for cuts in combinations(range(1, layers), stages - 1):
            ends = (0, *cuts, layers)
            for chosen in product(parts(nodes, per_node), repeat=stages):
                if sum(n * m for n, m in chosen) == nodes * per_node:
                    yield [(a, b, part, stages - i) for i, (a, b, part) in
                           enumerate(zip(ends, ends[1:], chosen, strict=False))]  # fmt: skip


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32), layers=st.integers(1, 4),
    shape=st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (1, 3)]),
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
        tuple(Stage(a, b, part, cost(a, b, part, left)) for a, b, part, left in way) for way in every(layers, *shape)
    ]
    can = [stages for stages in all_of_them if all(stage.seconds < float("inf") for stage in stages)]
    least = min((latency(stages, microbatches) for stages in can), default=float("inf"))
    found = pipeline(cost, layers, *shape, microbatches)
    if found is None:
        assert least == float("inf")
        return
    assert abs(latency(found, microbatches) - least) <= 1e-12 * least
    assert sum(stage.devices for stage in found) == shape[0] * shape[1]
    assert [stage.first for stage in found[1:]] == [stage.last for stage in found[:-1]]
