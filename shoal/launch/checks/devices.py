"""Which devices are there for the next attempt: those that answer, and that nobody has marked as lost.

A run's devices are numbered from 0: on CUDA as the system does, on the CPU as the ranks of the layout asked for.
``lost-devices`` in the run folder is a JSON list of those that must not be used, such as ``[3]``; an operator writes
it, or a test. It is read before each attempt, so a device that is taken out of it returns at the next one.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch

from shoal.base.errors import UsageError
from shoal.launch.prefork import Nursery

LOST_FILE = "lost-devices"
PROBE_SECONDS = 30.0  # for a device to answer; a context of CUDA takes some


def marked_lost(folder: Path) -> set[int]:
    """The devices that the run folder says are lost.

    Raises:
        UsageError: the file is not a list of numbers.
    """
    path = folder / LOST_FILE
    try:
        found = json.loads(path.read_text() or "[]")
    except FileNotFoundError:
        return set()
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, list) or not all(type(device) is int and device >= 0 for device in found):
        raise UsageError(f"{path} must hold a JSON list of the devices that are lost, such as [3], or be deleted.")
    return set(found)


def devices_there(folder: Path, device: str, asked: int, nursery: Nursery | None, log: Path) -> list[int]:
    """The devices that the next attempt may use, at most as many as it asks for.

    Args:
        device: the type, ``cpu`` or ``cuda``.
        asked: how many ranks the run has when nothing is lost.
        nursery: starts those who ask the devices; None believes that all are well.
    """
    count = torch.cuda.device_count() if device == "cuda" else asked
    there = set(range(count)) - marked_lost(folder)
    if nursery is not None and device == "cuda":  # a core that does not compute asks nobody
        there &= answering(nursery, device, count, log)
    return sorted(there)[:asked]


def answering(nursery: Nursery, device: str, count: int, log: Path) -> set[int]:
    """The devices that compute, each asked by a process of its own: one that hangs holds up no other.

    Args:
        device: the type, ``cpu`` or ``cuda``.
        count: how many there should be.
    """
    asked = {
        index: nursery.fork(
            "shoal.launch.checks.device_probe", {**os.environ, "SHOAL_PROBE": f"{device}:{index}"}, log, heard=False
        )
        for index in range(count)
    }
    deadline = time.monotonic() + PROBE_SECONDS
    while any(child.poll() is None for child in asked.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    for child in asked.values():
        child.send_signal(signal.SIGKILL)
    return {index for index, child in asked.items() if child.wait() == 0}


def visible(devices: list[int]) -> dict[str, str]:
    """The environment in which these CUDA devices are 0, 1, ...: they may be numbered within others already."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = outer.split(",") if outer else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] if names else str(i) for i in devices)}
