"""What happened to a run, as its report tells it."""

import pytest

from shoal.cli.main import main
from shoal.report.run import effective_facts, event_table
from shoal.spec.config import save_config
from shoal.training.resilience.events import write_event
from tests.trainings.runs import small_config

EVENTS = [
    {"time": 1e9, "event": "failure", "rank": 1, "host": "h", "how": "was killed by SIGKILL", "where": "in step 7",
     "step": 6, "report": "a long stack"},
    {"time": 1e9 + 1, "event": "restart", "attempt": 1},
    {"time": 1e9 + 4, "event": "recovered", "attempt": 1, "step": 4, "lost": 2, "seconds": 4.25},
    {"time": 1e9 + 9, "event": "rolled_back", "step": 8, "spike": 3.5},
    {"time": 1e9 + 9, "event": "end", "code": 75, "seconds": 10.0, "counted": 4.0, "failures": 1, "lost": 2},
    {"time": 1e9 + 30, "event": "end", "code": 0, "seconds": 10.0, "counted": 8.0, "failures": 0, "lost": 0},
]


def test_all_starts_of_a_run_are_counted():
    assert effective_facts(EVENTS) == [
        ("effective training time", "60.0%"), ("failures", "1"), ("repeated steps", "2"),
        ("seconds to recover (mean)", "4.2"),
    ]
    assert effective_facts(EVENTS[-1:]) == [("effective training time", "80.0%")]
    assert effective_facts([]) == []


def test_each_event_is_a_row_that_says_all_but_the_stack():
    heads, *rows = event_table(EVENTS)
    assert all(len(row) == len(heads) for row in rows)
    assert [row[1:] for row in rows] == [
        ["failure", "1", "6", "host h, was killed by SIGKILL, in step 7"],
        ["recovered", "–", "4", "attempt 1, lost 2, seconds 4.25"],
        ["rolled_back", "–", "8", "spike 3.5"],
    ]
    resumed = [{"time": 1e9, "event": "resumed", "changed": changed} for changed in ({}, {"train.steps": 4})]
    assert [row[-1] for row in event_table(resumed)[1:]] == ["", "changed train.steps = 4"]


@pytest.mark.parametrize("some", [True, False])
def test_the_report_of_a_run_tells_them(some, corpus, tmp_path, capfd):
    save_config(small_config(corpus), tmp_path / "run.toml")
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "steps": 2, "loss": 1.0, "learning_rate": 0.1, "tokens_per_second": 1.0, '
        '"tokens_per_second_per_rank": 1.0, "memory_bytes": 1, "seconds_left": 1.0}\n'
    )
    for event in EVENTS if some else []:
        values = {name: value for name, value in event.items() if name not in ("time", "event")}
        write_event(tmp_path, event["event"], **values)
    assert main(["report", str(tmp_path)]) == 0
    said, page = capfd.readouterr().out, (tmp_path / "report.html").read_text()
    for text in (said, page):
        assert ("effective training time" in text) is some
        assert ("SIGKILL" in text) is some and ("rolled_back" in text) is some
