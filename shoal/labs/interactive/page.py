"""The lab's page: served by a `PageServer`, or saved as one HTML file with recorded answers.

Scripts import each other by the names of an import map, which lead to files of the server, or in a saved page to data
URLs. A saved page has no network: it shows recorded answers, by name and request.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import sha256
from typing import Any

from shoal import __version__
from shoal.base.section import Section, validate
from shoal.labs.interactive.panels import PANELS, call_names, call_panel, recorded_requests
from shoal.report.page import ICON, asset, json_script
from shoal.report.server import LocalPage, ServedFile

SCRIPTS = ("lab.js", "kit.js", "mesh_chart.js", "drawing.js", *(f"panel_{name}.js" for name in PANELS))
SAVED_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' data:; img-src data:"


class Recorded(Section):
    """One answer of a saved page."""

    call: str
    """Name of the call."""

    request: dict[str, Any]
    """The request, as the page's script sent it."""

    answer: Any
    """The plain answer."""


class SaveRequest(Section):
    """What a page to save shows."""

    hash: str = ""
    """Panel and state, as in the page's URL after the #."""

    recorded: tuple[Recorded, ...] = ()
    """Answers that the page has received."""


def build_page() -> LocalPage:
    """Return the lab: its page, style and scripts, and the calls of all panels."""
    html, policy = _served_html()
    found = {"": ServedFile("text/html", lambda: html, {"Content-Security-Policy": policy})}
    found["lab.css"] = ServedFile("text/css", partial(read_asset, "lab.css"))
    found |= {name: ServedFile("text/javascript", partial(read_asset, name)) for name in SCRIPTS}
    calls = {name: partial(call_panel, name) for name in call_names()}
    return LocalPage(found, {**calls, "save": _save})


def _save(values: dict[str, Any]) -> dict[str, str]:
    given = validate(SaveRequest, values, source="save")
    return {"html": saved_html(given.recorded, given.hash)}


def record_answers() -> Iterable[Recorded]:
    """Compute the answers to the requests that each panel records."""
    for name, request in recorded_requests():
        yield Recorded(call=name, request=request, answer=call_panel(name, request))


def saved_html(recorded: Iterable[Recorded], state: str = "") -> str:
    """Return the lab as one HTML file that needs no server.

    Args:
        state: panel and state that it shows first, as in the page's URL after the #.
    """
    scripts = {_specifier(name): b64encode(read_asset(name).encode()).decode() for name in SCRIPTS}
    urls = {name: f"data:text/javascript;base64,{text}" for name, text in scripts.items()}
    answers = [[each.call, each.request, each.answer] for each in recorded]
    return _html(
        urls, style=f"<style>\n{read_asset('lab.css')}</style>", policy=SAVED_POLICY,
        facts={"saved": True, "hash": state, "answers": answers},
    )  # fmt: skip


def _served_html() -> tuple[str, str]:
    """Return the page, and its content security policy."""
    urls = {_specifier(name): f"./{name}" for name in SCRIPTS}
    html = _html(urls, style='<link rel="stylesheet" href="lab.css">', facts={"saved": False})
    parts = [script.partition("</script>")[0] for script in html.split("<script")[1:]]
    inline = [part.partition(">")[2] for part in parts if 'type="importmap"' in part or 'type="module"' in part]
    hashes = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in inline)
    return html, (
        f"default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self' {hashes}; img-src data: blob:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def _html(urls: Mapping[str, str], *, style: str, facts: dict[str, Any], policy: str = "") -> str:
    facts = facts | {"panels": list(PANELS), "version": __version__}
    replaced = {
        "ICON": ICON,
        "POLICY": f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if policy else "",
        "STYLE": style,
        "IMPORTS": json.dumps({"imports": urls}),
        "FACTS": json_script("facts", facts),
    }
    html = read_asset("index.html")
    for name, text in replaced.items():
        html = html.replace(f"%{name}%", text)
    return html


def _specifier(name: str) -> str:
    """Return the name by which scripts import a script.

    >>> _specifier("kit.js"), _specifier("panel_layout.js")
    ('lab/kit', 'lab/panel_layout')
    """
    return f"lab/{name.removesuffix('.js')}"


def read_asset(name: str) -> str:
    return asset(name, "shoal.labs.interactive")
