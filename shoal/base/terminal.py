"""Terminal output: a progress bar, safe text, and printing that never aborts a run."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DELAY = 1.0  # seconds before a progress bar appears
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: escape sequences begin with them
    "\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Characters that a terminal obeys rather than shows: controls, changes of direction, invisible ones, surrogates."""


def printable(text: str) -> str:
    """Escape what a terminal would obey in a text from a file, a model or another program.

    >>> printable("red \\x1b[31m, and back \\u202eto front")
    'red \\\\x1b[31m, and back \\\\u202eto front'
    """
    return text if text.isascii() and text.isprintable() else UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def quote(path: str | Path) -> str:
    """Quote a path for a command line that a user may copy.

    >>> quote("runs/one"), quote(Path("my runs/one"))
    ('runs/one', "'my runs/one'")
    """
    return shlex.quote(str(path))


def wrap_words(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap a line between words, of which a number and its unit are one.

    >>> wrap_words("3 nodes, +2.3 %", 14)
    ['3 nodes,', '+2.3 %']
    """
    wrapped = wrap(join_units(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in wrapped]


def join_units(text: str) -> str:
    """Return text whose numbers are followed by a space that does not break, if by a unit then."""
    return re.sub(r"(?<=\d) (?=%|(?!x )[^\W\d])", "\xa0", text)


def wrap_lines(lines: Iterable[str]) -> list[str]:
    """Wrap lines between words to the width of the terminal, indented below their last column; elsewhere as they are.

    A column begins after two spaces. The next lines of a text without columns are indented by two spaces.
    """
    if not sys.stdout.isatty():
        return list(lines)
    width, wrapped = get_terminal_size().columns, list[str]()
    for line in lines:
        if len(line) <= width:
            wrapped.append(line)
            continue
        columns = [found.end() for found in re.finditer(" {2,}", line[: 2 * width // 3])]
        wrapped += wrap_words(line, width, " " * max([2, *columns]))
    return wrapped


def warn(text: str) -> None:
    """Print a note to stderr, which may be on a full disk too."""
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar on stderr, if a terminal; yields a function of the completed fraction and the next label."""
    from rich.console import Console  # slow import; commands without a bar skip it
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


def red(text: str) -> str:
    """Return text in bold red if stdout is a terminal that shows colours."""
    shown = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[1;31m{text}\x1b[0m" if shown else text


def replace_unencodable() -> None:
    """Replace characters that stdout's encoding lacks with "?", as a model's output may contain them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def outlive_readers() -> None:
    """Continue without output when the reader of stdout or stderr exits, as in `shoal train | head`. If stdout's
    reader exits, a note is printed on stderr. What does not fit on a full disk is dropped."""
    sys.stdout, sys.stderr = _lasting(sys.stdout, _report_closed), _lasting(sys.stderr, lambda: None)


def _report_closed() -> None:
    print("the reader of stdout has gone; this process continues without printing", file=sys.stderr, flush=True)


def _lasting(out: TextIO, on_close: Callable[[], None]) -> TextIO:
    if not isinstance(out, io.TextIOWrapper):
        return out
    raw = getattr(out.buffer, "raw", out.buffer)
    if not isinstance(raw, io.FileIO) or isinstance(raw, _Lasting):
        return out
    out.flush()
    lasting = _Lasting(out.fileno(), "w", closefd=False)
    lasting.on_close = on_close
    return io.TextIOWrapper(
        lasting if out.buffer is raw else io.BufferedWriter(lasting),  # unbuffered as with python -u, or buffered
        out.encoding, out.errors, line_buffering=out.line_buffering, write_through=out.write_through,
    )


class _Lasting(io.FileIO):
    on_close: Callable[[], None]

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self.on_close()
            return memoryview(content).nbytes
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            return memoryview(content).nbytes
