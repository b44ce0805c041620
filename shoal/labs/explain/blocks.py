"""Draw which devices hold which block of a sharded array, in a terminal and as SVG."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich import box
from rich.table import Table
from rich.text import Text

from shoal.base.units import show_bytes
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes
from shoal.labs.autoshard.notation.notation import Array, list_holders
from shoal.report.charts import new_figure, styled, to_svg
from shoal.report.tables import text_table
from shoal.report.timeline.palette import FAINT, GRID, INK, ink

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
GAP = 0.2  # between devices, each of which is 1 wide and high


@styled
def figure(stages: Sequence[Stage], title: str, mesh: NamedMesh, sizes: Sizes, itemsize: int) -> str:
    """Draw all stages, from top to bottom, as SVG; the factors end in the row in which the result begins."""
    ways = zip(directions(mesh), ("to the right", "down", "by the plane"), strict=True)
    axes = ", ".join(f"{axis} {way}" for axis, way in ways if axis)
    words = f"Devices: {axes}.\nEach shows the full array, with its own block coloured; hatched: a term of a sum"
    columns = max(1, *(sum(bool(states) for states in stage[:3]) for stage in stages))
    above = [max(len(left), len(right)) for left, right, *_ in stages]
    heights = [rows + max(0, len(stage[2]) - 1) for rows, stage in zip(above, stages, strict=True)]
    places = [_place(rank, mesh) for rank in range(mesh.ranks)]
    wide, high = (38.0 * (1 + max(at)) for at in zip(*places, strict=True))
    panels, grid = new_figure(
        max(620, columns * max(330, wide + 60)), 90 + sum(heights) * (high + 100), rows=sum(heights), columns=columns,
        title=f"{title}\n{words}",
    )  # fmt: skip
    for empty in grid:
        empty.set_axis_off()
    row = 0
    for (left, right, out, name), rows, height in zip(stages, above, heights, strict=True):
        factors = [states for states in (left, right) if states]
        for column, (states, sign) in enumerate(zip([*factors, out], ("", "×", "="), strict=False)):
            first = rows - 1 if states is out else rows - len(states)
            for number, (array, how) in enumerate(states):
                heading = f"{name}\n" if name and column == number == 0 else ""
                _draw_panel(grid[(row + first + number) * columns + column], heading, array, how, mesh, sizes, itemsize)
            if out and sign:
                beside = grid[(row + rows - 1) * columns + column]
                beside.text(-0.12, 0.5, sign, size=20, color=FAINT, transform=beside.transAxes)
        row += height
    return to_svg(panels)


def _draw_panel(
    axes: Axes, heading: str, array: Array, how: str, mesh: NamedMesh, sizes: Sizes, itemsize: int
) -> None:
    """Draw a miniature of the array for each device, with its own block."""
    sharding = array.sharding
    shape, local = show_shape(sharding.local_shape(sizes, mesh)), sharding.local_numel(sizes, mesh) * itemsize
    held = f"{shape} each: {show_bytes(local)}, {show_bytes(local * mesh.ranks)} in all"
    axes.set_title(f"{heading}{f'→ {how}' if how else 'given'}\n{array}\n{held}", size=8.5, weight="normal")
    for rank in range(mesh.ranks):
        x, y = _place(rank, mesh)
        axes.text(x + 0.5, y - 0.05, f"{rank}", size=7, ha="center", color=FAINT)
        (rows, row), (columns, column) = (
            (mesh.size(along), mesh.position(rank, along)) for along in _split_axes(sharding)
        )
        colour = hue((row * columns + column) / (rows * columns))
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=EMPTY, edgecolor=INK))
        axes.add_patch(Rectangle(
            (x + column / columns, y + row / rows), 1 / columns, 1 / rows, facecolor=colour, edgecolor="white",
            hatch="////" * bool(sharding.unreduced), linewidth=0,
        ))  # fmt: skip
        axes.vlines([x + i / columns for i in range(1, columns)], y, y + 1, color=GRID, linewidth=0.6)
        axes.hlines([y + i / rows for i in range(1, rows)], x, x + 1, color=GRID, linewidth=0.6)
    axes.autoscale_view()
    axes.invert_yaxis()
    axes.set_aspect("equal", anchor="W")


def directions(mesh: NamedMesh) -> tuple[str, str, str]:
    """Return the axes that go right, down, and over planes; of the last two, the longer goes right."""
    if len(mesh.axes) == 1:
        return mesh.axes, "", ""
    planes, one, other = mesh.axes[:-2], mesh.axes[-2], mesh.axes[-1]
    right, down = (one, other) if mesh.size(one) >= mesh.size(other) else (other, one)
    return right, down, planes


def _place(rank: int, mesh: NamedMesh) -> tuple[float, float]:
    """Return the x and y of a device."""
    right, down, planes = directions(mesh)
    column, row, plane = (mesh.position(rank, axes) for axes in (right, down, planes))
    height = 1 + 2 * GAP  # with its number
    return column * (1 + GAP), row * height + plane * (mesh.size(down) * height + GAP)
