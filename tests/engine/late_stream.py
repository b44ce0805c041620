"""A side stream on the CPU that works as late as it may: when someone waits for it."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LateMark:
    """Stands for `shoal.engine.streams.Mark`; waiting in either way does the work up to it."""

    def __init__(self, stream: LateStream, number: int):
        self.stream, self.number = stream, number

    def wait(self) -> None:
        self.stream.work(self.number)

    synchronize = wait


class LateStream:
    """Stands for `shoal.engine.streams.SideStream`: code that forgets to wait computes with old values."""

    queues = True

    def __init__(self, device: torch.device | None = None):
        self.queued: list[Callable[[], object]] = []
        self.done = 0

    def run(self, work: Callable[[], object]) -> LateMark:
        self.queued.append(work)
        return LateMark(self, len(self.queued))

    def work(self, number: int) -> None:
        while self.done < number:
            self.done += 1
            self.queued[self.done - 1]()
