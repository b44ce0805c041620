"""A progress bar on stderr while a search goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.base.units import show_seconds
from shoal.planning.search.search import Plan, Progressing

DELAY = 1.0  # seconds before the bar is shown


@contextmanager
def search_progress(what: str) -> Iterator[Progressing | None]:
    """Yield what a search calls as it goes on; None if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    begin = time.monotonic()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.fields[best]}"),
        console=Console(file=sys.stderr), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, visible=False, best="")

        def progress(done: int, total: int, plan: Plan) -> None:
            if time.monotonic() - begin > DELAY:
                best = f"best {show_seconds(plan.best[0].seconds)}" if plan.best else ""
                bar.update(task, completed=done, total=total, visible=True, best=best)

        yield progress
