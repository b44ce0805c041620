"""What is printed ends no run."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.base.terminal import outlive_readers, wrap_lines
from shoal.training.records.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SPEAKER = """
import sys
from rich.console import Console
from shoal.base.terminal import outlive_readers
outlive_readers(), outlive_readers()
for number in range(3):
    Console().print(f"line {number}")
    sys.stdin.readline()
print("it came to its end", file=sys.stderr)
"""


def test_long_lines_are_wrapped_below_their_last_column_on_a_terminal_only(monkeypatch):
    lines = ["  step   18.9 s; 80 % interval", "a text without columns", "", "short  x"]
    assert wrap_lines(lines) == lines
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "18")
    assert wrap_lines(lines) == [
        "  step   18.9 s;", "         80 %", "         interval", "a text without", "  columns", "", "short  x"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_ends_nothing(unbuffered):
    speaker = subprocess.Popen(
        [sys.executable, "-c", SPEAKER], cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    speaker.stdin.write("\n")
    speaker.stdin.flush()
    assert speaker.stdout.readline() == "line 0\n"
    speaker.stdout.close()
    _, said = speaker.communicate("\n\n")
    assert (speaker.returncode, said.splitlines()) == (
        0, ["the reader of stdout has gone; this process continues without printing", "it came to its end"],
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device without space")
@pytest.mark.parametrize("buffered", [True, False])
def test_output_to_a_full_disk_is_dropped(buffered, monkeypatch):
    with open("/dev/full", "wb", buffering=-1 if buffered else 0) as full:
        plain = io.TextIOWrapper(full, line_buffering=True)
        monkeypatch.setattr(sys, "stdout", plain)
        monkeypatch.setattr(sys, "stderr", sys.stderr)  # which is replaced too
        outlive_readers()
        for _ in range(3):
            print("a line", flush=True)
        plain.detach()


def test_it_may_be_the_reader_of_stderr_too():
    speaker = subprocess.Popen(
        [sys.executable, "-c", SPEAKER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )
    assert speaker.stdout.readline() == "line 0\n"
    speaker.stdout.close()
    speaker.stdin.write("\n\n\n")
    speaker.stdin.close()
    assert speaker.wait() == 0


def test_a_run_goes_on_when_nobody_reads_what_it_says(tmp_path):
    words = {
        "--run-folder": tmp_path / "run", "--model.layers": 1, "--model.hidden": 16, "--model.heads": 2,
        "--model.ffn": 16, "--data.source": "synthetic", "--data.sequence-length": 16, "--train.steps": 20,
        "--train.global-batch": 2, "--metrics.log-every": 1, "--train.validation-sequences": 2,
    }
    command = [sys.executable, "-m", "shoal", "train", *(str(word) for pair in words.items() for word in pair)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "training" in run.stdout.readline()
    run.stdout.close()
    said = run.stderr.read()
    assert run.wait() == 0, said
    assert read_metrics(tmp_path / "run")[-1].step == 20
