"""Items made ahead: the same ones, in the background, with their errors where they are needed."""

import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.data.batches import Prefetcher


@given(st.lists(st.integers(0, 12)), st.integers(0, 12))
def test_any_order_gives_each_number_its_item(numbers: list[int], stop: int) -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number * 10

    ahead = Prefetcher(make, stop)
    assert [ahead(number) for number in numbers] == [number * 10 for number in numbers]
    assert all(number in numbers or number < stop for number in made)


def test_the_next_item_is_made_while_this_one_is_used() -> None:
    begun, go = threading.Event(), threading.Event()

    def make(number: int) -> str:
        if number == 1:
            begun.set()
            assert go.wait(30)
        return threading.current_thread().name

    ahead = Prefetcher(make, stop=2)
    assert ahead(0).startswith("shoal-ahead")
    assert begun.wait(30)  # nobody has asked for it
    go.set()
    assert ahead(1) == ahead(0)


def test_an_error_is_raised_where_its_item_is_needed_and_nowhere_else() -> None:
    def make(number: int) -> int:
        if number == 1:
            raise OSError("the disk is gone")
        return number

    ahead = Prefetcher(make, stop=4)
    assert ahead(0) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        ahead(1)
    assert ahead(2) == 2


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shoal-ahead")}


def test_the_thread_ends_with_its_owner() -> None:
    before = threads()
    ahead = Prefetcher(lambda number: number, stop=9)
    ahead(0)
    (own,) = threads() - before
    del ahead
    gc.collect()
    own.join(30)
    assert not own.is_alive()
