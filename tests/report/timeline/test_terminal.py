"""Timelines in a terminal: they fit any width, lose no rank, and need no colour."""

import io
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shoal.report.timeline.terminal import IDLE, fill, show, timeline
from tests.report.charts import SHOWN, chart, charts


def printed(width, *given, rows=32, **console) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=width, highlight=False, **console), given, rows=rows)
    return stream.getvalue()


@given(charts(), st.integers(40, 200), st.integers(3, 40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_line_is_wider_than_the_terminal_and_every_rank_is_there(one, width, rows, coloured):
    console = {"force_terminal": True, "color_system": "truecolor"} if coloured else {}
    text = printed(width, one, rows=rows, **console)
    lines = [Text.from_ansi(line).plain for line in text.splitlines()]
    assert max(map(cell_len, lines)) <= width
    ranks = one.timeline.ranks
    shown = [int(found[1]) for line in lines if (found := re.match(r"rank (\d+) ", line))]
    hidden = [int(found[1]) for line in lines if (found := re.search(r"\.\.\. (\d+) more ranks", line))]
    assert len(shown) + sum(hidden) == ranks
    assert shown == sorted(set(shown)) and shown[0] == 0 and shown[-1] == ranks - 1


@given(charts(), st.integers(12, 180), st.floats(1.0, 3.0))
@settings(max_examples=40, deadline=None)
def test_a_cell_shows_what_fills_it_and_a_long_action_is_never_lost(one, cells, slack):
    end = one.timeline.step_time * slack
    offset = one.timeline.columns.offset
    for rank in {0, one.timeline.ranks - 1}:
        rows = fill(one, rank, cells, end)
        for cell, row in enumerate(rows):
            if row != IDLE:
                assert offset[rank] <= row < offset[rank + 1]
                assert one.start[row] < (cell + 1) * end / cells and one.end[row] > cell * end / cells
        for row in range(offset[rank], offset[rank + 1]):
            if one.end[row] - one.start[row] > 2 * end / cells:
                assert row in rows


def test_without_colour_actions_are_letters_with_their_micro_batch():
    text = printed(120, chart("1f1b", ranks=2, microbatches=3), no_color=True, force_terminal=True)
    assert "\x1b[3" not in text and "\x1b[4" not in text
    first, second = (line for line in text.splitlines() if line.startswith("rank"))
    for line in (first, second):
        assert re.findall(r"[FB]\d", line) == (["F0", "F1", "B0", "F2", "B1", "B2"] if line is first
                                               else ["F0", "B0", "F1", "B1", "F2", "B2"])
    assert "F forward" in text and "B backward" in text and "I backward" not in text


def test_a_pipe_gets_no_colour_and_a_terminal_does():
    assert "\x1b[" not in printed(100, chart("zb-v"))
    assert "48;2;" in printed(100, chart("zb-v"), force_terminal=True, color_system="truecolor")


def test_later_stages_of_a_rank_are_small_letters():
    text = printed(160, chart("interleaved-1f1b"))
    assert re.search(r"^rank 0 .*F.*f.*b.*B", text, re.M)
    assert "lower case: a later stage" in text and "lower case" not in printed(160, chart("1f1b"))


def test_what_colour_says_is_said_without_it():
    text = printed(160, chart("dualpipe"))
    assert "F forward" in text and "f forward, second copy" in text
    assert re.search(r"^rank 0 F.*f", text, re.M)
    assert ", 4 versions of the weights" in printed(160, chart("pipedream")) and "versions" not in text


def test_several_timelines_share_one_axis_and_are_compared():
    text = printed(110, *map(chart, SHOWN))
    assert len(set(re.findall(r"^ms .*$", text, re.M))) == 1
    for name in SHOWN:
        assert len(re.findall(rf"^{name}\b", text, re.M)) == 2  # a title, and a row of the table


def test_the_axis_is_true():
    one = chart("gpipe")
    *rows, axis = timeline(one, 100, one.timeline.step_time, coloured=False)
    label = len("rank 3 ")
    ticks = {float(m[0]): m.start() - label for m in re.finditer(r"[\d.]+", axis.plain)}
    cells = len(rows[0].plain) - label - len("  12% idle")
    for tick, at in list(ticks.items())[:-1]:  # the last may be moved to fit
        assert abs(at / cells - tick * 1e-3 / one.timeline.step_time) <= 1 / cells
    begin = re.search(r"B", rows[0].plain).start() - label
    found = one.start[: one.timeline.columns.offset[1]][8]  # the first backward of rank 0
    assert abs(begin / cells - found / one.timeline.step_time) <= 1.01 / cells
    assert np.isclose(one.timeline.step_time, one.end.max())
