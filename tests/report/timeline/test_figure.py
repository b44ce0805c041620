"""Figures for a paper: every action once, as wide as it is long, in its rank's lane."""

import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal.base.errors import UsageError
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.simulator import ActionTimes, simulate
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.figure import DPI, Rectangle, figure, svg, write_figure
from shoal.report.timeline.palette import colour
from shoal.report.timeline.write import write
from tests.report.charts import SHOWN, chart, charts, program


def drawn(one) -> list[Rectangle]:
    return [mark for mark in figure([one]).marks if isinstance(mark, Rectangle) and mark.title]


@pytest.mark.parametrize("name", EVERY)
def test_every_action_of_every_schedule_is_drawn_once(name):
    one = chart(name)
    columns = one.timeline.columns
    wanted = Counter(str(columns.action(row)) for row in range(columns.rows))
    assert Counter(box.title for box in drawn(one)) == wanted


@given(charts(), st.sampled_from([240.0, 504.0, 900.0]))
@settings(max_examples=40, deadline=None)
def test_actions_are_as_wide_as_they_are_long_and_never_overlap(one, width):
    found = figure([one], width=width)
    boxes = [mark for mark in found.marks if isinstance(mark, Rectangle) and mark.title]
    lengths = one.end - one.start
    x = np.array([box.x for box in boxes])
    wide = np.array([box.width for box in boxes])
    per_time = (x.max() - x[0]) / (one.start[x.argmax()] - one.start[0]) if np.ptp(one.start) else None
    if per_time:
        assert np.allclose(x, x[0] + (one.start - one.start[0]) * per_time, atol=1e-6)
        assert np.all(np.abs(wide - lengths * per_time) <= 0.36)  # less the seam between neighbours
    lanes = sorted({box.y for box in boxes})
    assert len(lanes) == one.timeline.ranks
    for y, rank in zip(lanes, range(one.timeline.ranks), strict=True):
        rows = slice(*one.timeline.columns.offset[rank : rank + 2])
        assert all(box.y == y for box in boxes[rows])
        right = x[rows] + wide[rows]
        assert np.all(right[:-1] <= x[rows][1:] + 0.0501)  # what takes no time is a hair
    assert all(box.x >= 0 and box.x + box.width <= width for box in boxes)
    assert max(box.y + box.height for box in boxes) < found.height


def test_two_actions_at_once_share_their_lane():
    one = Chart("dualpipe", simulate(program("dualpipe"), ActionTimes(1.0, 1.0, 1.0, pair=2.5)))
    boxes = drawn(one)
    assert len(one.timeline.pairs)
    for row in one.timeline.pairs:
        upper, lower = boxes[row], boxes[row + 1]
        assert upper.x == lower.x and upper.width == lower.width
        assert upper.y + upper.height == pytest.approx(lower.y) and upper.height == pytest.approx(lower.height)


def test_the_svg_is_true_to_size_and_needs_nothing_else():
    text = svg(figure([chart(name) for name in SHOWN], width=240))
    root = ElementTree.fromstring(text)
    assert root.get("width") == "240pt"
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    titles = [node for node in root.iter() if node.tag.endswith("title")]
    assert len(titles) == sum(chart(name).timeline.columns.rows for name in SHOWN)


def test_the_picture_shows_what_the_drawing_says(tmp_path):
    one = chart("zb-v")
    write_figure(tmp_path / "figure.png", [one])
    image, dots = Image.open(tmp_path / "figure.png"), DPI / 72
    assert image.width == round(504 * dots) and image.info["dpi"] == pytest.approx((DPI, DPI), abs=1)
    for box, paint in zip(drawn(one), one.paint, strict=True):
        if box.width > 1.5:  # in its upper left corner, beside the number
            pixel = image.getpixel((int((box.x + 0.6) * dots), int((box.y + 0.8) * dots)))
            assert "#{:02x}{:02x}{:02x}".format(*pixel) == colour(one.paints[paint])


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"\.svg"):
        write(tmp_path / "figure.pdf", [chart()], title="", lead="")
