"""The page of `shoal plan`, and charts of a purchase, in a browser: nothing that they say is cut off or hidden."""

from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.browser import check_widths
from tests.docs.test_pictures import UNREADABLE

CUT = """() => [...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter(text => {
    const [own, all] = [text.getBoundingClientRect(), svg.getBoundingClientRect()]
    return own.right > all.right + 1 || own.left < all.left - 1
}).map(text => text.textContent))"""
HIDDEN = """() => [...document.querySelectorAll('.wrap, .scroll:has(table)')].filter(
    part => part.scrollWidth > part.clientWidth).map(part => part.textContent)"""


def test_legends_and_the_comparison_are_complete(saved, tmp_path: Path) -> None:
    """Long layouts beside the bars leave little width for a legend; the reasons are sentences."""
    out = tmp_path / "plan.html"
    model = ["--model", "llama-3-70b", "--cluster", "64x8xH100"]
    assert main(["plan", *model, "--out", str(out)]) == 0
    page = saved(out.read_text(), "svg")
    page.set_viewport_size({"width": 1280, "height": 900})
    assert "messages between stages" in page.text_content("svg")
    assert page.evaluate(CUT) == []
    assert page.evaluate(HIDDEN) == []
    check_widths(page)


@pytest.mark.parametrize("words", [
    "goodput --devices 1024,16384", "goodput --devices 1024 --restart quick=30s,slow=5min", "explain budget",
    "explain budget --model llama-3-70b --devices 512",
])  # fmt: skip
def test_labels_of_marks_lie_on_no_title(page, words: str, tmp_path: Path) -> None:
    """A mark at the highest point had its label over the chart's title."""
    out = tmp_path / "chart.svg"
    assert main([*words.split(), "--out", str(out)]) == 0
    page.goto(out.as_uri())
    assert page.evaluate(UNREADABLE) == []
