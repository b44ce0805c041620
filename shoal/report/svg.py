"""Drawings as SVG: elements as text, in one list."""

from __future__ import annotations

from html import escape

INK, FAINT, GRID = "#1f2328", "#6b7280", "#e5e7eb"
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Canvas:
    """What is drawn, in order: later elements lie over earlier ones. Lengths are pixels from the upper left corner."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def add(self, tag: str, **attributes: object) -> None:
        """One element without content; ``stroke_width`` becomes ``stroke-width``."""
        self.elements.append(f"<{tag} {_attributes(attributes)}/>")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        **more: object,
    ) -> None:
        """Words whose base line is at y; ``anchor`` is start, middle or end."""
        more = {"x": x, "y": y, "font_size": size, "fill": fill, "text_anchor": anchor, **more}
        self.elements.append(f"<text {_attributes(more)}>{escape(words)}</text>")

    def place(self, x: float, y: float, other: Canvas) -> None:
        """Another drawing, moved."""
        self.elements.append(f'<g transform="translate({_number(x)} {_number(y)})">')
        self.elements += other.elements
        self.elements.append("</g>")

    def embed(self, x: float, y: float, svg: str) -> None:
        """An SVG element, such as a chart, with its upper left corner at (x, y)."""
        self.elements.append(svg.replace("<svg ", f'<svg x="{_number(x)}" y="{_number(y)}" ', 1))

    def document(self, width: float, height: float, title: str) -> str:
        """The whole file, on white."""
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_number(width)}" height="{_number(height)}" '
            f'viewBox="0 0 {_number(width)} {_number(height)}" font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *self.elements,
            "</svg>",
            "",
        ])


def mix(colour: str, other: str, part: float) -> str:
    """A colour ``#rrggbb`` with a part (0 to 1) of another.

    >>> mix("#000000", "#ffffff", 0.5)
    '#808080'
    """
    channels = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)


def _attributes(attributes: dict[str, object]) -> str:
    values = {k: _number(v) if isinstance(v, int | float) else escape(str(v)) for k, v in attributes.items()}
    return " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in values.items())


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
