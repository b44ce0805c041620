"""Find the devices available to the next attempt: working ones that are not marked as lost.

A run's devices are numbered from 0: on CUDA as by the system, on the CPU by the ranks of the requested layout.
``lost-devices`` in the run folder is a JSON list of devices that must not be used, such as ``[3]``, written by an
operator or a test. It is read before each attempt, so a device removed from it is used again at the next one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from shoal.base.errors import UsageError
from shoal.base.files import read_text
from shoal.launch.prefork import PreforkServer, PreforkServerEnded
from shoal.launch.worker_pool import Pool, RankError

LOST_FILE = "lost-devices"
PROBE_SECONDS = 30.0  # timeout of a device's answer; creating a CUDA context takes a few seconds


def read_lost_devices(folder: Path) -> set[int]:
    """Return the devices marked as lost in the run folder; raise `UsageError` if the file is not a list of numbers."""
    path = folder / LOST_FILE
    try:
        found = json.loads(read_text(path) or "[]") if os.path.lexists(path) else []
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(device) is int and device >= 0 for device in found):
        raise UsageError(f"{path} must hold a JSON list of the lost devices, such as [3]. Correct or delete it.")
    return set(found)


def find_devices(folder: Path, device: str, asked: int, server: PreforkServer | None) -> list[int]:
    """Return the devices that the next attempt can use, at most ``asked``.

    Args:
        asked: number of ranks of the run without losses.
        server: forks the processes that test the devices; None skips the tests.
    """
    count = torch.cuda.device_count() if device == "cuda" else asked
    usable = set(range(count)) - read_lost_devices(folder)
    if server is not None and device == "cuda":  # CPU cores are not tested
        usable -= find_failing_devices(server, [f"cuda:{index}" for index in range(count)])
    return sorted(usable)[:asked]


def find_failing_devices(server: PreforkServer, devices: list[str]) -> set[int]:
    """Return the positions of failing devices in the list; a separate process tests each, as a device may hang."""
    with Pool(len(devices), server=server) as pool:
        try:
            pool.map(check_device, devices, timeout=PROBE_SECONDS)
        except RankError as error:
            for number, cause in error.failures:
                print(f"{devices[number]} fails:\n{cause}", file=sys.stderr)
            return {number for number, _ in error.failures}
        except PreforkServerEnded:
            raise
        except RuntimeError as error:  # a worker did not start: no device has answered
            print(f"devices were not checked: {error}", file=sys.stderr)
    return set()


def check_device(name: str) -> None:
    """Compute a sum on a device; raise `RuntimeError` if it is wrong or torch cannot compute it."""
    if float((torch.ones(1024, device=name) * 3).sum()) != 3072.0:
        raise RuntimeError(f"{name} computes wrong sums")


def visible_devices_variable(devices: list[int]) -> dict[str, str]:
    """Return an environment that renumbers these CUDA devices 0, 1, ...; respects an existing CUDA_VISIBLE_DEVICES."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = outer.split(",") if outer else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] if names else str(i) for i in devices)}
