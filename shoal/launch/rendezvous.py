"""Join the ranks of a run: set this process up as one, and let it find the others.

Locally started ranks rendezvous through a folder, ranks of a SLURM step through a store on one interface; torchrun
creates its own store. (c10d's TCPStore has no authentication and by default listens on all interfaces.)
"""

from __future__ import annotations

import errno
import faulthandler
import os
import socket
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.base.polling import wait_until
from shoal.engine.collectives.folder_store import open_store
from shoal.engine.device import COLLECTIVE_SECONDS, cores_per_rank, die_with_parent, init_world, tune_process
from shoal.launch.rank_env import RankEnv, record_end, scratch_folder, stack_path
from shoal.launch.watch.watchdog import write_stack_when_asked

MEET_SECONDS = 0.005  # between looks for the other ranks
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # the first variable that is set takes effect


def become_rank(member: RankEnv, device: str, threads: int = 0, *, records: Path | None = None) -> None:
    """Make this process one rank of the world. Call it first, and again only after it has left the world.

    From then on an uncaught exception is recorded for the parent and ends the process immediately, without waiting for
    background threads. So leave the process group only on success; peers then fail after the cause.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: torch's CPU threads; 0 uses ``OMP_NUM_THREADS`` or divides the cores among the local ranks.
        records: folder in which this rank records an exception and, on request, its stack.

    Raises:
        UsageError: the device does not exist, or see `create_store`.
    """
    sys.excepthook = partial(_record_and_exit, records, member.rank)
    faulthandler.enable()
    if records is not None:
        write_stack_when_asked(stack_path(records, member.rank))
    if member.how != "slurm":  # SLURM itself ends the other tasks of a step
        die_with_parent(os.getppid())
    named = os.environ.get("OMP_NUM_THREADS", "")
    if threads or not named:
        torch.set_num_threads(threads or cores_per_rank(member.local_world_size))
    elif member.how == "local" and named.isdigit() and int(named):
        # A forked process inherits torch's thread count from its server, not from its own variable.
        torch.set_num_threads(int(named))
    picked = member.device(device)
    if picked.type == "cpu":
        tune_process()
    init_world(member.rank, member.world_size, create_store(member, picked), picked, COLLECTIVE_SECONDS)


def _record_and_exit(
    folder: Path | None, rank: int, kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Record the exception for the parent, which shows only the earliest record, and exit (a ``sys.excepthook``)."""
    usage, report = record_end(folder, rank, error)
    # init_process_group wraps this hook in one that buffers sys.stderr until it returns, which it never does.
    print(report, file=sys.__stderr__, flush=True)
    sys.stdout.flush()
    os._exit(2 if usage else 1)


def listen_address(host: str, alone: bool) -> str:
    """Return the address on which the first rank listens; "" for all interfaces.

    Args:
        host: name of this machine as known to the other ranks.
        alone: whether all ranks are on this machine.
    """
    if chosen := next((os.environ[name] for name in INTERFACES if os.environ.get(name)), ""):
        found = psutil.net_if_addrs()
        addresses = [a.address for a in found.get(chosen, []) if a.family in (socket.AF_INET, socket.AF_INET6)]
        if not addresses:
            raise UsageError(
                f"{' or '.join(INTERFACES)} names the interface '{chosen}', which does not exist or has no address."
                f"\n  Existing interfaces: {', '.join(sorted(found))}."
            )
        return addresses[0].partition("%")[0]
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    loops = address == "::1" or address.startswith("127.")
    return "" if loops and not alone else address  # a machine may resolve its own name to a loopback address


def create_store(member: RankEnv, device: torch.device) -> dist.Store | None:
    """Return the store of the rendezvous; None under torchrun, which has its own. In a SLURM step, rank 0 hosts it.

    Raises:
        UsageError: the port is in use, or a variable names an interface that does not exist.
    """
    if member.how == "local":
        store = open_store(scratch_folder() / "store", member.world_size, device)
        # Wait in Python, where an order to leave interrupts a rank: a peer may end before it comes.
        store.set(f"shoal/present/{member.rank}", "")
        present = [f"shoal/present/{rank}" for rank in range(member.world_size)]
        wait_until(lambda: store.check(present), COLLECTIVE_SECONDS, MEET_SECONDS)
        return store
    if member.how == "torchrun":
        return None
    host, port = member.master
    listening: int | None = None  # socket of the first rank, which the store takes over
    if member.rank == 0:
        address = listen_address(host, member.world_size == member.local_world_size)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            end = socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise UsageError(
                f"port {port} of {host}, the rendezvous of the ranks, is in use by another process."
                "\n  End that process, or start another step."
            ) from None
        listening, host = end.detach(), address or host
    return dist.TCPStore(
        host, port, member.world_size, is_master=member.rank == 0, timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        master_listen_fd=listening,
    )


def open_port_notice(member: RankEnv) -> str:
    """Return a notice about who can reach the open port of the ranks; "" without an open port."""
    if member.how == "local" or member.rank != 0:
        return ""
    host, port = member.master
    where = "all interfaces"
    if member.how == "slurm":
        where = listen_address(host, member.world_size == member.local_world_size) or where
    return f"the ranks meet on port {port} of {host} ({where}), which has no authentication: see docs/launch.md"
