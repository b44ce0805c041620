"""`shoal verify` through the command line: what it prints, and its exit codes."""

from pathlib import Path

import pytest
import torch

from shoal.cli.main import main
from shoal.spec.config import save_config
from tests.testing.verify.runs import small_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    save_config(small_run({"tp": 2}), path)
    return path


def test_a_right_layout_and_a_planted_fault(run_file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", str(run_file), "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "tp 2" in out and "the same" in out and "attention out" in out and "weight, adamw" in out
    assert main(["verify", str(run_file), "--steps", "1", "--inject", "row-sum"]) == 1
    out = capsys.readouterr().out
    assert "output of layers.0.attention" in out and "rank 1 (tp 1)" in out


def test_an_asynchronous_pipeline_is_not_said_to_be_one_device(run_file: Path, capsys: pytest.CaptureFixture) -> None:
    options = "--parallel.tp 1 --parallel.pp 2 --parallel.schedule pipedream --optimizer.clip-norm 0 --steps 1"
    assert main(["verify", str(run_file), *options.split()]) == 0
    out = capsys.readouterr().out
    assert "the same  as one device with the same stale weights" in out and "clipping" not in out


def test_drawn_layouts(capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--random", "1", "--steps", "1"]) == 0
    assert "1 layouts, 0 differ" in capsys.readouterr().out


def test_drawn_layouts_of_two_rules(capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--random", "1", "--steps", "1", "--rule", "muon, sage"]) == 0
    out = capsys.readouterr().out
    assert "muon: 1 layouts, 0 differ" in out and "sage: 1 layouts, 0 differ" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--inject", "row-sun"], "did you mean 'row-sum'?"),
        (["--inject", "zero2-forgets"], "It shows on a layout with --parallel.dp 2 --parallel.zero 2."),
        (["--inject", "row-sum", "--random", "2"], "leave --inject"),
        (["--random", "2", "--rule", "adamw,sag"], "did you mean 'sage'?"),
        (["--rule", "sage"], "Give --random N too"),
        (["--parallel.dp", "64", "--train.global-batch", "256"], "at most 64"),
        (["--parallel.tp", "3"], "does not divide model.heads"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--model.hidden", "65536", "--model.vocab", "1000000"], "GiB are free"),
    ],
)
def test_refusals(run_file: Path, options: list[str], message: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["verify", str(run_file), *options]) == 2
    assert message in capsys.readouterr().err
