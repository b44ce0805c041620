"""Which of several ranks' ends is the cause, and what is said of it."""

import signal

import pytest

from shoal.launch.watch.rank_failure import Failure

KILLED = Failure(0, -signal.SIGKILL, when=3.0)
STUCK = Failure(1, -signal.SIGKILL, when=4.0, report="File a.py", trouble="is stuck")
LEFT = Failure(2, 0, when=5.0)
RAISED = Failure(3, 1, when=1.0, report="Traceback: a peer was lost")
ABORTED = Failure(4, -signal.SIGABRT, when=2.0)


@pytest.mark.parametrize(("failure", "sure", "words"), [
    (KILLED, True, "was killed by SIGKILL\n"),
    (STUCK, True, "is stuck\nFile a.py"),
    (LEFT, True, "exited with code 0, though it was not done\n"),
    (RAISED, False, "Traceback: a peer was lost"),  # which may be due to another's end
    (ABORTED, False, "was killed by SIGABRT\n"),
])
def test_what_is_said_of_an_end(failure, sure, words):
    assert (failure.sure, failure.describe()) == (sure, words)


def test_the_cause_is_the_first_that_is_no_consequence_of_another():
    found = sorted([ABORTED, LEFT, RAISED, STUCK, KILLED], key=lambda failure: failure.order)
    assert found == [KILLED, STUCK, LEFT, RAISED, ABORTED]
