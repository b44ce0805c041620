"""Which device holds which block of a sharded array, in a terminal: a grid of blocks, and in each its holders."""

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

MOST_BLOCKS = 8  # along each side; of more, the first ones and how many there are


def pictures(arrays: Sequence[Array], mesh: NamedMesh) -> Columns:
    """Return the arrays side by side, as far as there is room."""
    return Columns([picture(array, mesh) for array in arrays], padding=(0, 3))


def picture(array: Array, mesh: NamedMesh) -> Table:
    """One array: its last dim goes to the right, all others down.

    The devices in a block have copies of it; of an unreduced array, those on either side of a ``+`` have the terms of
    its sum.
    """
    grid = block_grid(array.sharding, mesh)
    title = str(array)
    table = Table(
        title=Text(title), title_justify="left", show_header=False, box=box.SQUARE, show_lines=True,
        min_width=len(title),
    )  # fmt: skip
    total = sum(map(len, grid))
    for row in grid[:MOST_BLOCKS]:
        table.add_row(*(label(holders(terms), hue(number / total)) for number, terms in row[:MOST_BLOCKS]))
    down, right = len(grid), len(grid[0])
    if down > MOST_BLOCKS or right > MOST_BLOCKS:
        table.caption = f"of {down} x {right} blocks"
    return table


def label(words: str, ground: str) -> Text:
    """Return words on a colour, in ink that can be read there."""
    return Text(words, style=f"{ink(ground)} on {ground}")


def block_grid(sharding: Sharding, mesh: NamedMesh) -> list[list[tuple[int, list[list[int]]]]]:
    """Rows of blocks, each with its number and, for each term of its sum, the ranks that hold it."""
    *_, right = [1, *(mesh.size(axes) for _, axes in sharding.dims)]
    flat = list(enumerate(list_holders(sharding, mesh).values()))
    return [flat[start : start + right] for start in range(0, len(flat), right)]


def holders(terms: list[list[int]]) -> str:
    """List the devices of one block.

    >>> holders([[0, 1], [4, 5]]), holders([list(range(0, 32, 2))])
    ('0 1 + 4 5', '0 2 4 .. 30')
    """
    if len(terms) > 4:
        return f"{holders(terms[:2])} + .. + {show_numbers(terms[-1])}"
    return " + ".join(map(show_numbers, terms))


def show_numbers(numbers: Sequence[int], most: int = 8) -> str:
    """List numbers, such as ranks or experts; of more than ``most``, the first ones and the last.

    >>> show_numbers(range(4)), show_numbers(range(16)), show_numbers(range(16), 4)
    ('0 1 2 3', '0 1 2 .. 15', '0 .. 15')
    """
    if len(numbers) <= most:
        return " ".join(map(str, numbers))
    return " ".join([*map(str, numbers[: most // 2 - 1]), "..", str(numbers[-1])])


def show_shape(shape: Sequence[int]) -> str:
    """Write a shape.

    >>> show_shape((4096, 1024))
    '4096 x 1024'
    """
    return " x ".join(map(str, shape))


def hue(part: float) -> str:
    """A colour of its own for each block, ``#rrggbb``; ``part`` is its number over that of all."""
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(0.58 + part, 0.7, 0.62))


def memory(arrays: Sequence[Array], mesh: NamedMesh, sizes: Sizes, itemsize: int) -> Table:
    """Bytes of each array, of one device and of all of them."""
    rows = []
    for array in arrays:
        sharding = array.sharding
        local = sharding.local_numel(sizes, mesh) * itemsize
        rows.append((
            str(array), show_shape(sharding.shape(sizes)), show_shape(sharding.local_shape(sizes, mesh)),
            show_bytes(local), str(sharding.copies(mesh)), show_bytes(local * mesh.ranks),
        ))  # fmt: skip
    return text_table(("array", "shape", "of one device", "bytes", "copies", "all devices"), rows)
