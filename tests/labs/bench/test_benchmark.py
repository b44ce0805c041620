"""What the benchmarks share: progress, and tables."""

from io import StringIO
from math import inf

import pytest
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.labs.bench.benchmark import all_met, make_folder, make_table, show_progress


def test_a_folder_for_results_is_made_in_one_that_exists(tmp_path):
    for _ in range(2):
        make_folder(tmp_path / "results", "bench relaxed --out")
    assert (tmp_path / "results").is_dir()
    (tmp_path / "file").touch()
    for path, message in (("file", "File exists"), ("missing/results", "missing/results: No such file")):
        with pytest.raises(UsageError, match=message):
            make_folder(tmp_path / path, "bench relaxed --out")


def test_a_log_has_a_line_for_each_and_a_table_none_of_them(capsys):
    results = StringIO()
    with show_progress(Console(file=results)) as notify:
        notify("local-sgd [seed 1]")
        notify("a name that is longer than the eighty columns which rich thinks that a log without a terminal has")
    assert results.getvalue() == ""
    first, second, *others = capsys.readouterr().err.splitlines()
    assert first == "local-sgd [seed 1]" and second.endswith("without a terminal has") and not others


def test_where_somebody_watches_the_line_changes(capsys):
    screen = StringIO()
    with show_progress(Console(file=screen, force_terminal=True)) as notify:
        notify("powersgd, seed 0")
    assert capsys.readouterr().err == "" and "powersgd" in screen.getvalue()


def test_a_cell_has_four_digits_and_a_verdict_has_a_colour():
    out = StringIO()
    rows = [
        {"race": "dp", "name": "a", "ms": 1234.567, "off": 3e-7, "tokens": 2048, "met": True},
        {"race": "dp", "name": "b", "ms": 0.12345, "off": 0.0, "tokens": 12, "met": None},
        {"race": "tp", "name": "c", "ms": inf, "off": 1.0, "tokens": 12, "met": False},
    ]
    Console(file=out, width=80).print(make_table("x", rows, above="race"))
    assert [line.split() for line in out.getvalue().splitlines() if line.strip(" ─")] == [
        ["x"], ["name", "ms", "off", "tokens", "met"],
        ["dp"], ["a", "1,235", "3e-07", "2,048", "yes"], ["b", "0.1235", "0.0", "12"],
        ["tp"], ["c", "inf", "1.000", "12", "no"],
    ]
    assert not all_met(rows) and all_met(rows[:2])
