"""The page of runs, live and still, in a real browser: what it shows is what the files say, whatever they say."""

import json
import math
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.report.curves import MOST_POINTS, describe_curves
from shoal.report.run import open_run, read_run
from shoal.report.server import PageServer
from shoal.report.watch import WatchedRuns, build_page, watch
from shoal.spec.config import RunConfig, save_config
from shoal.training.records.metrics import StepMetrics
from tests.report.test_page import Tags
from tests.trainings.runs import wait_for

EVENTS = [
    {"time": 1.7e9, "event": "failure", "rank": 1, "how": "was killed by SIGKILL", "step": 30},
    {"time": 1.7e9 + 2, "event": "recovered", "step": 28, "seconds": 4.25, "lost": 2},
    {"time": 1.7e9 + 60, "event": "spike", "step": 55, "what": "loss", "value": 9.0},
    {"time": 1.7e9 + 90, "event": "resumed", "step": 70, "ranks": 4, "layout": "dp 4 (DDP)",
     "changed": {"parallel.dp": 4}},
]


def record(step: int, scale: float = 1.0, **more: object) -> dict[str, object]:
    noise = math.sin(step * 12.9898) * 0.15
    return {
        "step": step, "steps": 100, "loss": scale * (2 + 8 / math.sqrt(step) + noise), "learning_rate": 1e-3,
        "tokens_per_second": 1e5 * scale + 900 * noise, "tokens_per_second_per_rank": 5e4, "memory_bytes": int(3e9),
        "memory_by_rank": [int(2e9), int(3e9)], "seconds_left": 9.0, "gradient_norm": 1 + noise, "mfu": 0.41, **more,
    }


def write_run(folder: Path, records: list, events: list = EVENTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_config(RunConfig.model_validate({"parallel": {"dp": 2}}), folder / "run.toml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    one = [record(step, validation_loss=2.9) if step % 25 == 0 else record(step) for step in range(1, 81)]
    return [
        write_run(tmp_path / "one", one),
        write_run(tmp_path / "two", [record(step, 1.2) for step in range(1, 61)], []),
    ]


def figure(page, title: str):
    return page.locator("figure.curve", has_text=title)


# ---- the data --------------------------------------------------------------------------------------------------------


def test_the_curves_are_the_metrics(runs):
    found = read_run(runs[0], open_run(runs[0]))
    shown = describe_curves("one", found.metrics, found.events)
    figures = {each["key"]: each for each in shown["figures"]}
    assert figures["loss"]["line"] == [[m.step, m.loss] for m in found.metrics]
    assert figures["loss"]["dots"] == [[25, 2.9], [50, 2.9], [75, 2.9]]
    assert figures["mfu"]["line"][0] == [1, pytest.approx(41)]
    assert figures["memory_by_rank"]["ranks"] == [[0, 2.0], [1, 3.0]]
    assert [(mark["step"], mark["kind"]) for mark in shown["marks"]] == [(28, "restart"), (55, "spike"), (70, "layout")]
    assert "dp 4 (DDP)" in shown["marks"][-1]["text"]


def test_a_layout_is_marked_where_it_changes_and_not_again():
    """Under torchrun each round records its layout, and no round records that it changed."""
    events = [{"event": "resumed", "step": step, "ranks": ranks, "layout": layout}
              for step, ranks, layout in ((10, 2, "tp 2"), (20, 2, "tp 2"), (30, 4, "dp 2 (DDP) x tp 2"))]
    marks = describe_curves("one", [], events, layout="dp 2 (DDP) x tp 2")["marks"]
    assert [mark["kind"] for mark in marks] == ["layout", "restart", "layout"]


def test_long_lines_keep_their_extremes_and_what_no_axis_shows_is_left_out():
    def metrics(losses: list[float]) -> list[StepMetrics]:
        return [StepMetrics(step, 10**6, loss, 1e-3, 1.0, 1.0, 1, 1.0) for step, loss in enumerate(losses, 1)]

    losses = [1.0] * 30_000
    losses[12_345], losses[777] = 9.0, 0.5
    [loss, *_] = describe_curves("run", metrics(losses), [])["figures"]
    assert len(loss["line"]) <= MOST_POINTS + 1 and [12_346, 9.0] in loss["line"] and [778, 0.5] in loss["line"]
    assert loss["line"][0][0] == 1 and loss["line"][-1][0] == 30_000
    shown = describe_curves("run", metrics([1.0, math.nan, math.inf, 2.0]), [])
    assert shown["figures"][0]["line"] == [[1, 1.0], [4, 2.0]]
    assert [(mark["step"], mark["kind"]) for mark in shown["marks"]] == [(2, "spike")]
    json.dumps(shown, allow_nan=False)
    own = {each["title"]: each["key"] for each in describe_curves("own", metrics([1.0]), [], "sample")["figures"]}
    assert [*own][:2] == ["loss (dots: validation)", "samples per second"]
    shared = {each["title"]: each["key"] for each in shown["figures"]}
    assert set(own.values()).intersection(shared.values()) == {own[title] for title in own.keys() & shared.keys()}


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture
def still(runs, tmp_path, saved):
    """The page of both runs as a file, opened without a network."""
    assert watch(runs, out=tmp_path / "page.html") == tmp_path / "page.html"
    return saved((tmp_path / "page.html").read_text(), "figure.curve svg path")


def test_a_value_is_read_at_the_pointer_and_by_the_keys(still):
    loss = figure(still, "loss per token")
    svg = loss.locator("svg")
    box = svg.bounding_box()
    svg.hover(position={"x": 54, "y": 100})
    words = loss.locator(".reading").inner_text()
    assert words.startswith("step 1: one 10.06, two 12.07")
    assert figure(still, "tokens per second").locator(".reading").inner_text().startswith("step 1: one ")
    assert figure(still, "peak memory by rank").locator(".reading").inner_text() == ""
    svg.focus()
    still.keyboard.press("ArrowRight")
    assert loss.locator(".reading").inner_text().startswith("step 2: ")
    svg.hover(position={"x": box["width"] - 12, "y": 100})
    assert loss.locator(".reading").inner_text().startswith("step 80: one 2.")


def test_axes_smoothing_and_runs_can_be_chosen(still):
    def path(kind: str = "path") -> str:
        return figure(still, "loss per token").locator(kind).first.get_attribute("d")

    linear = path()
    still.check("#log-values")
    logarithmic = path()
    still.check("#log-steps")
    assert len({linear, logarithmic, path()}) == 3
    assert figure(still, "loss per token").locator("path.smoothed").count() == 0
    still.locator("#smoothing").fill("0.9")
    assert figure(still, "loss per token").locator("path.smoothed").count() == 2
    still.locator("#curve-runs input").first.uncheck()
    assert figure(still, "loss per token").locator("path.smoothed").count() == 1
    svg = figure(still, "loss per token").locator("svg")
    svg.hover(position={"x": svg.bounding_box()["width"] - 12, "y": 100})
    assert figure(still, "loss per token").locator(".reading").inner_text().startswith("step 60, smoothed (value): ")


def test_what_happened_is_marked_and_listed(still):
    marks = figure(still, "loss per token").locator("g.mark")
    assert [each.locator("title").text_content() for each in marks.all()] == [
        "one: recovered at step 28", "one: spike at step 55",
        "one: resumed at step 70, layout changed to dp 4 (DDP)",
    ]
    assert "was killed by SIGKILL" in still.locator("#events").inner_text()
    facts = still.locator("#facts").inner_text()
    assert "80 of 100" in facts and "60 of 100" in facts and "41.0 %" in facts


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(still, scheme):
    still.emulate_media(color_scheme=scheme)
    still.set_viewport_size({"width": 390, "height": 800})
    svg = figure(still, "loss per token").locator("svg")
    wait_for(lambda: 300 < int(svg.get_attribute("width")) < 390, 10)
    assert still.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_live_page_follows_the_run(runs, page):
    watched = WatchedRuns(runs[:1])
    with PageServer(build_page(watched)) as server:
        page.goto(server.url)
        page.wait_for_selector("figure.curve svg path")
        assert "80 of 100" in page.locator("#facts").inner_text()
        with open(runs[0] / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record(81)) + "\n")
        page.wait_for_selector("#facts:has-text('81 of 100')")
        svg = figure(page, "loss per token").locator("svg")
        svg.hover(position={"x": svg.bounding_box()["width"] - 12, "y": 100})
        assert figure(page, "loss per token").locator(".reading").inner_text().startswith("step 81: ")
        assert page.locator("#live").inner_text().startswith("updated ")


def test_a_run_that_has_logged_nothing_is_shown_when_it_has(tmp_path, page):
    folder = write_run(tmp_path / "new", [], [])
    with PageServer(build_page(WatchedRuns([folder]))) as server:
        page.goto(server.url)
        page.wait_for_selector("#curves:has-text('Nothing has been logged yet.')")
        assert "nothing has been logged yet" in page.locator("#facts").inner_text()
        write_run(folder, [record(1)], [])
        page.wait_for_selector("figure.curve svg circle")


def test_a_hostile_run_folder_breaks_nothing(tmp_path, page):
    """Markup in every text, damaged lines, numbers beyond any axis, and steps that are none."""
    evil = "</script><img src=x onerror=document.title='broken'>\u202e\x1b[31m"
    folder = tmp_path / "<img src=x onerror=document.title='broken'>"
    events = [
        {"time": 1, "event": evil, "how": evil, "rank": evil, "step": evil},
        {"time": 1, "event": "resumed", "step": [1], "changed": evil}, {"time": 1, "event": "spike", "step": -5},
        {"time": 1, "event": "resumed", "step": 2, "layout": evil, "changed": {"parallel.dp": evil}, "ranks": evil},
        {"time": 1, "event": "spike", "step": 10**15},
    ]
    records = [record(1, source_loss={evil: 2.0, "__proto__": 1.0}), record(2, loss=-1e29), record(3, loss=1e29)]
    write_run(folder, records, events)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": NaN}\nnot json\n' + "[" * 10_000 + "\n")
        file.write(json.dumps(record(4, loss=None)) + "\n")
    html = WatchedRuns([folder]).html(live=False)
    assert "img" not in [tag for tag, _ in Tags(html).tags] and "\u202e" not in html and "\x1b" not in html
    with PageServer(build_page(WatchedRuns([folder, folder]))) as server:
        page.goto(server.url)
        page.wait_for_selector("figure.curve svg path")
        page.check("#log-values")
        page.locator("#smoothing").fill("0.5")
        for each in page.locator("figure.curve svg").all():
            each.hover()
        page.wait_for_selector("#live:has-text('updated')")
        assert page.locator("img").count() == 0 and "broken" not in page.title().replace("title='broken'", "")


def test_only_the_named_folders_are_read(runs, tmp_path):
    with PageServer(build_page(WatchedRuns(runs[:1]))) as server:
        for path in ("../two/metrics.jsonl", "metrics.jsonl", "%2e%2e/two"):
            with pytest.raises(OSError, match=r"404|401"):
                urlopen(server.url + path)
        answer = urlopen(Request(f"{server.url}api/runs", b'{"runs": ["/etc"]}')).read().decode()
    assert [run["name"] for run in json.loads(answer)["runs"]] == ["one"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_or_refuses(runs, tmp_path, capsys):
    out = tmp_path / "both.html"
    assert main(["watch", *map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written: {out}\n" and "fetch" in out.read_text()
    for words, why in (
        ([], "name at least one run folder"),
        ([tmp_path], "is not a run folder"),
        ([runs[0], "--out", tmp_path / "x.gif"], "give a file ending in .html"),
        ([runs[0], "--out", out, "--port", "80"], "--out writes a file and serves nothing"),
        ([runs[0], "--port", "99999"], "port"),
    ):
        assert main(["watch", *map(str, words)]) == 2
        assert why in capsys.readouterr().err


def test_the_command_serves_until_it_is_stopped(runs, monkeypatch):
    servers = []
    monkeypatch.setattr(PageServer, "run", lambda self, *, browser: servers.append((self, browser)))
    assert main(["watch", str(runs[0]), "--no-browser"]) == 0
    [(server, browser)] = servers
    assert not browser
    server.socket.close()


def test_a_folder_that_disappears_is_an_error_on_the_page(runs):
    watched = WatchedRuns(runs)
    (runs[1] / "metrics.jsonl").unlink()
    shown = watched.describe()
    assert "two: " in shown["facts"] and "nothing has been logged yet" in shown["facts"]
    assert [len(run["figures"]) > 0 for run in shown["runs"]] == [True, False]
    with pytest.raises(UsageError, match="is not a run folder"):
        WatchedRuns([runs[0].parent])
