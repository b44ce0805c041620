"""A rank's record, written by it and read from outside."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

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
    beat.begun(0)
    assert read(path).where == "starting after step 0"
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


def test_all_that_a_rank_does_is_progress(tmp_path):
    """A watchdog ends a rank without any. A rank has joined the world once it does anything."""
    action = Action(Op.REDUCE, 0)
    beat = Heartbeat(tmp_path / "record")
    assert not (before := read(tmp_path / "record")).joined
    for method, arguments in (
        (beat.phase, (Phase.STEP,)), (beat.begun, (0,)), (beat.begin, (action,)), (beat.arrived, (action,)),
        (beat.end, (action,)), (beat.stepped, (1, 0.5)), (beat.phase, (Phase.SAVE,)),
    ):  # fmt: skip
        method(*arguments)
        after = read(tmp_path / "record")
        assert after.joined and after.count == before.count + 1 and after.marked > before.marked
        assert after.action == (action if method in (beat.begin, beat.arrived) else None)
        before = after


@given(op=st.sampled_from(Op), stage=st.integers(-1, 1), microbatch=st.integers(-1, 1), part=st.integers(-1, 1))
def test_every_action_has_words_and_comes_back(op, stage, microbatch, part):
    action = Action(op, stage, microbatch, part)
    with TemporaryDirectory() as folder:
        Heartbeat(Path(folder, "record")).begin(action)
        assert read(Path(folder, "record")).action == action
    words = describe_action(action)
    assert len(words.split(" of ")[0].split(" on ")[0]) > 3
    for word, number in (("micro-batch", microbatch), ("slice", part), ("stage", stage)):
        assert (word in words) == (number >= 0) == (f" {word} {number}" in words)


def test_it_beats_while_the_main_thread_does_nothing(tmp_path):
    Heartbeat(tmp_path / "record")
    first = read(tmp_path / "record")
    time.sleep(4 * PERIOD)
    later = read(tmp_path / "record")
    assert later.alive > first.alive and later.count == first.count
    assert abs(later.alive - time.monotonic()) < 2  # a clock that other processes share


def test_a_record_that_is_half_there_is_none(tmp_path):
    for size in (20, 200):  # of 200 bytes, all but the process's number may be there
        (tmp_path / "record").write_bytes(b"\0" * size)
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
