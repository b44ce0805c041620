"""HTML page of all parts: tables, and charts of speed and of estimates against measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shoal.base.files import write_atomically
from shoal.labs.bench.benchmark import format_cell
from shoal.labs.bench.gpu.item import PartRun
from shoal.labs.bench.gpu.parts import BESIDE, DEEP_RECIPES, OTHERS, PARTS, RECIPES, SHAPES
from shoal.report.charts import draw_scatter, new_figure, stacked_bars, to_svg
from shoal.report.page import page
from shoal.report.tables import html_table, html_tiles

CHARTED = (SHAPES, OTHERS, "small models, bf16", RECIPES, DEEP_RECIPES)
LEAD = "First contact with a GPU: correctness, speed, and estimates beside measurements."
REHEARSAL = "Rehearsal on the CPU with tiny sizes. No figure of this part is a GPU's."


def write_page(path: Path, runs: Mapping[int, PartRun | None]) -> None:
    """Write the page of the newest run of each part; parts that have not run are named."""
    parts: list[str] = []
    for number, run in runs.items():
        parts.append(f"<h2>{number}. {escape(PARTS[number][0])}</h2>")
        parts += _section(run) if run else ["<p>Not run.</p>"]
    write_atomically(path, page("GPU benchmark", LEAD, parts))


def _section(run: PartRun) -> Iterator[str]:
    header = run.header
    if header["rehearsal"]:
        yield f'<p class="note"><b>{REHEARSAL}</b></p>'
    versions = header.get("versions", {})
    facts = {
        "device": header.get("device", "unknown"), "driver": header.get("driver", ""), "torch": versions.get("torch"),
        "Triton": versions.get("triton"), "date": header["date"], "lost or failed": str(len(run.failed)),
    }  # fmt: skip
    yield html_tiles([(name, str(value)) for name, value in facts.items() if value])
    yield f"<p>{escape(header.get('trouble', ''))} <code>{escape(header.get('command', ''))}</code></p>"
    yield from _scatter(run)
    tables = run.tables()
    for title, rows in tables.items():
        yield f"<h3>{escape(title + run.note)}</h3>"
        ours = [{**row, "item": f"shoal, {row['item']}"} for row in tables.get(SHAPES, ()) if BESIDE in row["item"]]
        charted = [*ours, *rows] if title == OTHERS else rows
        if title in CHARTED and (bars := [_bar(row) for row in charted if row.get("TFLOP/s")]):
            yield stacked_bars(["TFLOP/s"], bars)
        yield html_table([[str(format_cell(cell)) for cell in row.values()] for row in rows], list(rows[0]))


def _bar(row: Mapping[str, Any]) -> tuple[str, list[float], str]:
    mfu = f", MFU {row['MFU %']:.1f} %" if row.get("MFU %") else ""
    return row["item"], [row["TFLOP/s"]], f"{row['TFLOP/s']:.3g} TFLOP/s{mfu}"


def _scatter(run: PartRun) -> Iterator[str]:
    """Yield charts of estimated over measured memory and step time; a rehearsal has none to compare."""
    rows: Sequence[Mapping[str, Any]] = () if run.header["rehearsal"] else run.rows
    for measured, estimated, unit in (("allocated GB", "estimated GB", "GB"), ("step ms", "estimated ms", "ms")):
        points: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.get(measured) and row.get(estimated):
                points.setdefault(row["table"], []).append((row[measured], row[estimated]))
        if points:
            figure, (axes,) = new_figure(620, 380)
            draw_scatter(axes, points, unit=unit, log=unit == "ms")
            yield to_svg(figure, inline=True, title=f"{estimated} over {measured}")
