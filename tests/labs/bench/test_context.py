"""The benchmarks of context parallelism at a small scale."""

import io
import re

import pytest
from rich.console import Console

from shoal.cli.main import main
from shoal.labs.bench.sequences import ContextBenchmark, needs_ranks


def test_a_ring_beside_its_bound() -> None:
    seconds = ContextBenchmark(ranks=3, tokens=48, repeats=2).measure()
    assert {way: len(times) for way, times in seconds.items()} == {"ring": 2, "bound": 2}
    assert all(time > 0 for times in seconds.values() for time in times)


@pytest.mark.parametrize(("slow", "ratio", "met"), [(3.1, "1.150", True), (3.2, "1.175", False)])
def test_the_median_of_the_turns_ratios_is_compared_with_the_target(
    slow: float, ratio: str, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"ring": [slow, 3.0], "bound": [2.0, 4.0]}
    monkeypatch.setattr(ContextBenchmark, "measure", lambda benchmark: seconds)
    out = io.StringIO()
    assert ContextBenchmark().run(Console(file=out), str) is met
    assert f"{ratio} of the bound" in out.getvalue()
    assert re.search(r"^ring .*\d", out.getvalue(), re.M), "a row is one line, which begins with its name"


def test_long_sequences_train_that_do_not_fit_on_one_device(capsys: pytest.CaptureFixture) -> None:
    words = ["--ranks", "4", "--tokens", "1024", "--layers", "1", "--steps", "2", "--budget-mib", "8"]
    assert main(["bench", "long-context", *words]) == 0
    out = capsys.readouterr().out
    alone, most = (float(share) for share in re.findall(r"B +\S? +(\d+\.\d+)", out.replace("│", " ").replace("┃", " ")))
    assert alone > 1 > most
    assert alone / 4 == pytest.approx(most, rel=0.02), "a quarter on each of 4 ranks"
    first, second = re.search(r"losses ([\d.]+), ([\d.]+)", out).groups()
    assert float(first) == pytest.approx(5.55, abs=0.1), "ln 257"
    assert first != second


def test_an_only_step_is_timed(capsys: pytest.CaptureFixture) -> None:
    main(["bench", "long-context", "--ranks", "2", "--tokens", "256", "--layers", "1", "--steps", "1"])
    seconds, unit = re.search(r"([\d.]+) (\w+) per step", capsys.readouterr().out).groups()
    assert float(seconds) > 0 and unit in ("ms", "s"), "of forward and backward, not of nothing"


@pytest.mark.parametrize(("budget", "made"), [(1.0, False), (8.0, True), (20.0, True), (1000.0, False)])
def test_a_budget_that_shows_nothing_fails(budget: float, made: bool) -> None:
    """Too small for a rank, or enough for one device."""
    assert needs_ranks(alone=32, most=8, budget=budget) is made


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "context", "--ranks", "1"]) == 2
    assert "use 2 ranks or more" in capsys.readouterr().err
    assert main(["bench", "long-context", "--tokens", "7"]) == 2
    assert "too short for cp 4" in capsys.readouterr().err
