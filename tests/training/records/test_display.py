"""The display: fits 80 columns, draws any layout, plain when it is not on a terminal."""

import doctest
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.spec.config import build_config
from shoal.spec.layout import Layout
from shoal.training.records import display
from shoal.training.records.display import Display, duration, grid_of_ranks, short
from shoal.training.records.metrics import StepMetrics

CONFIG = build_config({
    "model": {"name": "tiny"}, "parallel": {"dp": 2, "zero": 1, "tp": 2, "pp": 2},
    "data": {"sequence_length": 256}, "train": {"global_batch": 16, "precision": "fp32"},
})
STEP = StepMetrics(step=10, steps=200, loss=5.5, learning_rate=1e-3, gradient_norm=0.83, tokens_per_second=20480,
                   tokens_per_second_per_rank=5120, memory_bytes=1 << 29, seconds_left=72, mfu=0.413)


def show(width: int, *, terminal: bool = False, steps: int = 45) -> str:
    file = io.StringIO()
    with Display(Console(file=file, width=width, force_terminal=terminal, legacy_windows=False)) as view:
        view.banner(CONFIG, parameters=10_432_000, device="cpu", threads=1, folder=Path("runs/one"))
        for step in range(1, steps + 1):
            view.progress(step, 200)
            view.step(replace(STEP, step=step))
        view.validation(2.25, 45, dropped=0.0625)
        view.note("checkpoint saved: step 45")
        view.finish(folder=Path("runs/one"), seconds=184, validation_loss=1.875, prompt="def ",
                    sample="main(x):\n  \x1b[31mreturn [bold]x[/bold]\n")
    return file.getvalue()


def test_examples_in_the_docstrings():
    assert doctest.testmod(display).failed == 0


def test_a_notebook_gets_colours_and_no_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebooks set it
    with Display() as view:
        view.progress(1, 200)
        view.step(STEP)
    shown = capsys.readouterr().out
    assert "\x1b[1m" in shown and "\r" not in shown and "\x1b[2K" not in shown


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_not_a_terminal_gets_plain_lines_that_fit(width):
    shown = show(width)
    assert "\x1b" not in shown  # neither from the display nor from the generated text
    lines = shown.splitlines()
    assert all(len(line) <= width for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert sum(line.split()[:2] == ["step", "loss"] for line in lines) == 3  # the header again every 20 lines
    assert "tiny, 10.4M parameters, 4,096 tokens per step" in shown
    assert "dp 2 (ZeRO-1) x tp 2 x pp 2 (1f1b) = 8 ranks" in shown
    assert "runs/one" in shown
    assert "  def main(x):\n    \\x1b[31mreturn [bold]x[/bold]\n" in shown
    assert "step 45: validation loss 2.2500 nats per token, experts dropped 6.2%" in shown
    assert "finished in 3m04s: validation loss 1.8750 nats per token" in shown
    (row,) = [line.split() for line in lines if line.split()[:1] == ["10"]]
    assert row[:9] == ["10", "5.5000", "20.5k", "5.12k", "41.3%", "0.83", "1.0e-03", "537MB", "1m12s"]


@pytest.mark.parametrize(("width", "columns"), [
    (78, ["step", "loss", "tokens/s", "per rank", "MFU", "grad norm", "lr", "memory", "time left"]),
    (60, ["step", "loss", "tokens/s", "MFU", "grad norm", "lr", "time left"]),
    (30, ["step", "loss", "tokens/s", "time left"]),
])
def test_a_narrow_screen_has_fewer_columns(width, columns):
    header = next(line for line in show(width).splitlines() if line.split()[:2] == ["step", "loss"])
    assert re.split("  +", header) == columns


def test_a_run_without_a_text_says_what_it_reads(tmp_path):
    note = "no text in [data]: Python's standard library is the text"
    for data, noted in (({}, True), ({"source": "stdlib"}, False), ({"paths": ["a.txt"]}, False)):
        file = io.StringIO()
        view = Display(Console(file=file, width=80))
        view.banner(build_config({"data": data}), parameters=1, device="cpu", threads=1, folder=tmp_path)
        assert (note in file.getvalue()) is noted


def test_a_model_whose_tokenizer_is_missing_is_told_that_it_reads_bytes(tmp_path):
    note = "text is read as bytes, 257 of the 32,000 ids of model.weights"
    for vocab, tokenizer, noted in ((32_000, "bytes", True), (32_000, "a.json", False), (257, "bytes", False)):
        file, values = io.StringIO(), {"model": {"weights": "llama", "vocab": vocab}, "data": {"tokenizer": tokenizer}}
        view = Display(Console(file=file, width=120))
        view.banner(build_config(values), parameters=1, device="cpu", threads=1, folder=tmp_path)
        assert (note in file.getvalue()) is noted


def test_a_tokenizer_that_is_not_the_models_is_noted(tmp_path):
    note = "data.tokenizer is not that of model.weights"
    for name, text in (("model/tokenizer.json", "{}"), ("same.json", "{}"), ("other.json", "[]")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("same.json", "other.json"):
        values = {"model": {"weights": str(tmp_path / "model")}, "data": {"tokenizer": str(tmp_path / name)}}
        view = Display(Console(file=(file := io.StringIO()), width=120))
        view.banner(build_config(values), parameters=1, device="cpu", threads=1, folder=tmp_path)
        assert (note in file.getvalue()) is (name == "other.json")


def test_sequences_beyond_those_of_the_imported_weights_are_noted(tmp_path):
    note = "sequences of 4,096 tokens: model.weights had 2,048 in training"
    for model, length in (("weights", 4096), ("weights", 2048), ("name", 4096)):
        values = {"model": {model: "llama", "max_sequence": 2048}, "data": {"sequence_length": length}}
        view = Display(Console(file=(file := io.StringIO()), width=120))
        view.banner(build_config(values), parameters=1, device="cpu", threads=1, folder=tmp_path)
        assert (note in file.getvalue()) is ((model, length) == ("weights", 4096))


def test_wide_output_shows_more():
    assert "validation  tokens/s" in show(120)
    assert "validation  tokens/s" not in show(80)


def test_a_terminal_gets_a_progress_bar_that_goes_away():
    shown = show(80, terminal=True)
    assert "step 45/200" in re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown again
    assert "\x1b[31m" not in shown.split("sample of")[1]


def test_the_terminal_is_left_in_order_after_an_error():
    file = io.StringIO()
    with pytest.raises(ArithmeticError), Display(Console(file=file, width=80, force_terminal=True)) as view:
        view.step(STEP)
        raise ArithmeticError
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


@given(pp=st.integers(1, 40), dp=st.integers(1, 300), tp=st.integers(1, 64), width=st.integers(66, 200),
       unicode=st.booleans())
def test_any_layout_is_drawn_within_the_screen(pp, dp, tp, width, unicode):
    layout = Layout(pp=pp, dp=dp, tp=tp)
    lines = grid_of_ranks(layout, width, unicode=unicode)
    assert len(lines) <= 25
    assert max(map(len, lines)) <= width
    assert len({len(line) for line in lines[1:]}) == 1  # a straight right edge
    assert unicode or "".join(lines).isascii()
    cells = [cell.strip() for line in lines for cell in re.split("[│|]", line)[1:-1]]
    numbers = [int(cell) for cell in cells if cell.isdigit()]
    assert numbers == sorted(set(numbers)), "each rank once, in order"
    assert numbers[0] == 0 and numbers[-1] == layout.world_size - 1
    if pp <= 4 and dp <= 4 and tp <= 4:
        assert numbers == list(range(layout.world_size))


def test_cells_stand_under_their_axes():
    lines = grid_of_ranks(Layout(pp=2, dp=2, tp=2), 80)
    assert lines == [
        "           tp 0     1",
        "          ┌─────┬─────┐",
        "pp 0 dp 0 │   0 │   1 │",
        "     dp 1 │   2 │   3 │",
        "          ├─────┼─────┤",
        "pp 1 dp 0 │   4 │   5 │",
        "     dp 1 │   6 │   7 │",
        "          └─────┴─────┘",
    ]


@given(st.floats(0, 1e17))
def test_numbers_keep_their_size(value):
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    text = short(value)
    assert len(text) <= 6
    number, unit = re.fullmatch(r"([\d.]+)([kMGTP]?)", text).groups()
    assert float(number) * scale.get(unit, 1) == pytest.approx(value, rel=0.006, abs=0.006)


@given(st.integers(0, 1 << 50))
def test_bytes_fit_their_column(size):
    assert len(f"{short(size)}B") <= 6


@given(st.floats(0, 1e8))
def test_durations_fit_their_column(seconds):
    assert len(duration(seconds)) <= 9
    assert duration(float("nan")) == "?"
