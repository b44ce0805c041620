"""`shoal plan auto`: a user's own module is planned and run, bad input is refused."""

import re
from contextlib import nullcontext

import pytest

from shoal.cli import main

MINE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(12, 48, bias=False), nn.Tanh(), nn.Linear(48, 12)), (torch.randn(6, 12),)

def wrong():
    return 3

def empty():
    with torch.device("meta"):
        return make()
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_a_users_own_module_is_planned_and_run(mine, capsys, pool, monkeypatch):
    monkeypatch.setattr("shoal.comm.pool.Pool", lambda ranks: nullcontext(pool))  # whose workers have started
    assert main(["plan", "auto", "--module", f"{mine}:make", "--cluster", "2xA100", "--memory", "14kB", "--check"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^0\.weight +\[A.*x.*\]", said, re.M), "14 kB do not hold all weights"
    assert re.search(r"^data parallel +does not fit", said, re.M)
    assert "run on 2 ranks in float64, as one device computes it: 4 outputs and gradients" in said


@pytest.mark.parametrize("args, words", [
    (["--module", "{mine}:wrong"], "must return (module, example inputs)"),
    (["--module", "{mine}:empty", "--check", "--cluster", "2xA100"], "its weights and the inputs are on the meta"),
    (["--module", "{mine}:mak"], "did you mean 'make'?"),
    (["--module", "nothing.py:make"], "of a file that is there"),
    (["--mesh", "x=3"], "and 8xA100 has 8"),
    (["--mesh", "x=2,y=2,z=2"], "one or two are planned for"),
    (["--precision", "bf61"], "did you mean 'bf16'?"),
    (["--cluster", "2x8xA100", "--check"], "at most 8 are started"),
    (["--model", "mixtral-8x7b"], "plan dense models"),
    (["--stages", "2", "--mesh", "x=8"], "Leave one of them out"),
    (["--module", "{mine}:make", "--seq", "128"], "--seq 128: --module makes its own"),
])  # fmt: skip
def test_bad_input_is_refused(mine, capsys, args, words):
    assert main(["plan", "auto", *(arg.format(mine=mine) for arg in args)]) == 2
    assert words in capsys.readouterr().err
