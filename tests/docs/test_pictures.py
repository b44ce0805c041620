"""Pictures of the documentation can be read: no text lies over another, and none is cut off."""

import pytest

from tests.docs.test_site import ROOT

PICTURES = sorted({*ROOT.glob("docs/*.svg"), *ROOT.glob("docs/course/*.svg")} - {ROOT / "docs/run.svg"})
"""All but the terminal's, whose letters stand side by side."""

UNREADABLE = """() => {
  const frame = document.querySelector("svg").getBoundingClientRect(), found = [];
  const texts = [...document.querySelectorAll("svg text")].filter((each) => each.textContent.trim());
  const boxes = texts.map((each) => [each.textContent.trim(), each.getBoundingClientRect()]);
  boxes.forEach(([text, a], i) => {
    const inside = a.left > frame.left - 1 && a.right < frame.right + 1 && a.top > frame.top - 1;
    if (!inside || a.bottom > frame.bottom + 1) found.push(`${text} is cut off`);
    for (const [other, b] of boxes.slice(i + 1)) {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 0.3 * Math.min(a.height, b.height)) found.push(`${text} lies over ${other}`);
    }
  });
  return found;
}"""


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_texts_of_a_picture_can_be_read(page, picture) -> None:
    page.goto(picture.as_uri())
    assert page.evaluate(UNREADABLE) == []
