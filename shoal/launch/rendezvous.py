"""Where the ranks meet: a file, or the store of a SLURM step on one interface; and what any store leaves open.

c10d's TCPStore asks nobody for a secret, and by itself listens on all interfaces. So ranks that were started locally
meet in a file, and the store of a SLURM step is bound to one address. torchrun makes its store itself.
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

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # of these variables the first that is set is obeyed


def listen_address(host: str, alone: bool, environment: Mapping[str, str] = os.environ) -> str:
    """The address on which the first rank listens; "" for all.

    Args:
        host: the name by which the others know this machine.
        alone: all ranks are on this machine.

    Raises:
        UsageError: a variable names an interface that is not there.
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
    return "" if loops and not alone else address  # machines know themselves by names that others resolve otherwise


def create_store(member: RankEnv, timeout: float) -> dist.Store | None:
    """Where the ranks meet; None under torchrun, which has made it. The store of a SLURM step is its first rank's.

    Raises:
        UsageError: the port is taken, or there is no such interface.
    """
    if member.how == "local":
        return dist.FileStore(str(scratch_folder() / "store"), member.world_size)
    if member.how == "torchrun":
        return None
    host, port = member.meeting_point
    listening: int | None = None  # the socket of the first rank, which the store takes over
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
    """What the run says of who could reach its ranks; "" where nobody can."""
    if member.how == "local" or member.rank != 0:
        return ""
    host, port = member.meeting_point
    where = "all interfaces"
    if member.how == "slurm":
        where = listen_address(host, member.world_size == member.local_world_size) or where
    return f"the ranks meet on port {port} of {host} ({where}), which asks nobody for a secret: see docs/launch.md"
