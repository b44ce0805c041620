"""Quantities as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.base.units import BANDWIDTH, BYTES, TIME, parse, show_bytes, show_seconds


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("16MB", BYTES, 16e6), ("4 KiB", BYTES, 4096), ("1e3", BYTES, 1000),
        ("1.5GB/s", BANDWIDTH, 1.5e9), ("5us", TIME, 5e-6),
    ],
)
def test_parse(text, units, value):
    assert parse(text, units, where="--x") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "MB", "16 mb", "-1MB", "1e999MB", "16MB/s", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="--size"):
        parse(text, BYTES, where="--size")


@given(st.floats(1, 1e15))
def test_what_is_shown_can_be_read(size):
    assert parse(show_bytes(size), BYTES, where="") == pytest.approx(size, rel=0.01)


def test_seconds():
    assert [show_seconds(s) for s in (0, 2e-9, 9.9999e-4, 35, 1234)] == ["0 s", "2 ns", "1 ms", "35 s", "1234 s"]
