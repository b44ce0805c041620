"""The layout panel in a browser: each control changes the answer, and the page keeps what was chosen."""

from urllib.parse import parse_qs

import pytest

import shoal
from shoal.labs.interactive.layout import FIRST, LayoutRequest
from shoal.labs.interactive.panels import call_panel

READY = "#step b"


def step(page) -> str:
    return page.locator(READY).inner_text()


def state(page) -> dict:
    return {name: values[0] for name, values in parse_qs(page.url.partition("?")[2]).items()}


def move(page, label: str, key: str = "ArrowRight") -> None:
    """Press a key on a slider, and wait until the answer is there."""
    with page.expect_response(lambda response: response.url.endswith("api/layout")) as answered:
        page.get_by_label(label, exact=True).press(key)
    answered.value.finished()
    page.wait_for_function("() => !document.querySelector('.stale')")


def test_the_scripts_defaults_are_the_requests(panel):
    page = panel("layout", READY)
    defaults = page.evaluate("async () => (await import('lab/panel_layout')).defaults")
    request = page.evaluate("async (state) => (await import('lab/panel_layout')).buildRequest(state)", defaults)
    assert request == FIRST
    assert LayoutRequest.model_validate(FIRST) == LayoutRequest()


def test_the_answer_is_that_of_the_api():
    answer = call_panel("layout", FIRST)
    expected = shoal.estimate(
        shoal.Layout(zero=1, tp=8, pp=4, sequence_parallel=True), model="llama-3-70b", cluster="16x8xH100",
        global_batch="4M", sequence_length=8192,
    )
    assert answer["step"]["seconds"] == expected.step_seconds
    assert sum(size for _, size in answer["memory"]["parts"]) == expected.fullest.reserved


MOVES = [
    ("Layers", "layers"), ("Hidden size", "hidden"), ("Attention heads", "heads"), ("Feed-forward size", "ffn"),
    ("Nodes", "cluster"), ("Global batch", "global_batch"), ("Sequence length", "sequence_length"),
    ("ZeRO stage", "zero"), ("tp · tensor parallel", "tp"), ("cp · context parallel", "cp"),
    ("pp · pipeline parallel", "pp"), ("Micro-batch", "micro_batch"),
]  # fmt: skip


@pytest.mark.parametrize(("label", "field"), MOVES)
def test_a_slider_changes_the_answer_and_the_url(panel, label, field):
    page = panel("layout?model=llama-3-8b&tp=2&pp=2&cluster=2x8xH100", READY)
    page.locator(".sizes").evaluate("details => { details.open = true; }")
    before = page.locator(".panel").inner_text()
    url = state(page)
    move(page, label, "ArrowLeft" if field == "tp" else "ArrowRight")
    assert {name for name in state(page).keys() | url if state(page).get(name) != url.get(name)} == {field}
    page.wait_for_function("before => document.querySelector('.panel').innerText !== before", arg=before)
