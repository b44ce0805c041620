"""Sharded arrays step by step as a figure: for each state the mesh, and in every device the block that it holds."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.base.units import show_bytes
from shoal.labs.autoshard.notation.notation import Array, NamedMesh, Sharding, Sizes
from shoal.labs.explain.blocks import hue, show_shape
from shoal.report.svg import FAINT, GRID, INK, MARGIN, Canvas

State = tuple[Array, str]
"""An array and the words for how it came to lie so, nothing for what is given."""

Stage = tuple[Sequence[State], Sequence[State], Sequence[State], str]
"""The states of the left factor, of the right one and of the result, one below the other, and a title. Single arrays
have no others beside them."""

EMPTY = "#eef0f3"
TILE, GAP = 34.0, 6.0  # a device, and what is between two
PANEL = 44.0  # between panels, for an arrow
NUMBER = 13.0  # for the number over a device
HEAD = 54.0  # of a panel: how it came, what it is, its bytes


def figure(stages: Sequence[Stage], title: str, mesh: NamedMesh, sizes: Sizes, itemsize: int) -> str:
    """All stages, one below the other, as one SVG file."""
    wide, high = _extent(mesh)
    wide = max(wide, 250.0)
    canvas = Canvas()
    rightward, downward, planes = directions(mesh)
    ways = ((rightward, "to the right"), (downward, "down"), (planes, "by the plane"))
    axes = ", ".join(f"{axis} {way}" for axis, way in ways if axis)
    words = f"Devices: {axes}. In each the whole array, and coloured the block that it holds; hatched: a term of a sum"
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
    """One state: its words, and the devices."""
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


def _extent(mesh: NamedMesh) -> tuple[float, float]:
    places = [_place(rank, mesh) for rank in range(mesh.ranks)]
    return max(x for x, _ in places) + TILE, max(y for _, y in places) + TILE + NUMBER


def directions(mesh: NamedMesh) -> tuple[str, str, str]:
    """The axes that go right, down, and over planes one below the other; of the last two the longer goes right."""
    if len(mesh.axes) == 1:
        return mesh.axes, "", ""
    planes, one, other = mesh.axes[:-2], mesh.axes[-2], mesh.axes[-1]
    right, down = (one, other) if mesh.size(one) >= mesh.size(other) else (other, one)
    return right, down, planes


def _place(rank: int, mesh: NamedMesh) -> tuple[float, float]:
    """Where a device stands, in pixels."""
    right, down, planes = directions(mesh)
    column, row, plane = (mesh.position(rank, axes) for axes in (right, down, planes))
    height = TILE + GAP + NUMBER
    return column * (TILE + GAP), row * height + plane * (mesh.size(down) * height + 2 * GAP)


def _device(rank: int, sharding: Sharding, mesh: NamedMesh) -> Canvas:
    """A miniature of the whole array with the block that one device has."""
    canvas = Canvas()
    rows = columns = total = 1
    row = column = number = 0
    for i, (_, axes) in enumerate(sharding.dims):
        parts, place = mesh.size(axes), mesh.position(rank, axes)
        total, number = total * parts, number * parts + place
        if i == len(sharding.dims) - 1:
            columns, column = parts, place
        else:
            rows, row = rows * parts, row * parts + place
    across, down = TILE / columns, TILE / rows
    canvas.text(TILE / 2, 10, f"{rank}", size=9.5, fill=FAINT, anchor="middle")
    canvas.rect(0, NUMBER, TILE, TILE, EMPTY)
    x, y = column * across, NUMBER + row * down
    canvas.rect(x, y, across, down, hue(number / total))
    if sharding.unreduced:
        canvas.add("path", d=_hatching(x, y, across, down), stroke="#ffffff", stroke_width=1.4, fill="none")
    inner = [f"M{i * across:.2f} {NUMBER} v{TILE}" for i in range(1, columns)]
    inner += [f"M0 {NUMBER + i * down:.2f} h{TILE}" for i in range(1, rows)]
    if inner:
        canvas.add("path", d=" ".join(inner), stroke=GRID, stroke_width=0.7, fill="none")
    canvas.rect(0, NUMBER, TILE, TILE, "none", stroke=INK, stroke_width=0.9)
    return canvas


def _hatching(x: float, y: float, width: float, height: float) -> str:
    """Diagonals over a rectangle, as a path: from its left or lower edge to its upper or right one."""
    lines = []
    for k in range(1, int((width + height) / 5) + 1):
        far = 5.0 * k
        start = f"M{x + max(0.0, far - height):.1f} {y + min(far, height):.1f}"
        lines.append(f"{start} L{x + min(far, width):.1f} {y + max(0.0, far - width):.1f}")
    return " ".join(lines)
