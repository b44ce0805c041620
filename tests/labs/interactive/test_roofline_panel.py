"""The roofline panel: operations under an accelerator's roof, and points measured on this machine."""

import pytest

from shoal.base.errors import UsageError
from shoal.labs.interactive.panels import call_panel
from shoal.labs.interactive.roofline import FIRST, RooflineRequest

READY = "#least b"


def test_the_first_request_is_the_default_and_the_scripts(panel):
    page = panel("roofline", READY)
    defaults = page.evaluate("async () => (await import('lab/panel_roofline')).defaults")
    request = page.evaluate("async (state) => (await import('lab/panel_roofline')).buildRequest(state)", defaults)
    assert request == FIRST
    assert RooflineRequest.model_validate(FIRST) == RooflineRequest()


def test_operations_lie_under_the_roof():
    found = call_panel("roofline", FIRST)
    for each in found["operations"]:
        assert each["rate"] == pytest.approx(min(found["peak"], each["intensity"] * found["bandwidth"]))
        assert each["seconds"] == pytest.approx(each["flops"] / each["rate"])
    assert found["ridge"] == pytest.approx(989.4e12 / 3.35e12)


def test_the_least_batch_is_at_the_ridge():
    least = call_panel("roofline", FIRST)["least"]["tokens"]
    below, above = (call_panel("roofline", FIRST | {"sequence_length": n}) for n in (int(least), int(least) + 1))
    for found, compute_bound in ((below, False), (above, True)):
        up = next(each for each in found["operations"] if each["name"] == "up")
        assert (up["intensity"] >= found["ridge"]) == compute_bound


def test_attention_reads_queries_keys_and_values_once():
    found = call_panel("roofline", FIRST | {"batch": 2, "sequence_length": 100})
    attention = next(each for each in found["operations"] if each["name"] == "attention")
    assert attention["flops"] == 2 * 32 * 100 * 100 * 2 * 128  # b a s^2 (d + d), of which half is masked
    assert attention["bytes"] == 2 * 2 * 100 * (2 * 32 + 2 * 8) * 128


@pytest.mark.parametrize(("changes", "message"), [
    ({"accelerator": "h10-sxm"}, "accelerator h10-sxm: not in the catalog; did you mean"),
    ({"accelerator": "v100-sxm2-16gb", "precision": "fp8"}, "the catalog has no fp8 peak of v100"),
    ({"batch": 0}, "batch = 0: input should be greater than 0"),
])  # fmt: skip
def test_bad_input_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        call_panel("roofline", FIRST | changes)


@pytest.mark.parametrize(("label", "key"), [("Batch", "ArrowRight"), ("Sequence length", "ArrowLeft")])
def test_a_slider_moves_the_points(panel, label, key):
    page = panel("roofline", READY)
    before = page.locator("svg.roofline").inner_html()
    with page.expect_response(lambda response: response.url.endswith("api/roofline")):
        page.get_by_label(label, exact=True).press(key)
    page.wait_for_function("html => document.querySelector('svg.roofline').innerHTML !== html", arg=before)


def test_other_accelerators_are_drawn_beside(panel):
    page = panel("roofline", READY)
    page.get_by_label("Compare with").select_option("a100-sxm-80gb")
    page.wait_for_selector("path.other")
    assert "others=" in page.url
    page.get_by_role("button", name="Remove a100-sxm-80gb").click()
    page.wait_for_function("() => !document.querySelector('path.other')")


def test_the_button_measures_this_machine(panel):
    page = panel("roofline", READY)
    with page.expect_response(lambda response: response.url.endswith("roofline-measure"), timeout=60_000) as answered:
        page.locator("#measure").click()
    found = answered.value.json()
    assert found["peak"] == max(point["rate"] for point in found["points"]) > 1e8
    page.wait_for_function("() => document.querySelectorAll('svg.roofline').length === 2")
    assert "This machine" in page.locator(".answers").inner_text()
