"""Draw which devices hold which block of a sharded array, in a terminal and as SVG."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from shoal.base.units import show_bytes
from shoal.labs.autoshard.notation.notation import Array, NamedMesh, Sharding, Sizes, list_holders
from shoal.report.svg import FAINT, GRID, INK, MARGIN, Canvas
from shoal.report.tables import text_table
from shoal.report.timeline.palette import ink

MOST_BLOCKS = 8  # largest number of blocks drawn along each side


def draw_array(array: Array, mesh: NamedMesh) -> Table:
    """Draw one array: its last dim goes to the right, all others down.

    The devices in a block have copies of it; in an unreduced array, devices on either side of a ``+`` have the terms of
    its sum.
    """
    right = mesh.size(_split_axes(array.sharding)[1])
    blocks = list(enumerate(list_holders(array.sharding, mesh).values()))  # number, and the ranks of each term
    title = str(array)
    table = Table(
        title=Text(title), title_justify="left", show_header=False, box=box.SQUARE, show_lines=True,
        min_width=len(title),
    )  # fmt: skip
    down = len(blocks) // right
    for start in range(0, min(down, MOST_BLOCKS) * right, right):
        row = blocks[start : start + min(right, MOST_BLOCKS)]
        table.add_row(*(label(format_holders(terms), hue(number / len(blocks))) for number, terms in row))
    if down > MOST_BLOCKS or right > MOST_BLOCKS:
        table.caption = f"of {down} x {right} blocks"
    return table


def _split_axes(sharding: Sharding) -> tuple[str, str]:
    """Return the mesh axes of all dims but the last, which go down, and of the last, which go to the right."""
    *_, last = ["", *(axes for _, axes in sharding.dims)]
    return "".join(axes for _, axes in sharding.dims[:-1]), last


def label(text: str, ground: str) -> Text:
    """Return text on a background colour, in a readable colour."""
    return Text(text, style=f"{ink(ground)} on {ground}")


def format_holders(terms: list[list[int]]) -> str:
    """Format the devices of one block.

    >>> format_holders([[0, 1], [4, 5]]), format_holders([list(range(0, 32, 2))])
    ('0 1 + 4 5', '0 2 4 .. 30')
    """
    if len(terms) > 4:
        return f"{format_holders(terms[:2])} + .. + {show_numbers(terms[-1])}"
    return " + ".join(map(show_numbers, terms))


def show_numbers(numbers: Sequence[int], most: int = 8) -> str:
    """Format numbers, such as ranks or experts; of more than ``most``, the first ones and the last.

    >>> show_numbers(range(4)), show_numbers(range(16)), show_numbers(range(16), 4)
    ('0 1 2 3', '0 1 2 .. 15', '0 .. 15')
    """
    if len(numbers) <= most:
        return " ".join(map(str, numbers))
    return " ".join([*map(str, numbers[: most // 2 - 1]), "..", str(numbers[-1])])


def show_shape(shape: Sequence[int]) -> str:
    """Format a shape.

    >>> show_shape((4096, 1024))
    '4096 x 1024'
    """
    return " x ".join(map(str, shape))


def hue(part: float) -> str:
    """Return the colour ``#rrggbb`` of a block; ``part`` is its number over the number of blocks."""
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(0.58 + part, 0.7, 0.62))


def make_memory_table(arrays: Sequence[Array], mesh: NamedMesh, sizes: Sizes, itemsize: int) -> Table:
    """Return a table with the bytes of each array on one device and on all."""
    rows = []
    for array in arrays:
        sharding = array.sharding
        local = sharding.local_numel(sizes, mesh) * itemsize
        rows.append((
            str(array), show_shape(sharding.shape(sizes)), show_shape(sharding.local_shape(sizes, mesh)),
            show_bytes(local), str(sharding.copies(mesh)), show_bytes(local * mesh.ranks),
        ))  # fmt: skip
    return text_table(("array", "shape", "of one device", "bytes", "copies", "all devices"), rows)


# ---- figure: for each state the mesh, and in every device the block that it holds ------------------------------------

State = tuple[Array, str]
"""An array and the text on how it got this sharding, empty for a given array."""

Stage = tuple[Sequence[State], Sequence[State], Sequence[State], str]
"""The states of the left factor, of the right one and of the result, each from top to bottom, and a title. A single
array is the left factor."""

EMPTY = "#eef0f3"
TILE, GAP = 34.0, 6.0  # size of a device, and gap between two [pixels]
PANEL = 44.0  # gap between panels, for a sign
NUMBER = 13.0  # height of the number above a device
HEAD = 54.0  # height of a panel's three lines of text


def figure(stages: Sequence[Stage], title: str, mesh: NamedMesh, sizes: Sizes, itemsize: int) -> str:
    """Draw all stages, from top to bottom, as SVG."""
    places = [_place(rank, mesh) for rank in range(mesh.ranks)]
    wide = max(250.0, max(x for x, _ in places) + TILE)
    high = max(y for _, y in places) + TILE + NUMBER
    canvas = Canvas()
    ways = zip(directions(mesh), ("to the right", "down", "by the plane"), strict=True)
    axes = ", ".join(f"{axis} {way}" for axis, way in ways if axis)
    words = f"Devices: {axes}. Each shows the full array, with its own block coloured; hatched: a term of a sum"
    canvas.heading(title, words)
    y, columns = 84.0, max(1, *(sum(bool(states) for states in stage[:3]) for stage in stages))
    across, down = wide + PANEL, high + HEAD + 14
    for left, right, out, name in stages:
        if name:
            canvas.text(MARGIN, y + 12, name, size=15, font_weight=600)
            y += 26
        factors = [states for states in (left, right) if states]
        rows = max(map(len, factors))
        # The factors end in the row in which the result begins.
        for column, states in enumerate([*factors, out]):
            first = rows - 1 if states is out else rows - len(states)
            for row, (array, how) in enumerate(states, first):
                canvas.place(MARGIN + column * across, y + row * down, panel(array, how, mesh, sizes, itemsize))
        if out:
            for column, sign in ((1, "×"), (2, "=")):
                x = MARGIN + column * across - PANEL / 2 - 4
                middle = y + (rows - 1) * down + HEAD + high / 2 + 12
                canvas.text(x, middle, sign, size=24, fill=FAINT, anchor="middle")
        y += (rows + max(0, len(out) - 1)) * down + 12
    return canvas.document(2 * MARGIN + columns * wide + (columns - 1) * PANEL, y + 10, title)


def panel(array: Array, how: str, mesh: NamedMesh, sizes: Sizes, itemsize: int) -> Canvas:
    canvas = Canvas()
    canvas.text(0, 12, f"→ {how}" if how else "given", size=11, fill=FAINT)
    canvas.text(0, 29, str(array), size=14, font_weight=600)
    shape = show_shape(array.sharding.local_shape(sizes, mesh))
    local = array.sharding.local_numel(sizes, mesh) * itemsize
    words = f"{shape} each: {show_bytes(local)}, {show_bytes(local * mesh.ranks)} in all"
    canvas.text(0, 45, words, size=11, fill=FAINT)
    for rank in range(mesh.ranks):
        x, y = _place(rank, mesh)
        canvas.place(x, HEAD + y, _device(rank, array.sharding, mesh))
    return canvas


def directions(mesh: NamedMesh) -> tuple[str, str, str]:
    """Return the axes that go right, down, and over planes; of the last two, the longer goes right."""
    if len(mesh.axes) == 1:
        return mesh.axes, "", ""
    planes, one, other = mesh.axes[:-2], mesh.axes[-2], mesh.axes[-1]
    right, down = (one, other) if mesh.size(one) >= mesh.size(other) else (other, one)
    return right, down, planes


def _place(rank: int, mesh: NamedMesh) -> tuple[float, float]:
    right, down, planes = directions(mesh)
    column, row, plane = (mesh.position(rank, axes) for axes in (right, down, planes))
    height = TILE + GAP + NUMBER
    return column * (TILE + GAP), row * height + plane * (mesh.size(down) * height + 2 * GAP)


def _device(rank: int, sharding: Sharding, mesh: NamedMesh) -> Canvas:
    """Draw a miniature of the array with the block of one device."""
    canvas = Canvas()
    (rows, row), (columns, column) = ((mesh.size(a), mesh.position(rank, a)) for a in _split_axes(sharding))
    across, down = TILE / columns, TILE / rows
    canvas.text(TILE / 2, 10, f"{rank}", size=9.5, fill=FAINT, anchor="middle")
    canvas.rect(0, NUMBER, TILE, TILE, EMPTY)
    x, y = column * across, NUMBER + row * down
    canvas.rect(x, y, across, down, hue((row * columns + column) / (rows * columns)))
    if sharding.unreduced:
        canvas.add("path", d=_hatching(x, y, across, down), stroke="#ffffff", stroke_width=1.4, fill="none")
    inner = [f"M{i * across:.2f} {NUMBER} v{TILE}" for i in range(1, columns)]
    inner += [f"M0 {NUMBER + i * down:.2f} h{TILE}" for i in range(1, rows)]
    if inner:
        canvas.add("path", d=" ".join(inner), stroke=GRID, stroke_width=0.7, fill="none")
    canvas.rect(0, NUMBER, TILE, TILE, "none", stroke=INK, stroke_width=0.9)
    return canvas


def _hatching(x: float, y: float, width: float, height: float) -> str:
    """Return a path of diagonals, from the left or lower edge of a rectangle to its upper or right edge."""
    lines = []
    for k in range(1, int((width + height) / 5) + 1):
        far = 5.0 * k
        start = f"M{x + max(0.0, far - height):.1f} {y + min(far, height):.1f}"
        lines.append(f"{start} L{x + min(far, width):.1f} {y + max(0.0, far - width):.1f}")
    return " ".join(lines)
