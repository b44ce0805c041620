"""Worker process of a `shoal.launch.worker_pool.Pool`, connected to its parent by a pipe."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.engine.collectives.folder_store import open_store
from shoal.engine.device import choose_transport, destroy_world, init_world, pick_device
from shoal.launch.prefork import PIPE
from shoal.launch.watch.watchdog import write_stack_when_asked


def serve(pipe: Connection) -> None:
    """Execute calls until the parent closes the pipe or this process becomes unusable."""
    folder, sys.path[:], stack, setup = pickle.loads(pipe.recv_bytes())
    os.chdir(folder)  # the server that forked this process may have been started elsewhere
    write_stack_when_asked(stack)
    torch.set_num_threads(1)
    if (prepare := pickle.loads(setup)) is not None:
        prepare()
    gc.freeze()  # exclude imported modules from the collections after each call
    pipe.send_bytes(pickle.dumps("ready"))
    fit = True
    while fit:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        imported = len(sys.modules)
        fit = answer(pipe, *pickle.loads(message))
        if len(sys.modules) > imported:  # exclude the new modules too
            gc.collect()
            gc.freeze()


def answer(
    pipe: Connection, path: list[str], call: bytes, group: tuple[int, int, str, str, float, bool] | None
) -> bool:
    """Execute one call and send its return value, or immediately the traceback of its exception.

    Args:
        call: pickled function and arguments.
        group: rank, number of ranks, device type, folder of the rendezvous, timeout of collectives, and whether the
            group is kept.

    Returns:
        Whether this process can take another call; not after a failed join, as torch matches groups by their number.
    """
    sys.path[:] = path
    value = pickle.dumps(("finished", None))
    keep, fit = group is not None and group[-1], True
    try:
        fn, args = pickle.loads(call)
        if group is not None and not dist.is_initialized():
            rank, ranks, choice, store, timeout, _ = group
            device = pick_device(choice, rank, shared=True)
            fit = False
            transport = choose_transport(device, ranks)
            init_world(rank, ranks, open_store(Path(store), ranks, device), device, timeout, transport=transport)
            fit = True
        value = pickle.dumps(("finished", fn(*args)))
        if dist.is_initialized():
            dist.barrier()  # no rank closes a connection that a peer still reads from
    except BaseException:
        # Sent before this rank leaves the group and its peers fail, so that the cause comes first.
        pipe.send_bytes(pickle.dumps(("raised", time.monotonic(), traceback.format_exc())))
        fit = fit and not keep
        keep = False
    if not keep:
        gc.collect()  # groups left in reference cycles would keep their threads and connections
        destroy_world()
    if fit:
        pipe.send_bytes(value)
    return fit


def main() -> None:
    serve(Connection(int(os.environ.pop(PIPE))))


if __name__ == "__main__":
    main()
