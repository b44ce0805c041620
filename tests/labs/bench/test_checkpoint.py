"""`shoal bench checkpoint`: all ways of saving do the same training, and leave nothing behind."""

import re

import pytest

from shoal.cli.main import main
from shoal.labs.bench.checkpoint import KINDS, TARGET, describe_cost


def test_every_way_of_saving_is_measured_and_nothing_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    disk.mkdir()
    memory.mkdir()
    words = ["--model", "tiny", "--every", "2", "--turns", "1", "--sequences", "2", "--ranks", "1"]
    code = main(["bench", "checkpoint", *words, "--disk", str(disk), "--memory", str(memory)])
    said = capsys.readouterr().out
    shares = [float(s) for s in re.findall(r"([\d.]+)% +5% ", said)]
    assert len(shares) == len(KINDS) - 1 and code == any(part > 100 * TARGET for part in shares)
    assert all(re.search(rf"{name} +[\d.,]+ +x [\d.]+", said) for name in KINDS)
    assert float(re.search(r"restored on 1 ranks in ([\d.]+) s from memory", said)[1]) > 0
    assert not list(disk.iterdir()) and not list(memory.iterdir())


def test_the_share_is_of_a_step_that_saves_nothing():
    """And the first save, which allocates its memory, does not count."""
    plain, saves, slow = (
        describe_cost("", [0.4, 0.8], [0.4, 0.4], stalls, every=2)
        for stalls in ([], [0.5, 0.01, 0.01], [0.01, 0.02, 0.02])
    )
    assert plain["of a step"] is None and plain["met"] is None and plain["ms / step"] == pytest.approx(300)
    assert saves["of a step"] == "5.0%" and saves["met"] is True and saves["time"] == "x 1.500"
    assert slow["of a step"] == "10.0%" and slow["met"] is False


@pytest.mark.parametrize(
    "words, message", [(["--sequences", "3"], "a multiple of --ranks 2"), (["--disk", "/nowhere"], "no such folder")]
)
def test_what_cannot_be_is_refused(words, message, capsys):
    assert main(["bench", "checkpoint", *words]) == 2
    assert message in capsys.readouterr().err
