"""A rank's record, written by it and read from outside."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.pipeline.program import Action, Op
from shoal.training.resilience.heartbeat import (
    PERIOD,
    Heartbeat,
    HeartbeatRecord,
    Phase,
    describe_action,
    read,
    record_path,
)
from tests.trainings.runs import ROOT, wait_for


def test_what_is_written_is_read(tmp_path):
    path = record_path(tmp_path, 3)
    assert read(path) is None
    beat = Heartbeat(path)
    begun = read(path)
    assert (begun.pid, begun.phase, begun.begun, begun.action) == (os.getpid(), Phase.START, -1, None)
    assert begun.where == "starting"
    beat.begun(40)
    beat.phase(Phase.STEP)
    beat.begin(Action(Op.FORWARD, 1, 3, 2, 7))
    inside = read(path)
    assert inside.action == Action(Op.FORWARD, 1, 3, 2, 7) and (inside.begun, inside.steps) == (40, 40)
    assert inside.where == "in step 41, forward of micro-batch 3, slice 2, on stage 1"
    beat.end(inside.action)
    beat.stepped(41, 2.5)
    beat.phase(Phase.SAVE)
    after = read(path)
    assert (after.steps, after.seconds, after.action, after.where) == (41, 2.5, None, "saving after step 41")
    assert after.count > inside.count > begun.count and after.marked >= inside.marked


@pytest.mark.parametrize("op", Op)
def test_every_action_has_words_and_comes_back(op, tmp_path):
    beat = Heartbeat(tmp_path / "record")
    beat.begin(Action(op, 0, 1))
    assert read(tmp_path / "record").action == Action(op, 0, 1) and len(describe_action(Action(op))) > 3


def test_it_beats_while_the_main_thread_does_nothing(tmp_path):
    Heartbeat(tmp_path / "record")
    first = read(tmp_path / "record")
    time.sleep(4 * PERIOD)
    later = read(tmp_path / "record")
    assert later.alive > first.alive and later.count == first.count
    assert abs(later.alive - time.monotonic()) < 2  # a clock that other processes share


def test_a_record_that_is_half_there_is_none(tmp_path):
    (tmp_path / "record").write_bytes(b"\0" * 20)
    assert read(tmp_path / "record") is None


def test_the_last_word_outlives_the_process(tmp_path):
    program = f"""
import os, signal, sys
from pathlib import Path
from shoal.training.resilience.heartbeat import Heartbeat, Phase
from shoal.pipeline.program import Action, Op
beat = Heartbeat(Path({str(tmp_path / "record")!r}))
beat.begun(7); beat.phase(Phase.STEP); beat.begin(Action(Op.BACKWARD, 0, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -9
    assert read(Path(tmp_path / "record")).where == "in step 8, backward of micro-batch 1 on stage 0"


def test_without_a_supervisor_it_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Heartbeat().phase(Phase.STEP)
    wait_for(lambda: not list(tmp_path.iterdir()), 1)


def test_the_file_format_has_integers_before_times(tmp_path):
    """Records of earlier versions are read after an upgrade, when a requeued job looks for its previous attempt."""
    file = tmp_path / "beat"
    file.write_bytes(struct.pack("=10q3d", 7, 5, Phase.STEP, 2, 20, 0, 1, 2, 3, 4, 1.5, 2.5, 3.5))
    assert read(file) == HeartbeatRecord(7, 1.5, 2.5, 5, Phase.STEP, 2, 20, 3.5, 0, 1, 2, 3, 4)
