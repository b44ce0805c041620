"""The lab's shell: tabs, saved pages, and what each panel's table promises."""

import json
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.labs.interactive import panels
from shoal.labs.interactive.page import read_asset, record_answers, saved_html

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
        assert callable(function) and issubclass(request, panels.Section)


def test_a_missing_token_is_answered_with_401(page, lab):
    assert page.goto(lab.url).status == 200
    assert page.request.get(lab.url.rsplit("/", 2)[0] + "/").status == 401


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> str:
    """The page of ``shoal lab --out``."""
    file = tmp_path_factory.mktemp("lab") / "lab.html"
    assert main(["lab", "--out", str(file)]) == 0
    return file.read_text()


@pytest.mark.parametrize("name", panels.PANELS)
def test_a_written_page_shows_each_panel_offline(written, saved, name):
    page = saved(written, "#saved:not([hidden])", f"#{name}")
    page.wait_for_selector(f".panel.{name} *")
    page.wait_for_timeout(100)
    assert not page.locator(".refusal").count()
    assert "recorded answers" in page.locator("#saved").inner_text()


def test_a_saved_page_has_no_markup_of_its_answers(saved):
    """A text of an answer that looks like markup stays text."""
    answers = [each.model_copy() for each in record_answers() if each.call == "layout-choices"]
    answers[0].answer["models"][0]["name"] = "</script><script>alert(1)</script>"
    html = saved_html(answers, "layout")
    assert html.count("<script") == read_asset("index.html").count("<script")
    facts = html.split('id="facts">')[1].split("</script>")[0]
    assert "alert(1)" in json.loads(facts)["answers"][0][2]["models"][0]["name"]
