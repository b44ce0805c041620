"""Hook of the site: the lab as a saved page in it; commands `shoal lab --panel "STATE"` link into its panels."""

import re
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shoal.labs.interactive.page import record_answers, saved_html

COMMAND = re.compile(r'`(shoal lab --panel "?([^"`]+?)"?)`')
SAVED = "panels.html"


def panel_states(markdown: str) -> list[str]:
    """Return the panels with states that a page opens, as in the lab's URL after the #."""
    return [state for _, state in COMMAND.findall(markdown)]


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Make a link of each command. A page as a file shows the command alone."""
    up = "../" * page.file.src_uri.count("/")

    def link(found: re.Match) -> str:
        command, state = found.groups()
        return f'<a href="{up}{SAVED}#{quote(state, safe="?=&,")}"><code>{escape(command)}</code></a>'

    return COMMAND.sub(link, markdown)


def on_post_build(*, config: Any, **_: object) -> None:
    """Write the saved page."""
    (Path(config["site_dir"]) / SAVED).write_text(saved_html(record_answers()), encoding="utf-8")
