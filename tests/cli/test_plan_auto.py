"""`shoal plan auto`: a user's own module is planned and run, bad input is refused."""

import re
from contextlib import nullcontext

import pytest

from shoal.cli.main import main
from shoal.spec.catalog import tables

MINE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(12, 48, bias=False), nn.Tanh(), nn.Linear(48, 12)), (torch.randn(6, 12),)

def wrong():
    return 3

class Back(nn.Linear):
    def forward(self, x):
        return x, super().forward(x)

def back():
    return Back(12, 12), (torch.randn(6, 12),)

class Nested(nn.Linear):
    def forward(self, given):
        return super().forward(given["x"][0])

def nested():
    return Nested(12, 12), ({"x": [torch.randn(6, 12)]},)

def empty():
    with torch.device("meta"):
        return make()
"""


BLOCK = """
import torch
from tests.planning.auto.modules import MLP, Attention

def make():
    return torch.nn.Sequential(Attention(16, 4), MLP(16, 32)), (torch.randn(3, 5, 16),)
"""

SLOW = """
[accelerators.slow]  # for which so small a module is worth splitting
generation = "ampere"
peak_flops = {bf16 = 1e9}
memory_bytes = 80e9
memory_bandwidth = 2e12
source = "mine"
[nodes.slow]
accelerator = "slow"
per_node = 2
inside = "nvlink-3"
nic = "ethernet-10g"
nics = 2
source = "mine"
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_a_users_own_module_is_planned_and_run(mine, capsys, pool, monkeypatch):
    monkeypatch.setattr("shoal.launch.worker_pool.Pool", lambda ranks: nullcontext(pool))  # whose workers have started
    assert main(["plan", "auto", "--module", f"{mine}:make", "--cluster", "2xA100", "--memory", "14kB", "--check"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^0\.weight +\[A.*x.*\]", said, re.M), "14 kB do not hold all weights"
    assert re.search(r"^data parallel +does not fit", said, re.M)
    assert "run on 2 ranks in float64, equal to one device: 1 outputs and 3 gradients" in said


def test_inputs_in_lists_and_dicts_are_made_float64_too(mine, capsys, pool, monkeypatch):
    monkeypatch.setattr("shoal.launch.worker_pool.Pool", lambda ranks: nullcontext(pool))
    assert main(["plan", "auto", "--module", f"{mine}:nested", "--cluster", "2xA100", "--check"]) == 0
    assert "equal to one device: 1 outputs and 2 gradients" in capsys.readouterr().out


def test_stages_and_their_shardings_are_found_together_and_run(tmp_path, capsys, pool, monkeypatch):
    """Over a slow network a stage on each node; inside, where neither batch nor sequence can be halved, Megatron's
    split of attention and of the feed-forward block."""
    monkeypatch.setattr("shoal.launch.worker_pool.Pool", lambda ranks: nullcontext(pool))
    block, slow = tmp_path / "block.py", tmp_path / "slow.toml"
    block.write_text(BLOCK)
    slow.write_text(SLOW)
    words = f"--module {block}:make --catalog {slow} --cluster 2x2xslow --stages 2 --microbatches 4 --check"
    try:
        assert main(["plan", "auto", *words.split()]) == 0
    finally:
        tables.forget()
    said = capsys.readouterr().out
    times = re.search(r"^2 stages, 4 micro-batches: (\d+) µs a step; without stages (\d+) µs", said, re.M)
    assert times and int(times[1]) < int(times[2])
    first, second = said.split("\nstage ")[1:]
    assert "layers 0 to 2 on device 0 to 1, mesh x=2" in first and "layers 3 to 3 on device 2 to 3, mesh x=2" in second
    for stage, columns, row in ((first, ("0.query", "0.key", "0.value", "1.up"), "0.mix"), (second, (), "1.down")):
        for name in columns:
            assert re.search(rf"^{name}.weight +\[Ax, B\] +\[Ax, B\]", stage, re.M), "split by output"
        assert re.search(rf"^{row}.weight +\[A, Bx\] +\[A, Bx\]", stage, re.M), "split by input"
    ran = re.search(r"run on 4 ranks in float64, equal to one device: 1 outputs and 6 gradients, and every "
                    r"weight after a step; largest difference (\S+)", said)  # fmt: skip
    assert ran and float(ran[1]) < 1e-9


@pytest.mark.parametrize("args, words", [
    (["--module", "{mine}:wrong"], "must return (module, example inputs)"),
    (["--module", "{mine}:empty", "--check", "--cluster", "2xA100"], "its weights and the inputs are on the meta"),
    (["--module", "{mine}:back", "--stages", "2", "--check"], "the module returns x unchanged, which no stage makes"),
    (["--module", "{mine}:mak"], "did you mean 'make'?"),
    (["--module", "nothing.py:make"], "there is no Python file nothing.py"),
    (["--mesh", "x=3"], "and 8xA100 has 8"),
    (["--mesh", "x=2,y=2,z=2"], "use one or two"),
    (["--precision", "bf61"], "did you mean 'bf16'?"),
    (["--cluster", "2x8xA100", "--check"], "at most 8 are started"),
    (["--model", "mixtral-8x7b"], "plan a dense model"),
    (["--stages", "2", "--mesh", "x=8"], "Leave one of them out"),
    (["--module", "{mine}:make", "--sequence-length", "128"], "--sequence-length 128: --module makes its own"),
])  # fmt: skip
def test_bad_input_is_refused(mine, capsys, args, words):
    assert main(["plan", "auto", *(arg.format(mine=mine) for arg in args)]) == 2
    assert words in capsys.readouterr().err
