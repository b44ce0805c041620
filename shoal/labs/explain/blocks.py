"""Which device holds which block of a sharded array, in a terminal: a grid of blocks, and in each its holders."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from shoal.base.units import show_bytes
from shoal.labs.autoshard.notation.notation import Array, NamedMesh, Sharding, Sizes, blocks
from shoal.report.timeline.palette import ink

MOST_BLOCKS = 8  # along each side; of more, the first ones and how many there are
MOST_HOLDERS = 8  # that are listed one by one


def pictures(arrays: Sequence[Array], mesh: NamedMesh) -> Columns:
    """The arrays side by side, as far as there is room."""
    return Columns([picture(array, mesh) for array in arrays], padding=(0, 3))


def picture(array: Array, mesh: NamedMesh) -> Table:
    """One array: its last dim goes to the right, all others down.

    The devices in a block have copies of it; of an unreduced array, those on either side of a ``+`` have the terms of
    its sum.
    """
    grid = block_grid(array.sharding, mesh)
    shown = [row[:MOST_BLOCKS] for row in grid[:MOST_BLOCKS]]
    title = str(array)
    table = Table(
        title=title.replace("[", r"\["), title_justify="left", show_header=False, box=box.SQUARE, show_lines=True,
        min_width=len(title),
    )  # fmt: skip
    total = sum(len(row) for row in grid)
    for row in shown:
        cells = []
        for number, terms in row:
            ground = hue(number / total)
            cells.append(Text(holders(terms), style=f"{ink(ground)} on {ground}"))
        table.add_row(*cells)
    down, right = len(grid), len(grid[0])
    if down > MOST_BLOCKS or right > MOST_BLOCKS:
        table.caption = f"of {down} x {right} blocks"
    return table


def block_grid(sharding: Sharding, mesh: NamedMesh) -> list[list[tuple[int, list[list[int]]]]]:
    """Rows of blocks, each with its number and, for each term of its sum, the ranks that hold it."""
    *_, right = [1, *(mesh.size(axes) for _, axes in sharding.dims)]
    flat = list(enumerate(blocks(sharding, mesh).values()))
    return [flat[start : start + right] for start in range(0, len(flat), right)]


def holders(terms: list[list[int]]) -> str:
    """The devices of one block.

    >>> holders([[0, 1], [4, 5]]), holders([list(range(0, 32, 2))])
    ('0 1 + 4 5', '0 2 4 .. 30')
    """
    if len(terms) > 4:
        return f"{holders(terms[:2])} + .. + {_ranks(terms[-1])}"
    return " + ".join(_ranks(ranks) for ranks in terms)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) <= MOST_HOLDERS:
        return " ".join(map(str, ranks))
    return " ".join([*map(str, ranks[:3]), "..", str(ranks[-1])])


def hue(part: float) -> str:
    """A colour of its own for each block, ``#rrggbb``; ``part`` is its number over that of all."""
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(0.58 + part, 0.7, 0.62))


def memory(arrays: Sequence[Array], mesh: NamedMesh, sizes: Sizes, itemsize: int) -> Table:
    """Bytes of each array, of one device and of all of them."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("array")
    for column in ("shape", "of one device", "bytes", "copies", "all devices"):
        table.add_column(column, justify="right")
    for array in arrays:
        sharding = array.sharding
        local = sharding.local_numel(sizes, mesh) * itemsize
        table.add_row(
            str(array), _shape(sharding.shape(sizes)), _shape(sharding.local_shape(sizes, mesh)), show_bytes(local),
            str(sharding.copies(mesh)), show_bytes(local * mesh.ranks),
        )
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
