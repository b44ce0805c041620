"""What happened to a run, as its report tells it."""

import re
import tomllib
from html import unescape

import pytest

from shoal.cli.main import main
from shoal.launch.watch.recordings import keep_recordings
from shoal.report.run import effective_facts, event_table
from shoal.spec.config import build_config, save_config
from shoal.training.resilience.events import describe_recordings, read_events, write_event
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
METRICS = (
    '{"step": 1, "steps": 2, "loss": 1.0, "learning_rate": 0.1, "tokens_per_second": 1.0, '
    '"tokens_per_second_per_rank": 1.0, "memory_bytes": 1, "seconds_left": 1.0}\n'
)


def test_all_starts_of_a_run_are_counted():
    assert effective_facts(EVENTS) == [
        ("effective training time", "60.0 %"), ("failures", "1"), ("repeated steps", "2"),
        ("seconds to recover (mean)", "4.2"),
    ]
    assert effective_facts(EVENTS[-1:]) == [("effective training time", "80.0 %")]
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


def test_a_list_of_numbers_is_short():
    assert event_table([{"time": 1e9, "event": "slowest", "ranks": [0.1 + 0.2, 1]}])[1][-1] == "ranks 0.3, 1"


def test_recordings_of_a_failure_are_kept_named_and_linked(corpus, tmp_path):
    """The profile of the next attempt replaces its own files alone, and each failure has its own folder."""
    save_config(small_config(corpus), tmp_path / "run.toml")
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    assert keep_recordings(tmp_path) == ()
    profile, logs = tmp_path / "profile", tmp_path / "logs"
    for folder in (profile, logs):
        folder.mkdir()
    for name in ("rank-00000.jsonl", "trace-rank-00000.json.gz", "trace-rank-00001.json.gz"):
        (profile / name).write_text("first")
    (logs / "collectives-1.json").write_text("{}")
    kept = keep_recordings(tmp_path)
    assert kept == (
        "logs/failure-1/rank-00000.jsonl", "logs/failure-1/trace-rank-00000.json.gz",
        "logs/failure-1/trace-rank-00001.json.gz", "logs/failure-1/collectives-1.json",
    )
    (profile / "trace-rank-00000.json.gz").unlink()
    (profile / "trace-rank-00000.json.gz").write_text("second")
    assert (tmp_path / kept[1]).read_text() == "first" and not (logs / "collectives-1.json").exists()
    assert keep_recordings(tmp_path) == ("logs/failure-2/trace-rank-00000.json.gz",)  # the others are kept already
    assert keep_recordings(tmp_path) == ()
    (profile / "rank-00001.jsonl.7.partial").symlink_to("gone")  # a file that vanishes takes no other with it
    (profile / "rank-00001.jsonl").write_text("new")
    (profile / "rank-00002.jsonl").symlink_to("gone")
    (profile / "rank-00003.jsonl").write_text("new")
    for number in (1, 3):
        (tmp_path / f"backup-{number}").hardlink_to(profile / f"rank-0000{number}.jsonl")  # nothing kept by shoal
    assert keep_recordings(tmp_path) == ("logs/failure-3/rank-00001.jsonl", "logs/failure-3/rank-00003.jsonl")
    said = describe_recordings(tmp_path, [*kept, "logs/failure-1/nccl-1"], 1)
    assert said.startswith(f"recorded before: {tmp_path / kept[2]}, {tmp_path / kept[3]}, ")
    assert said.endswith(", 5 in all")
    write_event(tmp_path, "failure", rank=1, recordings=[*kept, "logs/gone", "logs/../run.toml", "/etc/hostname"])
    assert event_table(read_events(tmp_path))[1][-1] == "recorded before: logs/failure-1, 7 files"
    for path in profile.glob("rank-*"):
        path.unlink()  # which are no profiles
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "pages.html")]) == 0
    links = re.findall(r'<li><a href="([^"]+)"', (tmp_path / "pages.html").read_text())
    assert links == [*kept]
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"time": 1, "event": "failure", "recordings": [1]}\n')
    assert len(read_events(tmp_path)) == 1  # the damaged one is left out


@pytest.mark.parametrize("some", [True, False])
def test_the_report_of_a_run_tells_them(some, corpus, tmp_path, capfd):
    save_config(small_config(corpus), tmp_path / "run.toml")
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    for event in EVENTS if some else []:
        values = {name: value for name, value in event.items() if name not in ("time", "event")}
        write_event(tmp_path, event["event"], **values)
    assert main(["report", str(tmp_path)]) == 0
    said, page = capfd.readouterr().out, (tmp_path / "report.html").read_text()
    for text in (said, page):
        assert ("effective training time" in text) is some
        assert ("SIGKILL" in text) is some and ("rolled_back" in text) is some
    (changed,) = re.findall("Config, where it is not the default</h2><pre>(.*?)</pre>", page, re.DOTALL)
    assert build_config(tomllib.loads(unescape(changed))) == small_config(corpus)


def test_a_report_names_the_newest_layout_and_medians_of_the_same_steps(corpus, tmp_path, capfd):
    save_config(small_config(corpus), tmp_path / "run.toml")
    lines = [METRICS.replace('"tokens_per_second": 1.0', f'"tokens_per_second": {10 * mfu}, "mfu": {mfu / 100}')
             for mfu in (9, 40, 30, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    for layout in ("dp 2 (DDP)", "dp 4 (ZeRO-1)"):
        write_event(tmp_path, "resumed", step=1, layout=layout)
    for words in (["report", f"{tmp_path}"], ["watch", f"{tmp_path}", "--out", f"{tmp_path / 'report.html'}"]):
        assert main(words) == 0
        assert "dp 4 (ZeRO-1)" in (page := (tmp_path / "report.html").read_text()).partition("<h2>Events")[0]
        assert "<b>30.0 %</b>" in page and "<b>300</b>" in page
        (tmp_path / "report.html").unlink()
    assert "dp 4 (ZeRO-1)" in capfd.readouterr().out.splitlines()[0]
