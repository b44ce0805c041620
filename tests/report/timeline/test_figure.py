"""Figures for a paper: every action once, as wide as it is long, in its rank's lane."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from shoal.base.errors import UsageError
from shoal.pipeline.simulator import ActionTimes, simulate
from shoal.report.charts import to_svg
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.figure import DPI, HALVES, draw_timelines, write_figure
from shoal.report.timeline.palette import colour
from shoal.report.timeline.write import write
from tests.report.charts import SHOWN, chart, charts, program


def drawn(figure: Figure) -> PolyCollection:
    (actions,) = (each for each in figure.axes[0].collections if isinstance(each, PolyCollection))
    return actions


def boxes(figure: Figure) -> np.ndarray:
    """[rows, 4] Left, top, right and bottom of each action, in units of time and of ranks."""
    corners = np.array([path.vertices for path in drawn(figure).get_paths()])
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)


def check(one: Chart) -> None:
    """Every action is as wide as it is long, and in the lane of its rank."""
    left, top, right, bottom = boxes(draw_timelines([one])).T
    assert np.allclose(left, one.start) and np.allclose(right, one.end)
    rank = one.timeline.columns.rank
    assert np.all((rank <= top) & (bottom < rank + 1))
    part = HALVES[one.half][:, 1]
    assert np.allclose((bottom - top) / max(bottom - top), part / max(part))


@pytest.mark.parametrize("name", SHOWN)
def test_every_action_is_drawn_once(name):
    check(chart(name))


@given(charts())
@settings(max_examples=5, deadline=None)
def test_any_times_and_any_number_of_ranks(one):
    check(one)


def test_two_actions_at_once_share_their_lane():
    one = Chart("dualpipe", simulate(program("dualpipe"), ActionTimes(1.0, 1.0, 1.0, pair=2.5)))
    found = boxes(draw_timelines([one]))
    assert len(one.timeline.pairs)
    for row in one.timeline.pairs:
        (left, top, right, bottom), lower = found[row], found[row + 1]
        assert lower[0] == left and lower[2] == right
        assert bottom == pytest.approx(lower[1]) and bottom - top == pytest.approx(lower[3] - lower[1])


def test_the_svg_is_true_to_size_and_has_the_numbers_of_the_micro_batches():
    text = to_svg(draw_timelines([chart(name) for name in SHOWN]))
    root = ElementTree.fromstring(text)
    assert root.get("width") == "504pt"
    words = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert {*SHOWN, "rank 0", "forward", "backward, second copy"} <= {*words}
    assert {str(m) for m in range(8)} <= {*words}
    assert not re.search(r"(src|href)=\"http", text)


def test_the_picture_has_the_colours_of_the_actions(tmp_path):
    one = chart("zb-v")
    figure = draw_timelines([one])
    wanted = [colour(one.paints[paint]) for paint in one.paint]
    given = [to_hex(rgba) for rgba in drawn(figure).get_facecolors()]
    assert given == wanted
    write_figure(tmp_path / "figure.png", [one])
    image = Image.open(tmp_path / "figure.png")
    assert image.width == round(504 * DPI / 72) and image.info["dpi"] == pytest.approx((DPI, DPI), abs=1)


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"\.svg"):
        write(tmp_path / "figure.pdf", [chart()], title="", lead="")
