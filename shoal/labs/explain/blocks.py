"""Draw in a terminal which devices hold which block of a sharded array."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from shoal.base.units import show_bytes
from shoal.labs.autoshard.notation.notation import Array, NamedMesh, Sharding, Sizes, list_holders
from shoal.report.tables import text_table
from shoal.report.timeline.palette import ink

MOST_BLOCKS = 8  # largest number of blocks drawn along each side


def draw_arrays(arrays: Sequence[Array], mesh: NamedMesh) -> Columns:
    """Draw the arrays side by side, as far as the width allows."""
    return Columns([draw_array(array, mesh) for array in arrays], padding=(0, 3))


def draw_array(array: Array, mesh: NamedMesh) -> Table:
    """Draw one array: its last dim goes to the right, all others down.

    The devices in a block have copies of it; in an unreduced array, devices on either side of a ``+`` have the terms of
    its sum.
    """
    grid = list_blocks(array.sharding, mesh)
    title = str(array)
    table = Table(
        title=Text(title), title_justify="left", show_header=False, box=box.SQUARE, show_lines=True,
        min_width=len(title),
    )  # fmt: skip
    total = sum(map(len, grid))
    for row in grid[:MOST_BLOCKS]:
        table.add_row(*(label(format_holders(terms), hue(number / total)) for number, terms in row[:MOST_BLOCKS]))
    down, right = len(grid), len(grid[0])
    if down > MOST_BLOCKS or right > MOST_BLOCKS:
        table.caption = f"of {down} x {right} blocks"
    return table


def label(text: str, ground: str) -> Text:
    """Return text on a background colour, in a readable colour."""
    return Text(text, style=f"{ink(ground)} on {ground}")


def list_blocks(sharding: Sharding, mesh: NamedMesh) -> list[list[tuple[int, list[list[int]]]]]:
    """Return rows of blocks, each with its number and, for each term of its sum, the ranks that hold it."""
    *_, right = [1, *(mesh.size(axes) for _, axes in sharding.dims)]
    flat = list(enumerate(list_holders(sharding, mesh).values()))
    return [flat[start : start + right] for start in range(0, len(flat), right)]


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
