"""Number formats with a state or draws of their own go on in the middle, bit for bit."""

import pytest

from .runs import checkpoints, copy_until, curve, same_bits, small_config, train_in


@pytest.mark.parametrize(("precision", "sections"), [
    ("bf16-weights", {}), ("bf16-all", {}), ("fp8", {"float8": {"amax": "delayed", "history": 2}}),
])
def test_a_format_goes_on_where_it_was(precision, sections, corpus, pool, tmp_path):
    config = small_config(
        corpus, {"dp": 2, "zero": 1, "micro_batch": 4}, train={"precision": precision, "steps": 5, "validate_every": 0},
        checkpoint={"every": 3}, **sections,
    )
    whole = train_in(pool, config, tmp_path / "whole")
    part = train_in(pool, config, copy_until(whole, tmp_path / "part", 3), resume=True)
    assert curve(part) == curve(whole)
    assert same_bits(checkpoints(part)[5], checkpoints(whole)[5])
