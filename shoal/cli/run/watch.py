"""`shoal watch`: follow runs on a local page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

import shoal
from shoal.base.errors import UsageError
from shoal.base.options import POSITIONAL, reject_unused
from shoal.base.section import Section


class PageOptions(Section):
    """Options of a local page."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on 127.0.0.1; 0 takes a free one."""

    browser: bool = True
    """Open the page in the browser."""


class WatchOptions(PageOptions):
    out: Path | None = None
    """Write the page as one file (.html), with the values of now, and serve nothing."""

    runs: Annotated[tuple[Path, ...], POSITIONAL] = ()
    """Run folders."""


def run(options: WatchOptions) -> int:
    """Serve the page until Ctrl-C, or write it."""
    if not options.runs:
        raise UsageError("name at least one run folder: shoal watch RUN_FOLDER.")
    if options.out:
        reject_unused(options, ("port", "browser"), "--out writes a file and serves nothing")
    written = shoal.watch(options.runs, out=options.out, port=options.port, browser=options.browser)
    if written:
        print(f"written: {written}")
    return 0
