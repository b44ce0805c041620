"""The store of a SLURM step listens on one interface, and what it leaves open is said."""

import socket

import psutil
import pytest
import torch

from shoal.base.errors import UsageError
from shoal.launch.rank_env import RankEnv
from shoal.launch.rendezvous import INTERFACES, create_store, listen_address, open_port_notice

CPU = torch.device("cpu")


def member(rank: int = 0, port: int = 0, ranks: int = 1, how: str = "slurm") -> RankEnv:
    return RankEnv(rank, ranks, rank, ranks, how, ("localhost", port))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as end:
        return end.getsockname()[1]


def test_it_listens_on_its_address_alone():
    port = free_port()
    store = create_store(member(port=port), CPU)
    store.set("key", "value")
    ends = [end for end in psutil.Process().net_connections() if end.status == "LISTEN"]
    assert [end.laddr.ip for end in ends if end.laddr.port == port] == ["127.0.0.1"]


def test_a_taken_port_is_bad_input():
    with socket.create_server(("127.0.0.1", 0)) as end, pytest.raises(UsageError, match="in use by another process"):
        create_store(member(port=end.getsockname()[1]), CPU)


def test_which_address(monkeypatch):
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    assert listen_address("localhost", alone=True) == "127.0.0.1"
    # A machine may resolve its own name to the loopback, and be known to the others by another address.
    assert listen_address("localhost", alone=False) == ""
    assert listen_address("10.1.2.3", alone=False) == "10.1.2.3"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert listen_address("10.1.2.3", alone=False) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(UsageError, match=r"the interface 'none0', which does not exist.*\n  Existing interfaces: .*lo"):
        listen_address("10.1.2.3", alone=False)


def test_what_is_left_open_is_said_once():
    assert open_port_notice(member(how="local")) == "" == open_port_notice(member(rank=1, ranks=2))
    assert "port 7 of localhost (127.0.0.1), which has no authentication" in open_port_notice(member(port=7))
    assert "port 7 of localhost (all interfaces)" in open_port_notice(member(port=7, how="torchrun"))
