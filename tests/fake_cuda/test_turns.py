"""The thread of the second computation of a pair takes the stream of the calling thread."""

from collections.abc import Callable


def entered() -> list[bool]:
    import threading
    from unittest.mock import patch

    import torch

    from shoal.engine import turns
    from tests.fake_cuda.census import fake_cuda

    found = []
    right = turns.current_stream

    class Noted:
        def __init__(self, device: torch.device):
            self.stream = right(device)

        def __enter__(self) -> None:
            self.stream.__enter__()
            found.append(isinstance(self.stream, torch.Stream) and threading.current_thread().name.startswith("pair"))

        def __exit__(self, *args: object) -> None:
            self.stream.__exit__(*args)

    with fake_cuda(), patch.object(turns, "current_stream", Noted):
        turns.Turns().run(lambda: found.append(False), lambda: found.append(len(found) == 2), torch.device("cuda", 0))
    return found


def test_the_second_thread_takes_the_stream(on_fake_cuda: Callable) -> None:
    assert on_fake_cuda(entered) == [False, True, True]
