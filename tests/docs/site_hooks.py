"""Hook of the site: commands `shoal lab --panel "STATE"` link into a saved page of the lab, and formulas are typeset.

A page as a file, in a terminal or in a repository's viewer, shows the command and the formula as text.
"""

import re
from html import escape
from pathlib import Path
from shutil import copy
from typing import Any
from urllib.parse import quote

from shoal.labs.interactive.page import record_answers, saved_html

COMMAND = re.compile(r'`(shoal lab --panel "?([^"`]+?)"?)`')
SAVED = "panels.html"
WORKER = Path(__file__).parent / "frame_worker.js"
HOSTED = "https://unpkg.com/iframe-worker/shim"
FORMULA = re.compile(r"^```text\n(.*?)^```$", re.M | re.S)
RAISED = re.compile(r"\^(?:\(((?:[^()]|\([^()]*\))*)\)|([\w.]+))|(?<=\b[A-Za-z])_([A-Za-z]+)\b")


def panel_states(markdown: str) -> list[str]:
    """Return the panels with states that a page opens, as in the lab's URL after the #."""
    return [state for _, state in COMMAND.findall(markdown)]


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Make a link of each command, and exponents and indices of the course's formulas."""
    up = "../" * page.file.src_uri.count("/")

    def link(found: re.Match) -> str:
        command, state = found.groups()
        return f'<a href="{up}{SAVED}#{quote(state, safe="?=&,")}"><code>{escape(command)}</code></a>'

    if page.file.src_uri.startswith("course/"):
        markdown = FORMULA.sub(lambda block: f"<pre><code>{typeset(block[1])}</code></pre>", markdown)
    return COMMAND.sub(link, markdown)


def typeset(formula: str) -> str:
    """Return the HTML of a formula, each index and exponent as wide as its text, so that columns stay aligned."""
    def raise_or_lower(found: re.Match) -> str:
        tag, words = ("sub", found[3]) if found[3] else ("sup", found[1] or found[2])
        style = f"display:inline-block;font-size:.8em;line-height:1;width:{len(found[0]) / 0.8:g}ch"
        return f'<{tag} style="{style}">{words}</{tag}>'

    return RAISED.sub(raise_or_lower, escape(formula, quote=False))


def on_post_page(output: str, *, page: Any, **_: object) -> str:
    """Take the search's worker from the site itself (`frame_worker.js`), where the theme names another host."""
    return output.replace(HOSTED, "../" * page.file.src_uri.count("/") + WORKER.name)


def on_post_template(output: str, **_: object) -> str:
    """Do the same in the page of a broken link."""
    return output.replace(HOSTED, WORKER.name)


def on_post_build(*, config: Any, **_: object) -> None:
    """Write the saved page, and the search's worker."""
    copy(WORKER, config["site_dir"])
    (Path(config["site_dir"]) / SAVED).write_text(saved_html(record_answers()), encoding="utf-8")
