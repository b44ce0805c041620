"""`shoal explain experts`: which rank holds which experts, and with whom it exchanges tokens and sums gradients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_writable
from shoal.base.section import Section
from shoal.engine.collectives.mesh import Mesh
from shoal.labs.explain.blocks import hue
from shoal.report.svg import FAINT, GRID, INK, Canvas, mix
from shoal.spec.catalog import Experts, ModelShape, model_shape
from shoal.spec.layout import Layout, ZeroStage
from shoal.spec.layout.sizes import check_layout

TILE_WIDTH, TILE_HEIGHT, GAP, MARGIN = 128.0, 74.0, 10.0, 30.0
SHOWN = 4  # experts that a tile names
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


class PlacementOptions(Section):
    """Which rank holds which experts, in a terminal and as a figure."""

    model: str = "mixtral-8x7b"
    """A model of the catalog with experts."""

    dp: PositiveInt = 4
    """Data-parallel replicas."""

    tp: PositiveInt = 2
    """Tensor-parallel ranks."""

    ep: PositiveInt = 4
    """Expert-parallel ranks."""

    etp: PositiveInt | None = None
    """Ranks that split one expert (default: tp)."""

    zero: NonNegativeInt = 1
    """What is sharded over the ranks that hold the same, 0 to 3."""

    per_node: PositiveInt = 8
    """Ranks of a node, one row of the picture."""

    out: Path | None = None
    """Also draw it into this file (.svg)."""


@dataclass(frozen=True)
class StageExperts:
    """What one rank of a pipeline stage holds.

    Attributes:
        experts: their numbers.
        part: "1/2" where the rank has the first half of each, else empty.
        replica, tensor: its place in the dense part: of dp and of tp.
        tokens_with: ranks that it exchanges tokens with.
        same: ranks that hold the same, over which gradients are summed.
    """

    rank: int
    experts: range
    part: str
    replica: int
    tensor: int
    tokens_with: tuple[int, ...]
    same: tuple[int, ...]


def placement(layout: Layout, shape: ModelShape) -> list[StageExperts]:
    """Of every rank of the first pipeline stage, as the mesh that runs has them."""
    assert shape.experts is not None, "a model with experts"
    found = []
    for rank in range(layout.world_size // layout.pp):
        mesh = Mesh(layout, rank, transport="backend")
        each, etp = shape.experts.count // layout.ep, mesh.size("etp")
        first = mesh.index("ep") * each
        found.append(StageExperts(
            rank, range(first, first + each), f"{mesh.index('etp') + 1}/{etp}" if etp > 1 else "",
            mesh.index("dp"), mesh.index("tp"), tuple(mesh.ranks("ep")), tuple(mesh.ranks("edp")),
        ))
    return found


def explain(options: PlacementOptions, console: Console) -> int:
    """Print the picture, and draw it where that is asked for; returns the exit code."""
    shape, layout, experts = _checked(options)
    held = placement(layout, shape)
    title = f"{options.model}: {experts.count} experts of a layer on {layout.describe()}"
    table = Table(title=title, title_justify="left", show_header=False, show_lines=True, padding=0)
    for start in range(0, len(held), options.per_node):
        table.add_row(*(_cell(one, layout) for one in held[start : start + options.per_node]))
    console.print(table)
    console.print("A cell is a rank with its experts, a row a node.")
    console.print(_words(held, layout))
    if options.out:
        options.out.write_text(figure(held, title, layout, options.per_node))
    return 0


def _checked(options: PlacementOptions) -> tuple[ModelShape, Layout, Experts]:
    zero = next((stage for stage in ZERO_STAGES if stage == options.zero), None)
    if zero is None:
        raise UsageError(f"explain experts --zero {options.zero}: 0 to 3.")
    check_writable(options.out, "--out", ".svg")
    shape = model_shape(options.model)
    if shape.experts is None:
        raise UsageError(f"explain experts --model {options.model}: it has no experts; try mixtral-8x7b.")
    layout = Layout(dp=options.dp, tp=options.tp, ep=options.ep, etp=options.etp, zero=zero)
    check_layout(layout, shape, global_batch=options.dp, sequence_length=shape.max_sequence)
    return shape, layout, shape.experts


def _names(experts: range) -> str:
    if len(experts) <= SHOWN:
        return " ".join(map(str, experts))
    return f"{experts[0]} .. {experts[-1]}"


def _list(ranks: tuple[int, ...]) -> str:
    others = ranks[1:]
    if not others:
        return "nobody"
    return ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others))


def _words(held: list[StageExperts], layout: Layout) -> str:
    """The equation of the ranks, and whom the first of them meets."""
    one = held[0]
    return (
        f"edp {len(one.same)} x ep {layout.ep} x etp {layout.expert_tensor} = dp {layout.dp} x cp {layout.cp} x "
        f"tp {layout.tp} = {len(held)} ranks. Rank 0 exchanges tokens with {_list(one.tokens_with)}, and sums its "
        f"experts' gradients with {_list(one.same)}."
    )


def _cell(one: StageExperts, layout: Layout) -> Text:
    colour = hue(one.experts.start // len(one.experts) / layout.ep)
    text = Text(f"rank {one.rank}\n", style="dim")
    text.append(_names(one.experts), style=f"bold {colour}")
    if one.part:
        text.append(f"\npart {one.part}")
    text.append(f"\ndp{one.replica} tp{one.tensor}", style="dim")
    return text


def figure(held: list[StageExperts], title: str, layout: Layout, per_node: int) -> str:
    """The same as an SVG: a tile for each rank, coloured by its experts, a row for each node."""
    canvas = Canvas()
    canvas.text(MARGIN, 38, title, size=18, font_weight=650)
    canvas.text(MARGIN, 58, "A tile is a rank, a row a node; the colour is that of the experts it holds.", fill=FAINT)
    rows = -(-len(held) // per_node)
    columns = min(per_node, len(held))
    for one in held:
        row, column = divmod(one.rank, per_node)
        x, y = MARGIN + column * (TILE_WIDTH + GAP), 80 + row * (TILE_HEIGHT + GAP)
        colour = hue(one.experts.start // len(one.experts) / layout.ep)
        canvas.add(
            "rect", x=x, y=y, width=TILE_WIDTH, height=TILE_HEIGHT, rx=6, fill=mix(colour, "#ffffff", 0.75),
            stroke=GRID,
        )
        canvas.add("rect", x=x, y=y, width=7, height=TILE_HEIGHT, rx=3, fill=colour)
        canvas.text(x + 16, y + 20, f"rank {one.rank}", size=11, fill=FAINT)
        canvas.text(x + 16, y + 40, f"experts {_names(one.experts)}", size=13, fill=INK, font_weight=600)
        words = f"dp {one.replica}, tp {one.tensor}" + (f"; part {one.part}" if one.part else "")
        canvas.text(x + 16, y + 60, words, size=11, fill=FAINT)
    width = max(2 * MARGIN + columns * (TILE_WIDTH + GAP) - GAP, 2 * MARGIN + 9.4 * len(title))
    bottom = 80 + rows * (TILE_HEIGHT + GAP)
    words = _words(held, layout)
    canvas.text(MARGIN, bottom + 16, words, size=12, fill=FAINT)
    return canvas.document(max(width, 2 * MARGIN + 6.2 * len(words)), bottom + 36, title)
