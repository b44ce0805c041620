"""Boxes and flat ranges against plain indexing of a whole tensor."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.boxes import Box, flat_range

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(shapes)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@st.composite
def boxes(draw, shape):
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@st.composite
def two_boxes(draw):
    shape = draw(shapes)
    return shape, draw(boxes(shape)), draw(boxes(shape))


def numbered(shape):
    """A tensor in which every element is its own flat index."""
    return torch.arange(math.prod(shape)).reshape(shape)


@given(ranges())
def test_a_flat_range_is_its_boxes_in_memory_order(case):
    shape, start, stop = case
    whole, expected = numbered(shape), start
    for offset, box in flat_range(shape, start, stop):
        inside = whole[box.slices]
        assert inside.shape == box.shape
        assert offset == expected - start
        assert inside.flatten().tolist() == list(range(expected, expected + box.numel))
        expected += box.numel
    assert expected == stop


@given(ranges())
def test_a_flat_range_is_few_boxes_and_none_is_empty(case):
    shape, start, stop = case
    found = [box for _, box in flat_range(shape, start, stop)]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in found)


@given(two_boxes())
def test_an_intersection_holds_the_common_elements(case):
    shape, a, b = case
    whole = numbered(shape)
    common = a.intersect(b)
    held = set(whole[common.slices].flatten().tolist()) if common else set()
    assert held == set(whole[a.slices].flatten().tolist()) & set(whole[b.slices].flatten().tolist())
    assert common == b.intersect(a)


@given(two_boxes())
def test_inside_indexes_the_outer_box_and_within_undoes_it(case):
    shape, outer, other = case
    common = outer.intersect(other)
    if common is None:
        return
    whole = numbered(shape)
    assert torch.equal(whole[outer.slices][common.to_local(outer).slices], whole[common.slices])
    assert common.to_local(outer).to_global(outer) == common


@given(shapes)
def test_the_whole_box_is_the_whole_tensor(shape):
    box = Box.full(shape)
    assert box.numel == math.prod(shape)
    assert torch.equal(numbered(shape)[box.slices], numbered(shape))


def test_a_scalar_is_one_box_of_no_dims():
    assert list(flat_range((), 0, 1)) == [(0, Box((), ()))]
    assert Box((), ()).numel == 1
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
