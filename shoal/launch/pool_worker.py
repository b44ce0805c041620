"""One worker of a `shoal.launch.worker_pool.Pool`: a process with a pipe to its parent."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from shoal.engine.device import destroy_world, init_world
from shoal.launch.prefork import PIPE
from shoal.launch.watch.watchdog import write_stack_when_asked


def serve(pipe: Connection) -> None:
    """Do one call after another, until the parent closes the pipe or this process can take no more."""
    sys.path[:], stack, setup = pickle.loads(pipe.recv_bytes())
    write_stack_when_asked(stack)
    torch.set_num_threads(1)
    if (prepare := pickle.loads(setup)) is not None:
        prepare()
    gc.freeze()  # what is imported by now stays, and need not be looked through after each call
    pipe.send_bytes(pickle.dumps("ready"))
    fit = True
    while fit:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        imported = len(sys.modules)
        fit = answer(pipe, *pickle.loads(message))
        if len(sys.modules) > imported:  # which stay too
            gc.collect()
            gc.freeze()


def answer(pipe: Connection, path: list[str], call: bytes, group: tuple[int, int, str, float, bool] | None) -> bool:
    """Do one call and send what it returned, or at once the traceback of what it raised.

    Args:
        path: modules that the parent can import by now (a test's folder) can be imported here.
        call: the pickled function and its arguments.
        group: rank, ranks, the file where they meet, the timeout of collectives, and whether the group is kept.

    Returns:
        Whether this process can take another: torch counts the groups that it began to make in the names under which it
        looks for its peers, so one that could not join finds nobody any more.
    """
    sys.path[:] = path
    value = pickle.dumps(("finished", None))
    keep, fit = group is not None and group[-1], True
    try:
        fn, args = pickle.loads(call)
        if group is not None and not dist.is_initialized():
            rank, ranks, store, timeout, _ = group
            fit = False
            init_world(rank, ranks, dist.FileStore(store, ranks), "cpu", timeout)
            fit = True
        value = pickle.dumps(("finished", fn(*args)))
        if dist.is_initialized():
            dist.barrier()  # nobody closes a connection that a peer still reads from
    except BaseException:
        # Before this rank leaves the group and its peers fail: the cause must be first.
        pipe.send_bytes(pickle.dumps(("raised", time.monotonic(), traceback.format_exc())))
        fit = fit and not keep
        keep = False
    if not keep:
        gc.collect()  # groups that are left in reference cycles would keep their threads and connections
        destroy_world()
    if fit:
        pipe.send_bytes(value)
    return fit


def main() -> None:
    """Serve the parent whose pipe the environment names."""
    serve(Connection(int(os.environ.pop(PIPE))))


if __name__ == "__main__":
    main()
