"""What ended an attempt is named by the next one, from what its ranks left behind; and bad input is not tried again."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.base.errors import UsageError
from shoal.launch.rank_env import RankEnv, record_end
from shoal.launch.torch_elastic import refuse_again
from shoal.launch.watch import peer_watch
from shoal.launch.watch.peer_watch import LastState, find_cause, read_previous_attempt
from shoal.pipeline.program import Action, Op
from shoal.training.resilience import heartbeat
from shoal.training.resilience.heartbeat import Heartbeat, Phase

MEMBER = RankEnv(0, 2, 0, 2, "torchrun", ("localhost", 4321))
LEFT = LastState("4321 2", 2, 0, "a", 10.0, "in step 5", 4, done=False, report="", usage=False, reported=False)
RAISED = replace(LEFT, report="Traceback")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Of the attempt before, with a rank that was in its fifth step."""
    monkeypatch.setattr(peer_watch.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(heartbeat.threading.Thread, "start", lambda thread: None)  # no more signs of life
    made = peer_watch.make_shared_folder(MEMBER)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # of the attempt now
    rank = Heartbeat(heartbeat.record_path(made, 1))
    rank.begun(4)
    rank.phase(Phase.STEP)
    rank.begin(Action(Op.BACKWARD, 0, 0))
    return made


def test_what_a_rank_left_behind_is_read(folder):
    [last] = read_previous_attempt(MEMBER)
    assert (last.rank, last.world_size, last.step, last.done, last.report, last.reported) == (1, 2, 4, False, "", False)
    assert last.where.startswith("in step 5, backward")
    record_end(folder, 1, ArithmeticError("the cause"))
    assert "ArithmeticError: the cause" in read_previous_attempt(MEMBER)[0].report
    peer_watch.ended_path(folder, 1).touch()
    assert read_previous_attempt(MEMBER)[0].reported


def test_what_a_faster_rank_of_this_attempt_has_made_is_not_of_the_one_before(folder):
    peer_watch.round_folder(MEMBER).mkdir(mode=0o700)
    assert [last.rank for last in read_previous_attempt(MEMBER)] == [1]


def test_what_an_agent_of_the_same_number_left_long_ago_is_not(folder):
    os.utime(folder, (1, 1))
    assert read_previous_attempt(MEMBER) == []


@pytest.mark.parametrize(("every", "rank", "how"), [
    ([LEFT, replace(RAISED, rank=1, ended=9.0)], 0, "exited without a traceback"),
    ([replace(RAISED, ended=11.0), replace(RAISED, rank=1)], 1, "raised an exception"),
    ([replace(LEFT, ended=11.0), replace(LEFT, rank=1)], 1, "exited without a traceback"),
    ([replace(RAISED, rank=1)], 0, "left no record"),
    ([replace(LEFT, attempt="1 2", ended=1.0), RAISED, replace(RAISED, rank=1, ended=9.0)], 1, "raised"),
])
def test_the_cause_is_named(every, rank, how):
    found = find_cause(every)
    assert found["rank"] == rank and found["how"].startswith(how)


@pytest.mark.parametrize("every", [
    [], [replace(LEFT, done=True)], [replace(LEFT, reported=True), replace(RAISED, rank=1)],
])
def test_nothing_is_said_twice_nor_of_who_was_done(every):
    assert find_cause(every) is None


def test_bad_input_is_not_tried_again(folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    record_end(folder, 1, ArithmeticError("the cause"))
    refuse_again(MEMBER)
    record_end(folder, 1, UsageError("token id 999"))
    with pytest.raises(UsageError, match="token id 999"):
        refuse_again(MEMBER)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # another run of the command, mended
    refuse_again(MEMBER)
