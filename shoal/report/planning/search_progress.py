"""Progress bar of a search on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.base.terminal import progress_bar
from shoal.base.units import show_seconds
from shoal.planning.search.search import Plan, Progressing


@contextmanager
def search_progress(what: str) -> Iterator[Progressing]:
    with progress_bar(what) as show:

        def progress(done: int, total: int, plan: Plan) -> None:
            best = f", best {show_seconds(plan.best[0].seconds)}" if plan.best else ""
            show(done / total, f"{done}/{total}{best}")

        yield progress
