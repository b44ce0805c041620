"""Which layout is recommended: whatever the order of sets; tensor parallelism across nodes only beyond its error."""

import os
import subprocess
import sys

import pytest

from shoal import LayoutPlanner
from shoal.cli.main import main
from shoal.planning.cost.memory.stage import PeakMemory
from shoal.planning.search.kinds import ACROSS, SLOWEST, TIE, Shelf
from shoal.planning.search.plan import PricedLayout
from shoal.spec.layout import Layout

WORDS = "plan --model tiny --cluster 2x2xH100 --global-batch 8 --sequence-length 64"


def test_a_plan_does_not_depend_on_the_hash_seed(capsys: pytest.CaptureFixture) -> None:
    """That of this process is another one: random, unless it is given."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command, env = [sys.executable, "-m", "shoal", *WORDS.split()], os.environ | {"PYTHONHASHSEED": seed}
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert main(WORDS.split()) == 0
    here, there = (
        [line for line in said.splitlines() if "simulated:" not in line]
        for said in (capsys.readouterr().out, found.stdout)
    )
    assert here == there and any("recommended" in line for line in here)


def test_what_ties_is_listed() -> None:
    assert (1 + ACROSS) * (1 + TIE) < SLOWEST


@pytest.mark.parametrize("gain", [0.9 * ACROSS, (1 + ACROSS) * (1 + TIE)])
def test_tensor_parallelism_across_nodes_must_be_faster_by_more_than_its_error(gain: float) -> None:
    run = LayoutPlanner("llama-3-70b", "2x8xH100", global_batch=16).run
    shelf, memory = Shelf(run, diverse=True), PeakMemory(1e9, 0, 0, 0, 0, 0, 0, 0)
    inside, across = Layout(tp=8, pp=2, sequence_parallel=True), Layout(tp=16, sequence_parallel=True)
    for seconds, layout in ((1 + gain, inside), (1.0, across)):
        shelf.keep(PricedLayout(seconds, layout, memory), capacity=80e9)
    recommended = shelf.list()[0]
    assert recommended.layout == (inside if gain < ACROSS else across)
    assert {found.role for found in shelf.list()} == ({"recommended", "fastest"} if gain < ACROSS else {"recommended"})


def test_what_is_called_simpler_is_simpler() -> None:
    """A slower layout of the same complexity that leaves more memory free is none."""
    run = LayoutPlanner("llama-3-70b", "1x4xH100", global_batch=16).run
    shelf = Shelf(run, diverse=True)
    for seconds, layout, reserved in (
        (1.0, Layout(tp=4), 79e9), (1.15, Layout(tp=2, dp=2), 1e9), (1.02, Layout(tp=2, pp=2), 1e9),
    ):  # fmt: skip
        shelf.keep(PricedLayout(seconds, layout, PeakMemory(reserved, 0, 0, 0, 0, 0, 0, 0)), capacity=80e9)
    assert [(found.role, found.seconds) for found in shelf.list()] == [("recommended", 1.0), ("more memory free", 1.02)]
