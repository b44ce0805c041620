"""Tables of text: as wide as a terminal, in whole words."""

import re
import sys

import pytest
from rich.console import Console

import shoal
from shoal.base.terminal import wrap_lines
from shoal.report.planning.goodput_report import goodput_lines
from shoal.report.tables import table_lines, text_table

HEADINGS = ("devices", "fails every", "layout")
ROWS = [("1,024", "54.2 min", "dp 4 (ZeRO-1) x pp 2 (interleaved-zb, 8 stages a rank)"), ("16,384", "3.09 h", "tp 8")]


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_table_on_a_terminal_breaks_no_word(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = table_lines(HEADINGS, ROWS)
    words = " ".join([*HEADINGS, *(cell for row in ROWS for cell in row)]).split()
    assert sorted(" ".join(lines).split()) == sorted(words)
    assert max(map(len, lines)) < columns
    monkeypatch.setenv("COLUMNS", "24")  # narrower than one word of each column: cells fold, and columns stay columns
    assert max(map(len, table_lines(HEADINGS, ROWS))) < 24


def test_numbers_keep_their_units_where_there_is_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert "54.2 min" in "\n".join(table_lines(HEADINGS, ROWS))


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_a_table_of_many_columns_turns_before_it_parts_a_number_from_its_unit(monkeypatch, columns: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = goodput_lines([shoal.goodput(devices, failures=10) for devices in (1024, 100_000)])
    text = "\n".join(wrap_lines(lines))
    assert max(map(len, text.splitlines())) <= columns
    found = re.findall(r"[\d.]+ (?:min|d|%|nodes)", text)
    assert len(found) >= 2 * 8 + 2 and {"54.2 min", "60 nodes", "0.5 %"} <= set(found)
    assert ("devices      1,024" in text) is (columns < 100)


def test_a_printed_table_breaks_no_word_where_another_column_can_give_way(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "46")
    rows = [("reduce-scatter x into K", "recursive-doubling", "12.6 MB"), (), ("multiply",)]
    Console().print(text_table(("step", "by", "sent by a device"), rows, words=(0, 1)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["reduce-scatter", "recursive-doubling", "12.6", "MB"], ["x", "into", "K"], ["multiply"]]


def test_a_table_in_a_file_has_a_line_for_each_row() -> None:
    assert len(table_lines(HEADINGS, ROWS)) == 1 + len(ROWS)


def test_wide_characters_are_measured_as_they_are_shown() -> None:
    lines = table_lines(["name", "time"], [["日本語の実行", "3"], ["a\x1bc", "12"]], right=1)
    assert len(lines) == 3 and lines[1].startswith("日本語の実行")
