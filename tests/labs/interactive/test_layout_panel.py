"""The layout panel in a browser: each control changes the answer, and the page keeps what was chosen."""

import json
import re
import shlex
import tomllib
from urllib.parse import parse_qs, quote

import pytest

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.labs.interactive.layout import FIRST, LayoutRequest
from shoal.labs.interactive.panels import call_panel
from tests.browser import check_widths

READY = "#step b"
SMALL = "layout?model=llama-3-8b&tp=2&pp=2&cluster=2x8xH100"
TOO_LARGE = "layout?cluster=4x8xA100-40GB"


def state(page) -> dict:
    return {name: values[0] for name, values in parse_qs(page.url.partition("?")[2]).items()}


def move(page, label: str, key: str = "ArrowRight") -> dict:
    """Press a key on a slider, wait until the page shows the answer, and return it."""
    with page.expect_response(lambda response: response.url.endswith("api/layout")) as answered:
        page.get_by_label(label, exact=True).press(key)
    seconds = answered.value.json()["step"]["seconds"]
    page.wait_for_function("text => document.querySelector('#step b').textContent === text", arg=shown(page, seconds))
    return answered.value.json()


def shown(page, seconds: float) -> str:
    return page.evaluate("async (n) => (await import('lab/kit')).show.seconds(n)", seconds)


def answer(**changes: object) -> dict:
    parallel = {name: value for name, value in changes.items() if name in FIRST["parallel"] or name == "dp"}
    rest = {name: value for name, value in changes.items() if name not in parallel}
    return call_panel("layout", FIRST | rest | {"parallel": FIRST["parallel"] | parallel})


# ---- the engine's answers ----------------------------------------------------------------------------------------


def test_the_answer_is_that_of_the_api():
    found = answer()
    expected = shoal.estimate(
        shoal.Layout(zero=1, tp=8, pp=4, sequence_parallel=True), model="llama-3-70b", cluster="16x8xH100",
        global_batch="4M", sequence_length=8192,
    )  # fmt: skip
    assert found["step"]["seconds"] == expected.step_seconds
    assert sum(size for _, size in found["memory"]["parts"]) == expected.fullest.reserved
    assert LayoutRequest.model_validate(FIRST) == LayoutRequest()


@pytest.mark.parametrize("changes", [
    {}, {"dp": 2, "pp": 8}, {"model": "mixtral-8x7b", "ep": 8, "tp": 1, "sequence_parallel": False, "pp": 2, "zero": 3},
    {"layers": 40}, {"cp": 2, "recompute": "full", "sequence_length": 32768, "micro_batch": 2, "tokens": 2e12},
])  # fmt: skip
def test_the_shown_command_and_file_give_the_shown_estimate(changes, tmp_path, monkeypatch, capsys):
    found = answer(**changes)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(found["toml"])
    words = shlex.split(found["commands"][0])
    assert words[0] == "shoal" and main([*words[1:], "--json"]) in (0, 1)
    values = json.loads(capsys.readouterr().out)
    assert values["step_seconds"] == found["step"]["seconds"]
    assert values["memory_bytes"]["reserved"] == found["memory"]["reserved"]
    assert values["training"]["days"] == pytest.approx(found["training"]["days"], rel=1e-4), "in steps of the file"


def test_the_axes_send_what_a_dry_run_counts():
    counted = shoal.dry_run(
        shoal.Layout(zero=1, tp=2, pp=2, sequence_parallel=True), model="tiny", cluster="8xH100", sequence_length=64,
        global_batch=16, steps=2,
    )  # fmt: skip
    found = call_panel("layout", FIRST | {
        "model": "tiny", "cluster": "8xH100", "sequence_length": 64, "global_batch": "16",
        "parallel": FIRST["parallel"] | {"tp": 2, "pp": 2},
    })  # fmt: skip
    sent = counted.counted.steps[-1].sent
    for each in found["axes"]:
        groups = {"tp": ("tp",), "pp": ("pp",), "dp": ("shard", "replicate", "dp")}[each["axis"]]
        expected = sum(size for (axis, _), size in sent.items() if axis in groups)
        assert sum(size for _, size in each["kinds"]) == pytest.approx(expected, rel=0.02)


HF = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip


def test_a_pasted_config_is_the_model():
    found = answer(config=json.dumps(HF), cluster="8xH100", tp=1, pp=1, sequence_length=2048, global_batch="64")
    assert found["model"]["name"] == "pasted" and found["model"]["layers"] == 16
    h, f = 2048, 8192
    assert found["model"]["parameters"] == 16 * (3 * h * h + 3 * h * f + 2 * h) + 2 * 32000 * h + h
    assert tomllib.loads(found["toml"])["model"]["hidden"] == 2048


@pytest.mark.parametrize(("changes", "message"), [
    ({"config": "{"}, "config.json: it is not JSON"),
    ({"config": "[]"}, "config.json: it is no JSON object"),
    ({"config": '{"model_type": "bert"}'}, "model_type = 'bert' is not a family that shoal trains"),
    ({"model": "llama-9"}, "'llama-9' is not in the catalog"),
    ({"cluster": "8xH900"}, "there is no node type 'H900'; did you mean"),
    ({"heads": 60}, "hidden = 8192 is not a multiple of model.heads = 60"),
    ({"tp": 3}, "parallel.tp = 3 does not divide"),
    ({"pp": 7}, "pp 7 x dp 1 x tp 8 = 56 ranks, but 128 were given"),
    ({"tp": 0}, "layout: parallel.tp = 0: input should be greater than 0"),
    ({"tokens": -1}, "layout: tokens = -1: input should be greater than 0"),
    ({"precision": "fp3"}, "--precision fp3: unknown"),
])  # fmt: skip
def test_bad_input_is_the_products_own_error(changes, message):
    with pytest.raises(UsageError) as refused:
        answer(**changes)
    assert message in str(refused.value)


def test_moves_are_faster_and_fit():
    found = call_panel("layout-moves", FIRST)
    assert 1 <= len(found["moves"]) <= 3 and found["kept"] is None
    assert all(each["change"] < 0 for each in found["moves"])


def test_where_nothing_near_fits_the_answer_says_whether_all_were_searched():
    request = FIRST | {"cluster": "4xA100", "parallel": FIRST["parallel"] | {"tp": 4, "pp": 1}}
    near = call_panel("layout-moves", request)
    assert (near["moves"], near["complete"]) == ([], False)
    every = call_panel("layout-moves", request | {"thorough": True})
    assert (every["moves"], every["complete"]) == ([], True)


# ---- the page ----------------------------------------------------------------------------------------------------


def test_the_scripts_defaults_are_the_requests(panel):
    page = panel("layout", READY)
    defaults = page.evaluate("async () => (await import('lab/panel_layout')).defaults")
    request = page.evaluate("async (state) => (await import('lab/panel_layout')).buildRequest(state)", defaults)
    assert request == FIRST


MOVES = [
    ("Layers", "layers"), ("Hidden size", "hidden"), ("Attention heads", "heads"), ("Feed-forward size", "ffn"),
    ("Nodes", "cluster"), ("Global batch", "global_batch"), ("Sequence length", "sequence_length"),
    ("ZeRO stage", "zero"), ("tp · tensor parallel", "tp"), ("cp · context parallel", "cp"),
    ("pp · pipeline parallel", "pp"), ("Micro-batch", "micro_batch"),
]  # fmt: skip


def test_a_slider_changes_the_answer_and_the_url(panel):
    page = panel(SMALL, READY)
    page.locator(".sizes").evaluate("details => { details.open = true; }")
    for label, field in MOVES:
        key = "ArrowLeft" if field == "tp" else "ArrowRight"
        before, url = page.locator(".panel").inner_text(), state(page)
        move(page, label, key)
        assert {name for name in state(page).keys() | url if state(page).get(name) != url.get(name)} == {field}
        assert page.locator(".panel").inner_text() != before


CHOICES = [
    ("Precision", "fp8", "precision"), ("Optimizer", "sgd", "optimizer"), ("Schedule", "zb-h1", "schedule"),
    ("Recompute", "full", "recompute"), ("Model", "llama-2-7b", "model"),
]  # fmt: skip


def test_a_choice_changes_the_answer(panel):
    page = panel(SMALL, READY)
    for label, value, field in CHOICES:
        with page.expect_response(lambda response: response.url.endswith("api/layout")) as answered:
            page.get_by_label(label, exact=True).select_option(value)
        assert answered.value.status == 200 and state(page)[field] == value


def test_expert_parallelism_is_offered_for_models_with_experts(panel):
    page = panel("layout?model=mixtral-8x7b&tp=1&pp=1&cluster=2x8xH100", READY)
    assert "ep 2" in move(page, "ep · expert parallel")["layout"]["text"] and state(page)["ep"] == "2"
    page.get_by_label("Model", exact=True).select_option("llama-3-8b")
    page.wait_for_function("() => document.querySelector('[aria-label=Layout]').innerText.indexOf('ep ·') < 0")


def test_a_layout_that_does_not_fit_is_red_with_the_nearest_that_fits(panel):
    page = panel(TOO_LARGE, READY)
    assert page.locator("#memory.bad").count() == 1 and page.locator(".bar.over").count() == 1
    page.get_by_role("button", name=re.compile("Apply")).first.click()  # offered without being asked for
    page.wait_for_selector("#memory:not(.bad)")
    assert page.locator(".bar.over").count() == 0 and state(page).keys() > {"cluster"}


def test_what_would_you_change(panel):
    page = panel(SMALL, READY)
    page.get_by_role("button", name="What would you change?").click()
    first = page.locator(".moves tbody tr").first
    expected = first.locator("td").nth(1).inner_text()
    first.get_by_role("button").click()
    page.wait_for_function("text => document.querySelector('#step b').textContent === text", arg=expected)


def test_pins_and_state_come_back_from_the_url(panel, page):
    panel(SMALL, READY)
    page.locator("#pin").click()
    move(page, "ZeRO stage")
    page.locator("#pin").click()
    assert page.locator("table.pins tbody tr").count() == 3
    page.wait_for_function("() => location.hash.split('seconds').length === 3")  # both pins
    url, text = page.evaluate("location.href"), page.locator("table.pins").inner_text()
    page.goto("about:blank")
    page.goto(url)
    page.wait_for_selector(READY)
    assert page.locator("table.pins").inner_text() == text
    assert page.get_by_label("ZeRO stage", exact=True).evaluate("input => input.valueAsNumber") == 2
    page.get_by_role("button", name="Remove pin 1").click()
    page.get_by_role("button", name="Open pin").click()
    assert page.locator("table.pins tbody tr").count() == 2


def test_a_bad_layout_shows_the_error_and_the_next_move_mends_it(panel):
    page = panel(f"{SMALL}&dp=2", ".refusal")
    assert "pp 2 x dp 2 x tp 2 = 8 ranks, but 16 were given" in page.locator(".refusal b").inner_text()
    page.get_by_label("dp · data parallel", exact=True).press("Home")
    page.wait_for_selector(READY)
    assert not page.locator(".refusal").count()


def test_a_pasted_config_in_the_url(panel):
    page = panel(f"layout?tp=1&pp=1&cluster=8xH100&sequence_length=2048&config={quote(json.dumps(HF))}", READY)
    assert "pasted" in page.locator("table.pins").inner_text()
    assert page.get_by_label("Layers", exact=True).get_attribute("aria-valuetext") == "16"


def test_the_mesh_draws_a_group_of_the_rank_pointed_at(panel):
    page = panel(SMALL, READY)
    pixels = "() => document.querySelector('.frame canvas').toDataURL()"
    before = page.evaluate(pixels)
    page.get_by_role("button", name="dp · data parallel").click()
    assert page.evaluate(pixels) != before
    page.locator(".frame canvas").hover(position={"x": 60, "y": 10})
    assert "Rank 0 " not in page.locator(".frame + .note").inner_text()
    for key, rank in (("Home", 0), ("ArrowRight", 1), ("ArrowDown", 9), ("ArrowUp", 1), ("End", 15)):
        page.locator(".frame canvas").press(key)
        assert page.locator(".frame + .note").inner_text().startswith(f"Rank {rank} ")


def test_a_page_saved_by_the_button_opens_offline(panel, page, saved):
    panel(SMALL, READY)
    move(page, "ZeRO stage")
    expected = page.locator(READY).inner_text()
    with page.expect_download() as download:
        page.locator("#save").click()
    html = download.value.path().read_text()
    saved(html, READY)
    assert page.locator(READY).inner_text() == expected
    assert page.get_by_label("ZeRO stage", exact=True).is_enabled()
    assert page.get_by_label("pp · pipeline parallel", exact=True).is_disabled()
    page.get_by_label("ZeRO stage", exact=True).press("ArrowLeft")  # recorded
    page.wait_for_function("text => document.querySelector('#step b').textContent !== text", arg=expected)


@pytest.mark.parametrize("name", ["layout", "roofline"])
def test_a_panel_fits_its_window(page, lab, name):
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(f"{lab.url}#{name}")
    page.wait_for_selector(".tile b")
    check_widths(page)


def test_every_control_has_a_name_and_the_keyboard_reaches_it(panel):
    page = panel("layout", READY)
    unnamed = "() => [...document.querySelectorAll('input, select, textarea, button')].filter(" \
              "each => !each.labels?.length && !each.getAttribute('aria-label') && !each.textContent.trim()).length"
    assert page.evaluate(unnamed) == 0
    page.locator(".sizes").evaluate("details => { details.open = true; }")
    controls, reached = ".panel :is(input, select, textarea, button, canvas, summary)", 0
    for _ in range(80):  # more than there are controls
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        reached += page.evaluate(f"document.activeElement.matches('{controls}')")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", "no visible focus"
    every = f"[...document.querySelectorAll('{controls}')].filter(each => each.checkVisibility() && !each.disabled)"
    assert reached == page.evaluate(f"{every}.length") > 25
    page.get_by_role("button", name="dp · data parallel").press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "dp · data parallel"  # its table is drawn again
    page.locator("#pin").press("Enter")
    page.get_by_role("button", name="Remove pin 1").press("Enter")
    assert page.locator("table.pins tbody tr").count() == 1
    page.get_by_role("tab", name="Layout").press("ArrowRight")
    page.wait_for_selector(".panel.roofline .tile b")
    assert page.get_by_role("tab", name="Roofline").get_attribute("aria-selected") == "true"


def test_the_colours_follow_the_system_and_the_button(browser, lab):
    page = browser.new_page(color_scheme="dark")
    page.goto(lab.url)
    page.wait_for_selector(READY)
    ground = "() => getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(ground) == "rgb(14, 17, 22)"
    page.locator("#theme").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.reload()
    page.wait_for_selector(READY)
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.close()
