"""Orders of the supervisor that interrupt a rank."""

import json
import os
import signal
import time

import pytest

from shoal.launch.prefork import PIPE
from shoal.launch.recovery import generations
from shoal.launch.recovery.generations import INTERRUPT, LEAVE, Abandoned, Orders


def test_the_order_after_the_one_to_leave_is_read_once_the_rank_has_left(monkeypatch):
    monkeypatch.setattr(generations, "AGAIN_SECONDS", 60.0)
    read, write = os.pipe()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(PIPE, str(read))
    before, begin = signal.getsignal(INTERRUPT), time.monotonic()
    try:
        orders = Orders()
        with pytest.raises(Abandoned), orders.generation():
            os.write(write, json.dumps(LEAVE).encode() + b"\n")
            time.sleep(30)
        os.write(write, json.dumps({"RANK": "3"}).encode() + b"\n")
        orders.next()
        assert os.environ["RANK"] == "3" and time.monotonic() < begin + 20
    finally:
        os.close(write)
        signal.signal(INTERRUPT, before)
