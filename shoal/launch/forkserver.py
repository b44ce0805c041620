"""How a command starts its worker processes: as forks of one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext

LOOK = 3600.0  # seconds for which workers are waited for at a time: `multiprocessing.connection.wait` knows no weeks


@cache
def worker_context() -> ForkServerContext | SpawnContext:
    """Where worker processes come from: a server that imports once and forks, or, where the system's libraries do not
    stand a fork (macOS), interpreters of their own."""
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shoal.launch.preload"])
    return context


def become_worker(environment: Mapping[str, str]) -> None:
    """First of all in a worker: take the environment of the process that asked for it, and do not outlive it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)


def _end_with_parent() -> None:
    """The kernel cannot be asked to see to it: the process that asked for a worker is not the one that forked it."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
