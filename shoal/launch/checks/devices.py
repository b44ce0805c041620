"""Which devices are there for the next attempt: those that answer, and that nobody has marked as lost.

A run's devices are numbered from 0: on CUDA as the system does, on the CPU as the ranks of the layout asked for.
``lost-devices`` in the run folder is a JSON list of those that must not be used, such as ``[3]``; an operator writes
it, or a test. It is read before each attempt, so a device that is taken out of it returns at the next one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from shoal.base.errors import UsageError
from shoal.launch.prefork import PreforkServer
from shoal.launch.worker_pool import Pool, RankError

LOST_FILE = "lost-devices"
PROBE_SECONDS = 30.0  # for a device to answer; a context of CUDA takes some


def read_lost_devices(folder: Path) -> set[int]:
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


def find_devices(folder: Path, device: str, asked: int, server: PreforkServer | None) -> list[int]:
    """The devices that the next attempt may use, at most as many as it asks for.

    Args:
        device: the type, ``cpu`` or ``cuda``.
        asked: how many ranks the run has when nothing is lost.
        server: forks those who ask the devices; None believes that all are well.
    """
    count = torch.cuda.device_count() if device == "cuda" else asked
    there = set(range(count)) - read_lost_devices(folder)
    if server is not None and device == "cuda":  # a core that does not compute asks nobody
        there -= find_failing_devices(server, [f"cuda:{index}" for index in range(count)])
    return sorted(there)[:asked]


def find_failing_devices(server: PreforkServer, devices: list[str]) -> set[int]:
    """The devices that do not compute, by their places in the list; each is asked by a process of its own, as one may
    hang."""
    with Pool(len(devices), server=server) as pool:
        try:
            pool.map(check_device, devices, timeout=PROBE_SECONDS)
        except RankError as error:
            for number, cause in error.failures:
                print(f"{devices[number]} does not compute:\n{cause}", file=sys.stderr)
            return {number for number, _ in error.failures}
    return set()


def check_device(name: str) -> None:
    """Ask a device for a sum.

    Raises:
        RuntimeError: torch's, or the sum is wrong.
    """
    if float((torch.ones(1024, device=name) * 3).sum()) != 3072.0:
        raise RuntimeError(f"{name} computes wrong sums")


def visible_devices_variable(devices: list[int]) -> dict[str, str]:
    """The environment in which these CUDA devices are 0, 1, ...: they may be numbered within others already."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = outer.split(",") if outer else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] if names else str(i) for i in devices)}
