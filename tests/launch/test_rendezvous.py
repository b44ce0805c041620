"""The store of a SLURM step listens on one interface, and what it leaves open is said."""

import socket

import psutil
import pytest

from shoal.base.errors import UsageError
from shoal.launch.rank_env import Membership
from shoal.launch.rendezvous import left_open, meeting_address, meeting_store


def member(rank: int = 0, port: int = 0, ranks: int = 1, how: str = "slurm") -> Membership:
    return Membership(rank, ranks, rank, ranks, how, ("localhost", port))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as end:
        return end.getsockname()[1]


def test_it_listens_on_its_address_alone():
    port = free_port()
    store = meeting_store(member(port=port), 10)
    store.set("key", "value")
    ends = [end for end in psutil.Process().net_connections() if end.status == "LISTEN"]
    assert [end.laddr.ip for end in ends if end.laddr.port == port] == ["127.0.0.1"]


def test_a_taken_port_is_bad_input():
    with socket.create_server(("127.0.0.1", 0)) as end, pytest.raises(UsageError, match="in use by another process"):
        meeting_store(member(port=end.getsockname()[1]), 10)


def test_which_address(monkeypatch):
    assert meeting_address("localhost", alone=True, environment={}) == "127.0.0.1"
    # A machine may resolve its own name to the loopback, and be known to the others by another address.
    assert meeting_address("localhost", alone=False, environment={}) == ""
    assert meeting_address("10.1.2.3", alone=False, environment={}) == "10.1.2.3"
    assert meeting_address("10.1.2.3", alone=False, environment={"NCCL_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    with pytest.raises(UsageError, match=r"the interface 'none0', which is not there.*\n  There are: .*lo"):
        meeting_address("10.1.2.3", alone=False, environment={"GLOO_SOCKET_IFNAME": "none0"})


def test_what_is_left_open_is_said_once():
    assert left_open(member(how="local")) == "" == left_open(member(rank=1, ranks=2))
    assert "port 7 of localhost (127.0.0.1), which asks nobody for a secret" in left_open(member(port=7))
    assert "port 7 of localhost (all interfaces)" in left_open(member(port=7, how="torchrun"))
