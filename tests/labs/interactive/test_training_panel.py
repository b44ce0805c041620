"""The training panel: a run on real ranks that is watched, loses a rank, recovers and is verified."""

import os
import time
from pathlib import Path
from typing import IO

import pytest

from shoal.base.errors import UsageError
from shoal.labs.interactive import training
from shoal.labs.interactive.panels import call_panel
from tests.trainings.forked import Command, command
from tests.trainings.runs import ROOT

SECONDS = 120.0


@pytest.fixture(autouse=True)
def no_run_is_left():
    yield
    training.end_runs()


@pytest.fixture
def forks(monkeypatch):
    """Commands of the lab that are forks (`tests.trainings.forked`)."""

    def start(words: list[str], stdout: IO[bytes], **_: object) -> Command:
        child = command(words[4:], os.environ, ROOT)
        Path(stdout.name).unlink()
        Path(stdout.name).symlink_to(child.log)
        return child

    monkeypatch.setattr(training, "Popen", start)


def look(until, seconds: float = SECONDS) -> dict:
    """Look at the run until a condition holds."""
    ends = time.monotonic() + seconds
    while not until(seen := call_panel("training-look", {})):
        assert time.monotonic() < ends and seen["status"] != "failed", seen
        time.sleep(0.1)
    return seen


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"dp": 1}, "1 ranks; the lab starts 2 to 4"),
        ({"dp": 4, "pp": 2}, "8 ranks; the lab starts 2 to 4"),
        ({"dp": 5}, "less than or equal to 4"),
        ({"dp": 1, "tp": 3}, "tp"),
        ({"data": "x"}, "there is no key 'data'"),
    ],
)
def test_an_impossible_run_is_refused_before_it_starts(request_, said):
    with pytest.raises(UsageError, match=said):
        call_panel("training-start", request_)
    assert call_panel("training-look", {}) == {"status": "none"}


def test_without_a_run_there_is_nothing_to_kill_verify_or_show():
    for call in ("training-kill", "training-verify", "training-profile"):
        with pytest.raises(UsageError, match="no "):
            call_panel(call, {})
    assert call_panel("training-stop", {}) == {"status": "none"}


def test_a_run_is_started_killed_recovered_and_verified_from_the_page(panel, forks):
    page = panel("training?steps=1000", ".tile b")
    page.set_default_timeout(1000 * SECONDS)
    page.get_by_role("button", name="Start").click()
    page.get_by_role("button", name="Kill rank 1").wait_for()
    look(lambda seen: seen["profiled"] and len(seen["steps"]) > 10)
    folder = Path(call_panel("training-look", {})["folder"])
    assert folder.is_dir() and str(folder) in page.locator("pre").first.inner_text()
    with pytest.raises(UsageError, match="a run is active in"):
        call_panel("training-start", {})
    page.get_by_role("button", name="Kill rank 1").click()
    seen = look(lambda seen: any(event["event"] == "recovered" for event in seen["events"]))
    failure = next(event for event in seen["events"] if event["event"] == "failure")
    assert failure["rank"] == 1
    page.wait_for_selector("td:text-is('recovered')")
    before = len(seen["steps"])
    seen = look(lambda seen: len(seen["steps"]) > before)
    assert [step for step, *_ in seen["steps"]] == list(range(1, 1 + len(seen["steps"])))
    assert seen["steps"][-1][1] < seen["steps"][0][1]  # it learns
    page.get_by_role("button", name="Stop").click()
    assert look(lambda seen: seen["status"] != "running")["status"] == "finished"
    page.wait_for_selector("b:text-is('stopped')")  # by the button, before its last step
    assert "tokens/s" in (shown := page.locator(".panel").inner_text()) and "[" not in shown.partition("details")[2]
    page.get_by_role("button", name="Verify").click()
    page.wait_for_selector(".result.good")
    found = call_panel("training-look", {})["verification"]
    assert found["same"] and found["layouts"] == 1 and found["worst_gradient"] < 1e-9
    page.wait_for_selector("text=A recorded step")
    profile = call_panel("training-profile", {})
    assert [rank["place"] for rank in profile["ranks"]] == 2 * [{"pp": 0, "tp": 0}]
    for rank in profile["ranks"]:
        assert len(rank["buckets"]) > 1 and {bucket["shards"] for bucket in rank["buckets"]} == {2}
        assert {number for number, _, _ in rank["reductions"]} == set(range(len(rank["buckets"])))
        assert all(0 <= start <= end <= profile["seconds"] for _, start, end in rank["reductions"])
        last_backward = max(end for _, op, _, end in rank["actions"] if op == "B")
        assert min(start for _, start, _ in rank["reductions"]) < last_backward  # reduced during backward
    training.end_runs()
    assert not folder.exists()


def test_a_command_of_the_lab_ends_with_it(tmp_path):
    program, output = tmp_path / "lab.py", tmp_path / "output.txt"
    program.write_text(
        "import time; from pathlib import Path; from shoal.labs.interactive.training import LabProcess\n"
        f"lab = LabProcess(['lab', '--no-browser'], Path({str(output)!r}))\n"
        "print(lab._process.pid, flush=True); time.sleep(1000)"
    )
    parent = command([], os.environ, tmp_path, script=str(program))
    ends = time.monotonic() + SECONDS
    while "http://127.0.0.1" not in (output.read_text() if output.exists() else "") and time.monotonic() < ends:
        time.sleep(0.1)
    child = Path("/proc") / parent.log.read_text().strip()
    assert child.exists()
    parent.kill()
    while child.exists() and time.monotonic() < ends:
        time.sleep(0.05)
    assert not child.exists() or "Z" in (child / "stat").read_text().split()[2]
