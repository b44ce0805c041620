"""`shoal bench slices`: slices of one layer are timed, and lengths that add up are printed."""

import re

import pytest
import torch

from shoal.cli.main import main
from shoal.labs.bench.sequences import SlicesBenchmark


@pytest.mark.parametrize("family", ["tiny", "tiny-gpt"])
def test_slices_of_every_size_and_place_are_timed(family: str) -> None:
    measured = SlicesBenchmark(model=family, length=32, repeats=1).measure(torch.device("cpu"))
    assert {size for size, _, _ in measured} == {2, 4, 8, 16, 32}
    assert {before for _, before, _ in measured} >= {0, 8, 16, 30}
    assert all(size + before <= 32 and seconds > 0 for size, before, seconds in measured)


def test_the_command_prints_slices_that_make_the_sequence(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "slices", "--length", "64", "--stages", "2", "--repeats", "1"]) == 0
    slices = re.search(r"sequence_slices = \[([\d, ]+)\]", capsys.readouterr().out)
    assert sum(map(int, slices[1].split(","))) == 64
