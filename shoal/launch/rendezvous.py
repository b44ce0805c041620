"""Rendezvous of the ranks: a file, or the store of a SLURM step on one interface; notices about open ports.

c10d's TCPStore has no authentication and by default listens on all interfaces. Therefore, locally started ranks use a
file, and the store of a SLURM step is bound to one address. torchrun creates its own store.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from datetime import timedelta

import psutil
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.launch.rank_env import RankEnv, scratch_folder

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # the first variable that is set takes effect


def listen_address(host: str, alone: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address on which the first rank listens; "" for all interfaces.

    Args:
        host: name of this machine as known to the other ranks.
        alone: whether all ranks are on this machine.

    Raises:
        UsageError: a variable names an interface that does not exist.
    """
    if chosen := next((environment[name] for name in INTERFACES if environment.get(name)), ""):
        found = psutil.net_if_addrs()
        addresses = [a.address for a in found.get(chosen, []) if a.family in (socket.AF_INET, socket.AF_INET6)]
        if not addresses:
            raise UsageError(
                f"{' or '.join(INTERFACES)} names the interface '{chosen}', which is not there or has no address."
                f"\n  There are: {', '.join(sorted(found))}."
            )
        return addresses[0].partition("%")[0]
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    loops = address == "::1" or address.startswith("127.")
    return "" if loops and not alone else address  # a machine may resolve its own name to a loopback address


def create_store(member: RankEnv, timeout: float) -> dist.Store | None:
    """Return the store of the rendezvous; None under torchrun, which has its own. In a SLURM step, rank 0 hosts it.

    Raises:
        UsageError: the port is in use, or the interface does not exist.
    """
    if member.how == "local":
        return dist.FileStore(str(scratch_folder() / "store"), member.world_size)
    if member.how == "torchrun":
        return None
    host, port = member.meeting_point
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
                f"port {port} of {host}, where the ranks are to meet, is in use by another process."
                "\n  End that process, or start another step."
            ) from None
        listening, host = end.detach(), address or host
    return dist.TCPStore(
        host, port, member.world_size, is_master=member.rank == 0, timeout=timedelta(seconds=timeout),
        master_listen_fd=listening,
    )


def open_port_notice(member: RankEnv) -> str:
    """Return a notice about who can reach the open port of the ranks; "" without an open port."""
    if member.how == "local" or member.rank != 0:
        return ""
    host, port = member.meeting_point
    where = "all interfaces"
    if member.how == "slurm":
        where = listen_address(host, member.world_size == member.local_world_size) or where
    return f"the ranks meet on port {port} of {host} ({where}), which asks nobody for a secret: see docs/launch.md"
