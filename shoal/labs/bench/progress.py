"""What a benchmark is doing: a line that changes where somebody watches, else one line after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def telling(console: Console) -> Iterator[Callable[[str], None]]:
    """What to call with what comes next. Lines go to the standard error, so that a table's file has the table alone.

    Args:
        console: what results are printed on.
    """
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        log = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        yield log.print
