"""What is printed must end no run: letters that a terminal has not, and a reader that goes away."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def print_what_can_be() -> None:
    """From now on stdout takes any text: what its encoding has no letters for, as a model writes it, becomes "?"."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def outlive_readers() -> None:
    """From now on the reader of stdout and stderr may go away, as that of `shoal train | head` does: nothing fails for
    it, and nothing more is printed. Of stdout's stderr is told, if it is another."""
    sys.stdout, sys.stderr = _lasting(sys.stdout, _told), _lasting(sys.stderr, lambda: None)


def _told() -> None:
    print("nobody reads any more what this process prints; it goes on", file=sys.stderr, flush=True)


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
