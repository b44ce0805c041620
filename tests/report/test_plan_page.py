"""The page of `shoal plan` in a browser: nothing that it says is cut off."""

from pathlib import Path

from shoal.cli.main import main
from tests.browser import check_widths

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
