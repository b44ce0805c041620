"""`shoal lab`: one local page with the engines after it."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Annotated

from pydantic import Field

from shoal.base.files import check_writable, write_atomically
from shoal.base.options import reject_unused
from shoal.base.section import Section


class LabOptions(Section):
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on 127.0.0.1 (default: a free one)."""

    no_browser: bool = False
    """Print the URL, and open no browser."""

    out: Path | None = None
    """Write the page with answers for each panel's first picture and its sliders as one file (.html), and serve
    nothing."""


def run(options: LabOptions) -> int:
    """Serve the lab until Ctrl-C, or write it; return 0."""
    from shoal.labs.interactive.page import build_page, record_answers, saved_html

    if options.out:
        check_writable(options.out, "--out", ".html")
        reject_unused(options, ("port", "no_browser"), "--out writes a file and serves nothing")
        write_atomically(options.out, saved_html(record_answers()))
        print(f"written: {options.out}")
        return 0
    from shoal.labs.interactive.panels import warm_up
    from shoal.report.server import PageServer

    server = PageServer(build_page(), options.port)
    print(f"{server.url}\nThe URL is for you alone: its token opens the page. Ctrl-C stops the server.", flush=True)
    Thread(target=warm_up, daemon=True).start()
    server.run(browser=not options.no_browser)
    return 0
