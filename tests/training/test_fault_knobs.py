"""Whose time is whose, where the host only launches what a device computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shoal.pipeline.program import Action, Op
from shoal.spec.config import build_config
from shoal.training import fault_knobs
from shoal.training.fault_knobs import FaultKnobs, TimedSteps
from shoal.training.records import timer

KERNELS = 0.02  # seconds that the device takes for what one action launches


class LateDevice:
    """A device that does what is launched in order, while the host, whose sleep alone takes time, goes on."""

    def __init__(self):
        self.host = self.done = 0.0
        self.waits = 0

    def launch(self, seconds: float) -> None:
        self.done = max(self.done, self.host) + seconds

    def sleep(self, seconds: float) -> None:
        self.host += seconds

    # as a `Stopwatch`

    def start(self) -> None:
        self.host = max(self.host, self.done)

    def mark(self) -> float:
        return max(self.done, self.host)

    def seconds(self, marks: list[float]) -> list[float]:
        if marks and max(marks) > self.host:
            self.host = max(marks)
            self.waits += 1
        return marks


def engine_on(device: LateDevice) -> SimpleNamespace:
    """Two computations, then what is no computation and takes three times as long."""
    actions = [Action(Op.FORWARD, 0, 0), Action(Op.BACKWARD, 0, 0), Action(Op.REDUCE, 0, 0)]
    runtime = SimpleNamespace(actions=actions, recorders=[])

    def step(number: int, *, stop: bool, dry: bool) -> None:
        for action in actions:
            for recorder in runtime.recorders:
                recorder.begin(action)
            device.launch(3 * KERNELS if action.op is Op.REDUCE else KERNELS)
            for recorder in runtime.recorders:
                recorder.end(action)

    return SimpleNamespace(mesh=SimpleNamespace(rank=0, device=torch.device("cpu")), runtime=runtime, step=step)


@pytest.fixture
def device(monkeypatch):
    device = LateDevice()
    monkeypatch.setattr(timer, "Stopwatch", lambda _: device)
    monkeypatch.setattr(fault_knobs, "time", device)
    return device


@pytest.mark.parametrize(("factor", "pace", "slept"), [(1.0, 0.0, 0.0), (3.0, 0.0, 4 * KERNELS), (2.0, 1.0, 1.96)])
def test_the_time_of_an_action_is_that_of_the_device(device, factor, pace, slept):
    engine = engine_on(device)
    timed = TimedSteps(engine, FaultKnobs({0: factor}, {}, pace))
    for number in range(3):
        engine.step(number)
    assert timed.times.steps == 3
    assert timed.times.computing == pytest.approx(3 * (2 * KERNELS + slept))
    assert timed.times.waiting == pytest.approx(3 * 3 * KERNELS)
    # A host that waits inside a step for what a neighbour has yet to send may keep from it what it waits for.
    assert device.waits == 3 * (1 + (slept > 0))


def test_who_takes_only_some_steps_dies_before_the_first_from_there_on(device, monkeypatch):
    killed = []
    monkeypatch.setattr(fault_knobs.os, "kill", lambda process, signal: killed.append(signal))
    testing = build_config({"testing": {"kill": "0@4,1@9"}}).testing
    first = FaultKnobs.read(testing, 2)
    engine = engine_on(device)
    TimedSteps(engine, first)
    for number in (0, 3, 6):  # another took 4
        assert not killed
        engine.step(number)
    assert len(killed) == 1
    assert FaultKnobs.read(testing, 2, begin=6).deaths == {1: 9}  # the other is over
    assert FaultKnobs.read(testing, 2, restarted=True).deaths == {}
