"""HTML pages of one file each: no network, no other file, readable in any browser.

`page` is the frame that every page of shoal has; `timelines` is the interactive part, whose script and style lie in
``assets/``. Its numbers are embedded as columns of raw bytes: 100,000 actions are a few megabytes and open quickly.
"""

from __future__ import annotations

import base64
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from shoal.pipeline.simulator.columns import OPS
from shoal.report.tables import html_table
from shoal.report.timeline.chart import Chart, legend, table
from shoal.report.timeline.palette import NAMES, Paint, colour, ink

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect y='2' width='10' height='5' fill='%234a7fc1'/%3E"
    "%3Crect x='6' y='9' width='10' height='5' fill='%23e79245'/%3E"
    "%3C/svg%3E"
)
"""The icon of every page, as a data URL."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Fragment:
    """Markup of a part of a page, with the names of the style sheets and scripts of ``assets/`` that it needs."""

    html: str
    style: tuple[str, ...] = ()
    script: tuple[str, ...] = ()


def page(title: str, lead: str, parts: Sequence[Fragment | str], *, policy: str = "") -> str:
    """Return a page as one HTML file.

    Args:
        title: plain text.
        lead: what the page shows, in a sentence or two of plain text.
        parts: markup, or fragments that need a style or a script.
        policy: what the page may do besides showing itself, as a directive of its content security policy.
    """
    fragments = [part for part in parts if isinstance(part, Fragment)]
    styles = dict.fromkeys(["style.css", *(name for part in fragments for name in part.style)])
    scripts = dict.fromkeys(name for part in fragments for name in part.script)
    return "\n".join([
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(filter(None, (POLICY, policy)))}">',
        f"<title>{escape(title)}</title>",
        f'<link rel="icon" href="{ICON}">',
        *(f"<style>\n{asset(name)}</style>" for name in styles),
        "</head>",
        "<body>",
        f"<header><h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(lead)}</p></header>',
        "<main>",
        *map(_markup, parts),
        "</main>",
        "<footer>Made by shoal.</footer>",
        *(f"<script>\n{asset(name)}</script>" for name in scripts),
        "</body>",
        "</html>",
        "",
    ])


def _markup(part: Fragment | str) -> str:
    text = part.html if isinstance(part, Fragment) else part
    return f'<div class="scroll">{text}</div>' if text.startswith("<svg") else text  # wider than a phone


def command() -> str:
    """Return the markup of the command that made the page."""
    return f"<h2>Command</h2><pre>{escape(shlex.join(['shoal', *sys.argv[1:]]))}</pre>"


def json_script(name: str, values: Any) -> str:
    """Return the element with the id ``name`` in which a page's script finds plain values."""
    text = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def asset(name: str, package: str = "shoal.report") -> str:
    """Read a file in the folder ``assets`` of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def comparison(charts: Sequence[Chart], *, mark: bool = True) -> str:
    """Return the markup of a table with a row for each timeline; ``mark`` emphasises the shortest of several steps."""
    headings, rows = table(charts)
    fastest = min(range(len(charts)), key=lambda i: charts[i].timeline.step_time)
    return html_table(rows, headings, best=(fastest, headings.index("step")) if mark and len(charts) > 1 else None)


def timelines(charts: Sequence[Chart]) -> Fragment:
    """Return timelines above each other on one time axis, to zoom into and point at."""
    paints = sorted({paint for chart in charts for paint in chart.paints}, key=str)
    body = [_tools(charts)]
    for i, chart in enumerate(charts):
        row, kind = chart.summary(), "rank" if chart.lane == "rank" else "pipeline rank"
        small = f"{row['step']} · bubble {row['bubble']} · {(n := chart.timeline.ranks)} {kind}{'s' * (n != 1)}"
        body.append(
            f'<section class="timeline"><h2>{escape(chart.name)} <small>{escape(small)}</small></h2>'
            f'<canvas class="canvas" id="timeline-{i}" tabindex="0" role="img" aria-label="Timeline of '
            f'{escape(chart.name)}: {escape(small)}. Arrow keys move between actions."></canvas></section>'
        )
    body.append('<div class="card" id="card"></div><div class="unseen" id="spoken" aria-live="polite"></div>')
    body.append('<div class="hint" id="hint">Ctrl + wheel zooms; drag moves</div>')
    body.append(json_script("timelines", {
        "seconds": all(chart.seconds for chart in charts),
        "unit": "T",
        "names": [{"name": NAMES[op], "letter": str(op)} for op in OPS],
        "paints": [paint_colours(paint) for paint in paints],
        "timelines": [pack_timeline(chart, paints) for chart in charts],
    }))
    return Fragment("\n".join(body), ("timeline.css",), ("timeline.js",))


def _tools(charts: Sequence[Chart]) -> str:
    marks = "".join(
        f'<li><i data-light="{colour(paint)}" data-dark="{colour(paint, dark=True)}"></i>{escape(name)}</li>'
        for paint, name in legend(charts)
    )
    return (
        '<div class="tools"><div class="row">'
        f'<ul class="legend">{marks}<li><i class="strip"></i>alive</li></ul>'
        '<div class="buttons">'
        '<button id="out" title="Zoom out (-)" aria-label="Zoom out">−</button>'
        '<button id="in" title="Zoom in (+)" aria-label="Zoom in">+</button>'
        '<button id="all" title="Show all (0)">All</button>'
        '<button id="numbers" aria-pressed="true" title="Micro-batch numbers">Numbers</button>'
        '<button id="strips" aria-pressed="true" title="Live activations on each rank">Memory</button>'
        "</div></div>"
        '<canvas class="axis" id="axis" role="img" aria-label="Time axis: drag to zoom into a part"></canvas></div>'
    )


HELP = (
    '<p class="note">Wheel over the time axis, or <kbd>Ctrl</kbd> + wheel anywhere: zoom. Drag: move; along the axis: '
    "zoom into that part. Double click: closer; on the axis: all. Point at an action to see it and the path of its "
    "micro-batch. Keys on a timeline: arrows move between actions, <kbd>+</kbd> <kbd>-</kbd> <kbd>0</kbd> zoom, "
    "<kbd>a</kbd> <kbd>d</kbd> move.</p>"
)


def paint_colours(paint: Paint) -> dict[str, str]:
    """Return the colours of a paint and of text on it, for a light and a dark page."""
    light, dark = colour(paint), colour(paint, dark=True)
    return {"light": light, "dark": dark, "lightInk": ink(light), "darkInk": ink(dark)}


def pack_timeline(chart: Chart, paints: list[Paint]) -> dict:
    """Return a timeline for a script: its name, times and peak, and its rows as packed ``columns``.

    Args:
        paints: list that the column ``paint`` points into.
    """
    columns, timeline = chart.timeline.columns, chart.timeline
    length = chart.end - chart.start
    own = np.array([paints.index(paint) for paint in chart.paints])
    return {
        "name": chart.name,
        "lane": chart.lane,
        "span": timeline.step_time,
        "shortest": float(length[length > 0].min(initial=np.inf)) if np.any(length > 0) else timeline.step_time,
        "peak": float(chart.peak.max(initial=0.0)),
        "bytes": chart.activation is not None,
        "columns": {
            "offset": pack_column(columns.offset),
            **{name: pack_column(getattr(columns, name)) for name in ("op", "stage", "microbatch", "part", "version")},
            "paint": pack_column(own[chart.paint]),
            "half": pack_column(chart.half),
            "start": pack_column(chart.start, "f8"),
            "length": pack_column(length, "f4"),
            "liveOffset": pack_column(np.cumsum([0, *(len(times) for times, _ in chart.live)]), "i4"),
            "liveTime": pack_column(np.concatenate([times for times, _ in chart.live]), "f8"),
            "liveValue": pack_column(np.concatenate([values for _, values in chart.live]), "f4"),
            "producer": pack_column(timeline.messages.producer),
            "consumer": pack_column(timeline.messages.consumer),
        },
    }


def pack_column(column: np.ndarray, kind: str = "") -> dict[str, str]:
    """Encode a column for the page's script, little-endian; integers take the smallest sufficient type."""
    low, high = column.min(initial=0), column.max(initial=0)
    kind = kind or next(k for k in ("i1", "i2", "i4") if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    return {"type": kind, "bytes": base64.b64encode(np.ascontiguousarray(column, f"<{kind}").tobytes()).decode()}
