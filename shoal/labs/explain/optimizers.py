"""`shoal explain optimizers`: where the update rules go on two small surfaces, and what each keeps per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section
from shoal.engine.optim.build import RULES
from shoal.labs.explain.surfaces import SURFACES, Surface, Way, best_rate, contour, walk
from shoal.pipeline.check_run import check_run
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart
from shoal.report.lines import COLOURS
from shoal.report.svg import FAINT, GRID, INK, Canvas, mix
from shoal.spec.catalog import model_shape
from shoal.spec.config import OptimizerConfig, build_config
from shoal.spec.config.optimizer import OptimizerName
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

GROUPS: tuple[tuple[str, tuple[OptimizerName | Literal["nesterov"], ...]], ...] = (
    ("with and without momentum", ("sgd", "momentum", "nesterov")),
    ("rates by element", ("adagrad", "adam", "radam", "sage")),
    ("factors, matrices, curvature", ("adafactor", "muon", "sophia-g")),
)
"""What shares a picture. AdamW without decay is Adam, and 8-bit Adam keeps so few moments in full precision; the
two of Sophia differ in their estimates alone."""

WIDTH, HEIGHT, GAP, TOP, LEGEND = 330, 262, 26, 40, 18
BAR, BARS = 20, 300  # height of a bar with its distance, and width of the longest


class OptimizersOptions(Section):
    """Update rules: their ways over a valley and a saddle, with and without momentum, and their bytes per parameter."""

    steps: PositiveInt = 60
    """Of each way."""

    momentum: float = 0.9
    """Of momentum, nesterov and muon, from 0 to below 1."""

    model: str = "llama-3-8b"
    """A model of the catalog, whose states are counted."""

    precision: str = "fp32"
    """Of the run: fp32, bf16 (whose states are float32 too), fp64, ...; what is not trained with it is left out."""

    out: Path | None = None
    """Also draw it all to this file, .svg."""


def explain(options: OptimizersOptions, console: Console) -> int:
    """Print the tables and draw the pictures.

    Raises:
        UsageError: bad options.
    """
    _check(options)
    memory = bytes_per_parameter(options.model, options.precision)
    ways = {surface.name: ways_over(surface, options.steps, options.momentum) for surface in SURFACES}
    console.print(_ways_table(ways, options.steps))
    console.print(_memory_table(memory, options))
    if options.out:
        options.out.write_text(figure(ways, memory, options), encoding="utf-8")
        console.print(f"drawn: {options.out}")
    return 0


def _check(options: OptimizersOptions) -> None:
    if not 0 <= options.momentum < 1:
        raise UsageError(f"--momentum {options.momentum}: a decay rate, from 0 to below 1.")
    if options.precision not in FORMATS:
        raise UsageError(f"--precision {options.precision}: {did_you_mean(options.precision, FORMATS)}")
    if options.out and (options.out.suffix != ".svg" or not options.out.parent.is_dir()):
        raise UsageError(f"--out {options.out}: give a file in a folder that exists, ending in .svg")


def bytes_per_parameter(model: str, precision: str) -> dict[str, float]:
    """By rule, bytes of its states for a parameter of a model on one device, as the cost model counts them; of those
    rules that `shoal train` takes.

    Raises:
        UsageError: there is no such model in the catalog, or it is trained with none.
    """
    shape = model_shape(model)
    parts, refused, counted = [StagePart(range(shape.layers))], [], {}
    for name in RULES:
        try:
            check_run(build_config({"train": {"precision": precision}, "optimizer": {"name": name}}), shape)
        except UsageError as error:
            refused.append(error)
            continue
        state = state_bytes(shape, Layout(), FORMATS[precision], name, parts)
        counted[name] = state.optimizer / state.elements
    if not counted:
        raise refused[0]
    return counted


def ways_over(surface: Surface, steps: int, momentum: float) -> list[list[Way]]:
    """For each of `GROUPS` the ways of its rules, each with the learning rate that is best for it in the valley."""
    groups = []
    for _, names in GROUPS:
        ways = []
        for name in names:
            config = OptimizerConfig(
                name="momentum" if name == "nesterov" else name, nesterov=name == "nesterov", momentum=momentum,
                weight_decay=0.0, hessian_every=1, hessian_scale=1.0,
            )
            rate = best_rate(SURFACES[0], config, steps)
            ways.append(walk(surface, config.model_copy(update={"learning_rate": rate}), steps, name))
        groups.append(ways)
    return groups


# ---- tables ---------------------------------------------------------------------------------------------------------


def _ways_table(ways: Mapping[str, list[list[Way]]], steps: int) -> Table:
    names = list(ways)
    table = Table(title=f"loss after {steps} steps, with the rate that is best in the valley", title_justify="left")
    for heading in ("rule", "learning rate", *names, *(f"steps to a tenth in {name}" for name in names[:1])):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for group in range(len(GROUPS)):
        for i, first in enumerate(ways[names[0]][group]):
            ends = [f"{ways[name][group][i].losses[-1]:.2g}" for name in names]
            there = next((str(n) for n, loss in enumerate(first.losses) if loss <= first.losses[0] / 10), "–")
            table.add_row(first.label, f"{first.rate:g}", *ends, there)
        table.add_section()
    return table


def _memory_table(memory: Mapping[str, float], options: OptimizersOptions) -> Table:
    title = f"states of {options.model}, {options.precision}"
    table = Table(title=title, title_justify="left")
    table.add_column("rule")
    table.add_column("bytes / parameter", justify="right")
    for name, size in sorted(memory.items(), key=lambda item: (item[1], item[0])):
        table.add_row(name, f"{size:.3f}")
    if left_out := [name for name in RULES if name not in memory]:
        table.caption, table.caption_justify = f"not trained so: {', '.join(left_out)}", "left"
    return table


# ---- pictures -------------------------------------------------------------------------------------------------------


def figure(ways: Mapping[str, list[list[Way]]], memory: Mapping[str, float], options: OptimizersOptions) -> str:
    """The ways over each surface in a row of pictures, and under them the memory as bars."""
    canvas = Canvas()
    across, down = WIDTH + GAP, HEIGHT + TOP + 12
    canvas.text(GAP, 26, f"Update rules: {options.steps} steps from the ring to the dot", size=16, font_weight=600)
    for row, surface in enumerate(SURFACES):
        lines, again = _contours(surface)
        for column, ((title, _), group) in enumerate(zip(GROUPS, ways[surface.name], strict=True)):
            picture = _picture(surface, again if column else lines, title, group)
            canvas.place(GAP + column * across, 44 + row * down, picture)
    y = 44 + len(SURFACES) * down
    for column, group in enumerate(ways[SURFACES[0].name]):
        canvas.place(GAP + column * across, y, _legend(group))
    y += LEGEND * max(len(names) for _, names in GROUPS) + 24
    canvas.place(GAP, y, _bars(memory, options))
    height = y + 34 + BAR * len(memory)
    return canvas.document(GAP + len(GROUPS) * across, height, "Update rules on a valley and a saddle")


def _contours(surface: Surface) -> tuple[Canvas, Canvas]:
    """The lines, and a drawing that shows them once more."""
    at, canvas, again = _scale(surface), Canvas(), Canvas()
    for i, level in enumerate(surface.levels):
        places = [(*at(p), *at(q)) for p, q in contour(surface, level)]
        path = " ".join(f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" for a, b, c, d in places)
        shade = mix("#9aa7b8", GRID, i / (len(surface.levels) - 1))
        mark = f"{surface.name}-{i}".replace(" ", "-")
        canvas.add("path", id=mark, d=path, fill="none", stroke=shade, stroke_width=1)
        again.add("use", href=f"#{mark}")
    return canvas, again


def _scale(surface: Surface):
    left, bottom, right, top = surface.box

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return (point[0] - left) / (right - left) * WIDTH, TOP + (top - point[1]) / (top - bottom) * HEIGHT

    return at


def _picture(surface: Surface, contours: Canvas, title: str, group: Sequence[Way]) -> Canvas:
    canvas, at = Canvas(), _scale(surface)
    canvas.text(0, 16, f"{surface.name}, {title}", size=12.5, font_weight=600)
    canvas.text(0, 32, surface.formula, size=11, fill=FAINT)
    canvas.place(0, 0, contours)
    canvas.add("rect", x=0, y=TOP, width=WIDTH, height=HEIGHT, fill="none", stroke=GRID)
    left, bottom, right, top = surface.box
    for i, way in enumerate(group):
        inside = [left <= x <= right and bottom <= y <= top for x, y in way.points]
        shown = way.points[: inside.index(False) if False in inside else None]  # to where it leaves the picture
        places = [at(point) for point in shown]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        canvas.add("path", d=path, fill="none", stroke=COLOURS[i], stroke_width=1.6, stroke_linejoin="round")
        for x, y in places[1:-1]:
            canvas.add("circle", cx=x, cy=y, r=1.7, fill=COLOURS[i])
        canvas.add("circle", cx=places[-1][0], cy=places[-1][1], r=4.5, fill=COLOURS[i], stroke="#ffffff")
    x, y = at(surface.start)
    canvas.add("circle", cx=x, cy=y, r=5, fill="#ffffff", stroke=INK, stroke_width=2)
    return canvas


def _legend(group: Sequence[Way]) -> Canvas:
    canvas = Canvas()
    for i, way in enumerate(group):
        y = LEGEND * (i + 1) - 4
        canvas.add("rect", x=0, y=y - 7, width=16, height=4, fill=COLOURS[i])
        canvas.text(24, y, f"{way.label}, learning rate {way.rate:g}", size=12)
    return canvas


def _bars(memory: Mapping[str, float], options: OptimizersOptions) -> Canvas:
    canvas = Canvas()
    title = f"Bytes of optimizer state per parameter: {options.model}, {options.precision}"
    canvas.text(0, 14, title, size=12.5, font_weight=600)
    most = max(memory.values())
    for i, (name, size) in enumerate(sorted(memory.items(), key=lambda item: (item[1], item[0]))):
        y = 24 + i * BAR
        canvas.text(78, y + 13, name, size=12, anchor="end")
        canvas.add("rect", x=86, y=y + 3, width=max(1.0, BARS * size / most), height=BAR - 7, fill=COLOURS[0])
        canvas.text(94 + BARS * size / most, y + 13, f"{size:.3g}", size=12)
    return canvas
