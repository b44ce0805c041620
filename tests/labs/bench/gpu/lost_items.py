"""Items that crash, hang, fail, miss their limit, wait for another one, or succeed."""

import faulthandler
import os
import signal
import time
from collections.abc import Iterator

from shoal.labs.bench.gpu.item import GpuSetting


def crash(setting: GpuSetting) -> Iterator[dict]:
    yield {"value": 1}
    faulthandler.disable()  # no stack in the log of a suite that passes
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(setting: GpuSetting) -> Iterator[dict]:
    yield {"value": 2}
    time.sleep(600)


def fail(setting: GpuSetting) -> Iterator[dict]:
    raise MemoryError("no memory for 5 GB")
    yield


def miss(setting: GpuSetting) -> Iterator[dict]:
    yield {"value": 0.1234567890123, "limit": float("inf"), "passed": False}


def meet(setting: GpuSetting) -> Iterator[dict]:
    """Wait until two items have begun."""
    setting.out.joinpath(f"begun-{os.getpid()}").touch()
    end = time.monotonic() + 60
    while len(found := [*setting.out.glob("begun-*")]) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    yield {"passed": len(found) == 2}


def succeed(setting: GpuSetting) -> Iterator[dict]:
    yield {"value": 3, "passed": True}
