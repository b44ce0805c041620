"""`shoal explain experts`: which rank holds which experts, and with whom it exchanges tokens and sums gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.labs.explain.blocks import hue, show_numbers
from shoal.labs.explain.options import FigureOptions
from shoal.report.charts import draw_tiles, new_figure, to_svg
from shoal.report.timeline.palette import mix
from shoal.spec.catalog import Experts, ModelShape, model_shape
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.layout import Layout, ZeroStage

SHOWN = 4  # largest number of experts listed in a tile


class PlacementOptions(FigureOptions):
    """Which rank holds which experts.

    In a terminal and as a figure.
    """

    model: str = "mixtral-8x7b"
    """A model of the catalog with experts."""

    dp: PositiveInt = 4
    """Number of data-parallel replicas."""

    tp: PositiveInt = 2
    """Number of tensor-parallel ranks."""

    ep: PositiveInt = 4
    """Number of expert-parallel ranks."""

    etp: PositiveInt | None = None
    """Ranks that split one expert (default: tp)."""

    zero: ZeroStage = 1
    """What is sharded over the ranks that hold the same."""

    per_node: PositiveInt = 8
    """Ranks of a node, one row of the picture."""


class StageExperts(NamedTuple):
    """The experts of one rank of a pipeline stage.

    Attributes:
        part: "1/2" if the rank has the first half of each expert, else empty.
        tokens_with: ranks that exchange tokens with it.
        same: ranks with the same experts, over which gradients are summed.
    """

    rank: int
    experts: range
    part: str
    dp: int
    tp: int
    tokens_with: tuple[int, ...]
    same: tuple[int, ...]


def place_experts(layout: Layout, shape: ModelShape) -> list[StageExperts]:
    """Return the experts of every rank of the first pipeline stage, from the mesh that training uses."""
    from shoal.engine.collectives.mesh import Mesh  # slow import

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


def explain(options: PlacementOptions, console: Console) -> Callable[[], str]:
    """Print which rank holds which experts. Returns a function that draws it."""
    shape, layout, experts = _check(options)
    held = place_experts(layout, shape)
    title = f"{options.model}: {experts.count} experts of a layer on {layout.describe()}"
    table = Table(title=title, title_justify="left", show_header=False, show_lines=True, padding=0)
    for start in range(0, len(held), options.per_node):
        table.add_row(*(_cell(one, layout) for one in held[start : start + options.per_node]))
    console.print(table)
    console.print("A cell is a rank with its experts, a row a node.")
    console.print(_describe_groups(held, layout))
    return partial(draw, held, title, layout, options.per_node)


def _check(options: PlacementOptions) -> tuple[ModelShape, Layout, Experts]:
    shape = model_shape(options.model)
    if shape.experts is None:
        raise UsageError(f"explain experts --model {options.model}: the model has no experts; try mixtral-8x7b.")
    layout = Layout(dp=options.dp, tp=options.tp, ep=options.ep, etp=options.etp, zero=options.zero)
    check_layout(layout, shape, global_batch=options.dp, sequence_length=shape.max_sequence)
    return shape, layout, shape.experts


def _list_others(ranks: tuple[int, ...]) -> str:
    others = ", ".join(map(str, ranks[1:]))
    return f"rank{'s' * (len(ranks) > 2)} {others}" if others else "no other rank"


def _describe_groups(held: list[StageExperts], layout: Layout) -> str:
    one = held[0]
    return (
        f"edp {len(one.same)} x ep {layout.ep} x etp {layout.expert_tensor} = dp {layout.dp} x cp {layout.cp} x "
        f"tp {layout.tp} = {len(held)} ranks. Rank 0 exchanges tokens with {_list_others(one.tokens_with)}, and sums "
        f"its experts' gradients with {_list_others(one.same)}."
    )


def _cell(one: StageExperts, layout: Layout) -> Text:
    text = Text(f"rank {one.rank}\n", style="dim")
    text.append(show_numbers(one.experts, SHOWN), style=f"bold {_colour(one, layout)}")
    if one.part:
        text.append(f"\npart {one.part}")
    text.append(f"\ndp{one.dp} tp{one.tp}", style="dim")
    return text


def draw(held: list[StageExperts], title: str, layout: Layout, per_node: int) -> str:
    """Draw an SVG with a tile for each rank, coloured by its experts, and a row for each node."""
    rows, columns = -(-len(held) // per_node), min(per_node, len(held))
    words = "A tile is a rank, a row a node; the colour is that of the experts it holds."
    figure, (axes,) = new_figure(max(138.0 * columns, 760), 110 + 84 * rows, title=f"{title}\n{words}")
    draw_tiles(axes, (
        (*divmod(one.rank, per_node), mix(_colour(one, layout), "#ffffff", 0.6),
         f"rank {one.rank}\nexperts {show_numbers(one.experts, SHOWN)}\ndp {one.dp}, tp {one.tp}"
         + f"; part {one.part}" * bool(one.part))
        for one in held
    ))  # fmt: skip
    axes.set(xticks=(), yticks=())
    axes.set_xlabel(_describe_groups(held, layout), loc="left")
    return to_svg(figure)


def _colour(one: StageExperts, layout: Layout) -> str:
    return hue(one.experts.start // len(one.experts) / layout.ep)
