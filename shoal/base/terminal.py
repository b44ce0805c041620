"""The terminal: a progress bar, and printing that never aborts a run."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


DELAY = 1.0  # seconds before a progress bar is shown


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[float, str], None]]:
    """Show a bar on stderr, if that is a terminal. Yields what to call with the part that is done and what comes next.
    """
    from rich.console import Console  # which commands without a bar do not wait for
    from rich.progress import BarColumn, Progress, TextColumn

    begin = time.monotonic()
    with Progress(
        TextColumn(what), BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=1.0, visible=False)
        yield lambda done, text: bar.update(
            task, completed=done, description=text, visible=time.monotonic() - begin > DELAY
        )


def replace_unencodable() -> None:
    """Print "?" from now on for letters that stdout's encoding does not have, as a model may write them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def outlive_readers() -> None:
    """Survive from now on that the reader of stdout or stderr goes away, as in `shoal train | head`: nothing more is
    printed there. If it is stdout's, stderr says so."""
    sys.stdout, sys.stderr = _lasting(sys.stdout, _told), _lasting(sys.stderr, lambda: None)


def _told() -> None:
    print("the reader of stdout has gone; this process continues without printing", file=sys.stderr, flush=True)


def _lasting(out: TextIO, told: Callable[[], None]) -> TextIO:
    if not isinstance(out, io.TextIOWrapper):
        return out
    raw = getattr(out.buffer, "raw", out.buffer)
    if not isinstance(raw, io.FileIO) or isinstance(raw, _Lasting):
        return out
    out.flush()
    lasting = _Lasting(out.fileno(), "w", closefd=False)
    lasting.told = told
    return io.TextIOWrapper(
        lasting if out.buffer is raw else io.BufferedWriter(lasting),  # as python -u has it, or not
        out.encoding, out.errors, line_buffering=out.line_buffering, write_through=out.write_through,
    )


class _Lasting(io.FileIO):
    told: Callable[[], None]

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self.told()
            return memoryview(content).nbytes
