"""`shoal report` on real runs: the page and the terminal say what the files say."""

import json
import re
from statistics import mean

import pytest

from shoal.cli.main import main
from shoal.training.records.metrics import read_metrics
from tests.report.test_page import Tags, data, unpacked
from tests.trainings.runs import small_config, train_in


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "text"
    folder.mkdir()
    documents = [" ".join(f"{n} and {n * number % 97}," for n in range(200)) for number in range(200)]
    (folder / "numbers.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return folder


@pytest.fixture(scope="module")
def run(corpus, pool, tmp_path_factory):
    """Three recorded steps of dp 2 x pp 2, on four ranks."""
    config = small_config(
        corpus, {"pp": 2, "dp": 2, "schedule": "zb-h1"},
        train={"steps": 6, "validate_every": 3}, metrics={"profile": True, "profile_after": 2, "profile_steps": 3},
    )
    return train_in(pool, config, tmp_path_factory.mktemp("report") / "run")


def said(folder, capsys, *words) -> str:
    assert main(["report", str(folder), *map(str, words)]) == 0
    return capsys.readouterr().out


def test_every_number_is_that_of_the_files(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    text = said(run, capsys)
    html = Tags((run / "report.html").read_text())
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in (run / "profile").iterdir()]
    computing = [i for i, action in enumerate(ranks[0][0]["actions"]) if action[0] in "FBIWRSG"]
    assert len(ranks) == 4 and computing
    steps = []
    for number in range(3):
        lines = [(header, lines[number]) for header, *lines in ranks]
        assert {line["step"] for _, line in lines} == {2 + number}
        first = min(
            line["arrived"][next(i for i, action in enumerate(header["actions"]) if action[0] == "F")]
            for header, line in lines
        )
        steps.append(max(max(line["end"]) for _, line in lines) - first)
    stated = re.search(r"measured step \(mean of 3\) +([\d.]+) ms", text)
    assert float(stated[1]) == pytest.approx(1e3 * mean(steps), rel=0.01)
    predicted = float(re.search(r"simulated step +([\d.]+) ms", text)[1])
    difference = float(re.search(r"\bdifference +([+-][\d.]+) %", text)[1])
    assert difference == pytest.approx(100 * (predicted / (1e3 * mean(steps)) - 1), abs=1.5)
    last = read_metrics(run)[-1]
    assert len(last.memory_by_rank) == 4 and max(last.memory_by_rank) == last.memory_bytes > 0
    for found in (text, html.text):
        assert f"{last.loss:.4f}" in found and f"{last.validation_loss:.4f}" in found and "6 of 6" in found
        assert stated[1] in found and f"{difference:+.1f} %" in found


def test_the_measured_timeline_lies_under_the_simulated_one_of_the_same_actions(run, capsys):
    said(run, capsys)
    simulated, measured = data((run / "report.html").read_text())["timelines"]
    for field in ("op", "stage", "microbatch", "offset"):
        assert simulated["columns"][field] == measured["columns"][field]
    assert simulated["name"].startswith("simulated") and measured["name"].startswith("measured")
    assert unpacked(measured["columns"]["length"]).min() >= 0


@pytest.mark.parametrize("name", ["step.svg", "step.png", "step.json", "step.json.gz", "page.html"])
def test_timelines_are_written_as_every_kind_of_file(run, tmp_path, capsys, name):
    assert f"written: {tmp_path / name}" in said(run, capsys, "--out", tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


def test_a_run_without_a_profile_says_how_to_get_one(corpus, pool, tmp_path, capsys):
    config = small_config(corpus, train={"steps": 2, "validate_every": 0})
    folder = train_in(pool, config, tmp_path / "run")
    assert "--profile" in said(folder, capsys)
    page = Tags((folder / "report.html").read_text())
    assert "--profile" in page.text and "2 of 2" in page.text and "canvas" not in [tag for tag, _ in page.tags]
    assert main(["report", str(folder), "--out", str(tmp_path / "x.svg")]) == 2
    assert "--profile" in capsys.readouterr().err


def test_what_cannot_be_is_refused(run, tmp_path, capsys):
    for words, why in (
        ([tmp_path], "is not a run folder"),
        ([run, "--out", tmp_path / "x.gif"], "give a file ending in .html or"),
        ([run, "--out", tmp_path / "no" / "x.html"], "there is no folder"),
    ):
        assert main(["report", *map(str, words)]) == 2
        assert why in capsys.readouterr().err
