"""Records of a run on a disk that may be full or gone: they are delayed or skipped, and never end the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.base.files import open_to_append
from shoal.base.terminal import warn

MOST_PENDING = 16 << 20  # bytes of lines that wait for space; later ones are dropped

_reported: set[Path] = set()


@contextmanager
def best_effort(path: Path, report: Callable[[str], None] = warn) -> Iterator[None]:
    """Skip the enclosed writing of ``path`` if the system refuses it, and report this once."""
    try:
        yield
    except OSError as error:
        if path not in _reported:
            _reported.add(path)
            report(f"{path} cannot be written: {error.strerror or error}. The run continues and tries again.")


class Journal:
    """Append lines to a file. Lines that cannot be written are kept and written with the next ones.

    Several processes may append to one file: lines are written in one call, so that they do not interleave.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = warn):
        self.path, self._report = path, report
        self._pending = bytearray()

    def append(self, lines: str = "") -> None:
        """Append complete lines, after those that wait. The kernel has them at the return: a killed process loses none.

        After a partial write to a full disk, the rest of the line follows with the next call.
        """
        if len(self._pending) < MOST_PENDING:
            self._pending += lines.encode()
        with best_effort(self.path, self._report), open_to_append(self.path) as file:
            while self._pending:
                del self._pending[: os.write(file.fileno(), self._pending)]
