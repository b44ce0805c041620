"""The page: one file that asks for nothing, and whose numbers are the timeline's."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings

from shoal.pipeline.program import Op
from shoal.report.page import comparison, page, timelines
from shoal.report.timeline.chart import Chart
from shoal.report.timeline.palette import HUES, SHADES, Paint, colour, ink, luminance
from shoal.report.timeline.write import write
from tests.report.charts import SHOWN, chart, charts, played


def data(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="timelines">(.*?)</script>', html, re.S)[1])


def unpacked(column: dict[str, str]) -> np.ndarray:
    """What `timelines` wrote, back."""
    return np.frombuffer(base64.b64decode(column["bytes"]), f"<{column['type']}")


class Tags(HTMLParser):
    """Every tag with its attributes, and the text that is not of a script or style."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "schedules.html"
    write(path, [chart(name) for name in SHOWN], title="Schedules", lead="Side by side.")
    return path.read_text()


def test_it_asks_the_network_for_nothing(html):
    assert set(re.findall(r"https?://[^\"'\s]*", html)) == {"http://www.w3.org/2000/svg"}  # the icon's namespace
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", html)
    for tag, attributes in Tags(html).tags:
        for name in ("src", "href", "srcset", "action"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
    assert "default-src 'none'" in html  # so that a browser would refuse, too


@given(charts())
@settings(max_examples=25, deadline=None)
def test_its_numbers_are_those_of_the_timeline(one):
    sent = data(timelines([one]).html)["timelines"][0]
    column = {name: unpacked(packed) for name, packed in sent["columns"].items()}
    columns = one.timeline.columns
    for name in ("offset", "op", "stage", "microbatch", "part", "version"):
        assert np.array_equal(column[name], getattr(columns, name)), name
    assert np.array_equal(column["start"], one.start)
    assert np.allclose(column["length"], one.end - one.start, rtol=1e-6)
    assert np.array_equal(column["producer"], one.timeline.messages.producer)
    for rank, (times, values) in enumerate(one.live):
        rows = slice(*column["liveOffset"][rank : rank + 2])
        assert np.array_equal(column["liveTime"][rows], times) and np.allclose(column["liveValue"][rows], values)


@given(charts())
@settings(max_examples=25, deadline=None)
def test_what_is_alive_peaks_as_the_timeline_counts_and_ends_at_nothing(one):
    assert np.allclose(one.peak, one.timeline.peak_live)
    for times, values in one.live:
        assert np.all(np.diff(times) >= 0) and abs(values[-1]) < 1e-9


def test_bytes_are_counted_by_half_where_the_backward_is_split():
    timeline = played("zb-h1")
    one = Chart("zb-h1", timeline, activation=100.0, kept_for_weight=30.0)
    assert np.allclose(one.peak, timeline.columns.peak_bytes(100.0, 30.0))
    assert one.summary()["peak activation memory"].endswith("B")


def test_a_colour_for_every_action(html):
    sent = data(html)
    for timeline in sent["timelines"]:
        assert unpacked(timeline["columns"]["paint"]).max() < len(sent["paints"])
    assert {paint["light"] for paint in sent["paints"]} >= {colour(Paint(Op.FORWARD)), colour(Paint(Op.FORWARD, 1))}


def test_names_are_text_and_nothing_else():
    name = "</script><img src=x onerror=alert(1)>"
    html = page(name, name, [part([Chart(name, played("1f1b"))]) for part in (comparison, timelines)])
    parsed = Tags(html)
    assert "img" not in [tag for tag, _ in parsed.tags]
    assert parsed.text.count(name) >= 4  # title, heading, lead, table


def test_the_shortest_step_of_several_is_marked():
    html = comparison([chart(name) for name in SHOWN])
    steps = {name: chart(name).timeline.step_time for name in SHOWN}
    marked = [row for row in html.split("<tr>") if "class=best" in row]
    assert len(marked) == 1 and f">{min(steps, key=steps.get)}<" in marked[0]
    assert "best" not in comparison([chart()])


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_on_every_colour_can_be_read(dark):
    for op in HUES:
        for copy in (0, 1):
            for shade in range(SHADES):
                ground = colour(Paint(op, copy, shade), dark=dark)
                lights = sorted((luminance(ground), luminance(ink(ground))))
                assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 3.5, (op, copy, shade, dark)
