"""TeraPipe's dynamic program against all ways to cut a sequence; and what is kept of its slices."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.launch.worker_pool import Pool
from shoal.pipeline.sequence_slices import best_slices, even_slices, fit_times, flops, pipeline_time, places
from shoal.spec.catalog import model_shape
from shoal.spec.config import RunConfig
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run

SHAPE = model_shape("gpt2-124m")


def every_way(tokens: int) -> list[tuple[int, ...]]:
    """All lengths that add up to a number of tokens."""
    ways = []
    for count in range(tokens):
        for inner in combinations(range(1, tokens), count):
            cuts = (0, *inner, tokens)
            ways.append(tuple(b - a for a, b in pairwise(cuts)))
    return ways


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 7), stages=st.integers(1, 6), microbatches=st.integers(1, 3), data=st.data(),
)
def test_no_other_slices_are_faster(tokens: int, stages: int, microbatches: int, data: st.DataObject) -> None:
    table = {
        (length, before): data.draw(st.floats(0.1, 10))
        for length in range(1, tokens + 1) for before in range(tokens - length + 1)
    }

    def times(length: int, before: int) -> float:
        return table[length, before]

    found = best_slices(range(tokens + 1), times, stages, microbatches)
    assert sum(found) == tokens
    least = min(pipeline_time(way, times, stages, microbatches) for way in every_way(tokens))
    assert pipeline_time(found, times, stages, microbatches) == pytest.approx(least, rel=1e-12)


@given(
    starts=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), stages=st.integers(1, 6), m=st.integers(1, 3),
)
def test_the_formula_is_the_pipeline_played(
    starts: list[int], lengths: list[int], stages: int, m: int
) -> None:
    """Slices one after the other through equal stages, each waiting for the stage before."""

    def times(length: int, before: int) -> float:
        return length * (1 + starts[before % len(starts)])

    free = [0.0] * stages
    for _ in range(m):
        for i, length in enumerate(lengths):
            there = 0.0
            for stage in range(stages):
                there = free[stage] = max(free[stage], there) + times(length, sum(lengths[:i]))
    assert free[-1] == pytest.approx(pipeline_time(lengths, times, stages, m))


def test_slices_are_shorter_where_there_is_more_to_see_and_fewer_where_there_is_less_to_gain() -> None:
    def times(length: int, before: int) -> float:
        return 60 + length + length * (before + length / 2) / 500

    cuts = places(2048)
    chosen = best_slices(cuts, times, 8)
    assert sum(chosen) == 2048 and len(chosen) > 4 and chosen[0] > 2 * chosen[-1]
    assert best_slices(cuts, times, 1) == (2048,)
    assert len(best_slices(cuts, times, 2)) < len(chosen)
    # What other micro-batches fill of the pipeline, slices need not.
    assert len(best_slices(cuts, times, 8, microbatches=16)) < len(chosen)


def test_by_flops_no_slice_is_shorter_than_what_takes_no_less_time_where_there_are_few_stages() -> None:
    chosen = best_slices(places(8192), flops(SHAPE), 4)
    assert sum(chosen) == 8192 and min(chosen) == 256 and len(chosen) > 16


def test_a_short_sequence_is_not_cut_where_short_slices_take_no_less_time() -> None:
    assert best_slices(places(256), flops(SHAPE), 8) == (256,)


@given(a=st.floats(0.1, 5), b=st.floats(0.01, 1), e=st.floats(0, 2), f=st.floats(0, 0.1), h=st.floats(0, 0.01))
def test_measured_times_are_fitted(a: float, b: float, e: float, f: float, h: float) -> None:
    def time(length: int, before: int) -> float:
        return a + b * length + (before > 0) * (e + f * length + h * length * before)

    sizes = (1, 4, 16, 64, 128)
    found = fit_times([(length, before, time(length, before)) for length in sizes for before in (0, *sizes)])
    for length, before in ((8, 0), (32, 100), (100, 32)):
        assert found(length, before) == pytest.approx(time(length, before), rel=1e-6)


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 4))
def test_even_slices_and_places_lose_no_token(units: int, slices: int, multiple: int) -> None:
    lengths = even_slices(units * multiple, min(slices, units), multiple)
    assert sum(lengths) == units * multiple and min(lengths) >= multiple
    assert max(lengths) - min(lengths) <= multiple and all(length % multiple == 0 for length in lengths)
    cuts = places(units * multiple, multiple)
    assert cuts[0] == 0 and cuts[-1] == units * multiple and cuts == sorted(set(cuts))
    assert all(cut % multiple == 0 for cut in cuts)


def kept(config: RunConfig) -> int:
    """Micro-batches whose keys and values are held when the weights are updated."""
    engine, held = engine_of(config), []
    engine.observe = lambda: held.append(len(engine.runtime._caches))
    engine.step(0)
    return held[0]


def test_keys_and_values_end_with_their_micro_batch(pool: Pool) -> None:
    config = small_run({"pp": 2, "schedule": "terapipe", "sequence_slices": 2}, {"layers": 2})
    assert pool.run(kept, 2, config) == [0, 0]
