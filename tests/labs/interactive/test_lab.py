"""The lab's shell: tabs, saved pages, and what each panel's table promises."""

import json
from pathlib import Path

import pytest

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.labs.interactive import panels
from shoal.labs.interactive.page import Recorded, read_asset, saved_html
from tests.docs.pages import read_pages
from tests.docs.site_hooks import panel_states

ASSETS = Path(panels.__file__).parent / "assets"


def test_every_panel_has_a_script_and_every_script_has_a_panel():
    scripts = {file.name for file in ASSETS.glob("panel_*.js")}
    assert scripts == {f"panel_{name}.js" for name in panels.PANELS}


def test_the_assets_name_no_other_host():
    for file in ASSETS.iterdir():
        found = read_asset(file.name).replace("http://www.w3.org/2000/svg", "")
        assert "://" not in found and "innerHTML" not in found, file.name


def test_every_call_has_a_request(monkeypatch):
    assert len(panels.call_names()) == len(set(panels.call_names()))
    for name in panels.call_names():
        function, request = panels._find_call(name)
        assert callable(function) and (request is None or issubclass(request, panels.Section))


@pytest.mark.parametrize(("words", "message"), [
    (["--port", "70000"], "port = 70000: input should be less than or equal to 65535"),
    (["--port", "x"], "Error parsing --port"),
    (["--out", "page.txt"], "--out page.txt: give a file ending in .html"),
    (["--out", "/no/such/page.html"], "there is no folder /no/such"),
    (["--out", "page.html", "--port", "8000"], "--port 8000: --out writes a file and serves nothing"),
    (["--panel", "timelien?pp=2"], "there is no panel 'timelien'; did you mean 'timeline'?"),
    (["--out", "page.html", "--no-browser"], "--no-browser: --out writes a file and serves nothing"),
    (["--out", "page.html", "--panel", "timeline"], "--panel timeline: --out writes a file and serves nothing"),
    (["--otu", "page.html"], "Perhaps you meant: --out"),
])  # fmt: skip
def test_bad_options_are_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["lab", *words]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("schedule", ["file:/etc/passwd", " file:x.csv"])
def test_no_request_reads_a_file(schedule, monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("a file is read"))
    with pytest.raises(UsageError, match="the lab reads no files"):
        panels.call_panel("layout", {"parallel": {"pp": 2, "schedule": schedule}})


def test_a_slow_answer_is_announced(page, lab):
    held = []
    page.route("**/api/numbers", lambda route: held.append(route))
    page.goto(f"{lab.url}#numbers")
    page.wait_for_function("() => document.getElementById('busy').textContent === 'Computing …'")
    held.pop().continue_()
    page.wait_for_function("() => !document.getElementById('busy').textContent")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> str:
    """The page of ``shoal lab --out``."""
    file = tmp_path_factory.mktemp("lab") / "lab.html"
    assert main(["lab", "--out", str(file)]) == 0
    return file.read_text()


@pytest.fixture(scope="module")
def answers(written) -> list:
    facts = json.loads(written.split('id="facts">')[1].split("</script>")[0])
    return [Recorded(call=call, request=request, answer=answer) for call, request, answer in facts["answers"]]


def test_a_missing_token_is_answered_with_401(page, lab):
    assert page.goto(lab.url).status == 200
    assert page.request.get(lab.url.rsplit("/", 2)[0] + "/").status == 401


@pytest.mark.parametrize("name", panels.PANELS)
def test_a_written_page_shows_each_panel_offline(written, saved, name):
    page = saved(written, "#saved:not([hidden])", f"#{name}")
    page.wait_for_selector(f".panel.{name} *")
    page.wait_for_timeout(100)
    assert not page.locator(".refusal").count()
    assert "recorded answers" in page.locator("#saved").inner_text()


def test_every_page_of_the_course_opens_a_panel_of_the_written_page(written, saved):
    states = {state: page.name for page in read_pages() for state in panel_states(page.text)}
    page = saved(written, "#saved:not([hidden])")
    for state, name in states.items():
        page.goto(f"{page.url.partition('#')[0]}#{state}")
        page.wait_for_selector(f".panel.{state.partition('?')[0]} > .answers")
        page.wait_for_timeout(50)
        assert not page.locator(".refusal").count(), f"{name}: {state}"


def test_a_saved_page_has_no_markup_of_its_answers(answers):
    """A text of an answer that looks like markup stays text."""
    choices = next(each for each in answers if each.call == "layout-choices").model_copy(deep=True)
    choices.answer["models"][0]["name"] = "</script><script>alert(1)</script>"
    html = saved_html([choices], "layout")
    assert html.count("<script") == 1 + read_asset("index.html").count("<script")  # the element of the answers
    facts = html.split('id="facts">')[1].split("</script>")[0]
    assert "alert(1)" in json.loads(facts)["answers"][0][2]["models"][0]["name"]
