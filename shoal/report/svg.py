"""SVG drawings, built as a list of elements."""

from __future__ import annotations

from html import escape
from typing import Any

INK, FAINT, GRID = "#1f2328", "#6b7280", "#e5e7eb"
MARGIN = 30.0  # left margin of a heading
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect y='2' width='10' height='5' fill='%234a7fc1'/%3E"
    "%3Crect x='6' y='9' width='10' height='5' fill='%23e79245'/%3E"
    "%3C/svg%3E"
)
"""Icon of every page, as a data URL."""
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Canvas:
    """A drawing; later elements cover earlier ones. Lengths are pixels from the upper left corner."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def add(self, tag: str, content: str = "", **attributes: object) -> None:
        """Add an element; ``stroke_width`` becomes ``stroke-width``."""
        values = {k: _number(v) if isinstance(v, int | float) else escape(str(v)) for k, v in attributes.items()}
        words = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in values.items())
        self.elements.append(f"<{tag} {words}>{content}</{tag}>" if content else f"<{tag} {words}/>")

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, fill: str = INK, anchor: str = "start", **more: Any
    ) -> None:
        """Add text with its baseline at y; ``anchor`` is start, middle or end."""
        self.add("text", escape(words), x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, **more)

    def heading(self, title: str, words: str) -> None:
        """Add a title at the top of the drawing, and a line of text below it."""
        self.text(MARGIN, 40, title, size=19, font_weight=650)
        self.text(MARGIN, 62, words, fill=FAINT)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **more: Any) -> None:
        """Add a rectangle with its upper left corner at (x, y)."""
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **more)

    def place(self, x: float, y: float, other: Canvas) -> None:
        """Add another drawing with its upper left corner at (x, y)."""
        self.elements.append(f'<g transform="translate({_number(x)} {_number(y)})">')
        self.elements += other.elements
        self.elements.append("</g>")

    def embed(self, x: float, y: float, svg: str) -> None:
        """Add an SVG element, such as a chart, with its upper left corner at (x, y)."""
        self.elements.append(svg.replace("<svg ", f'<svg x="{_number(x)}" y="{_number(y)}" ', 1))

    def document(self, width: float, height: float, title: str, *, inline: bool = False) -> str:
        """Return the SVG: a file on white, or ``inline`` for a page, in its text colour."""
        size = f'width="{_number(width)}" height="{_number(height)}" viewBox="0 0 {_number(width)} {_number(height)}"'
        svg = "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            *([] if inline else ['<rect width="100%" height="100%" fill="#ffffff"/>']),
            *self.elements,
            "</svg>",
            "",
        ])
        return svg.replace(INK, "currentColor") if inline else svg


def mix(colour: str, other: str, part: float) -> str:
    """Mix a colour ``#rrggbb`` with a part (0 to 1) of another.

    >>> mix("#000000", "#ffffff", 0.5)
    '#808080'
    """
    channels = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
