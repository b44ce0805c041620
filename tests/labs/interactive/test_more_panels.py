"""The panels of timelines, collectives, sharding, optimizers and numbers, in a browser."""

import pytest

from shoal.labs.interactive.panels import PANELS, recorded_requests
from tests.browser import check_widths

DEFAULTS = {
    "timeline": lambda state: {**{k: v for k, v in state.items() if k != "compare"}},
    "collectives": lambda state: state,
    "sharding": lambda state: {k: v for k, v in state.items() if k != "route"},
    "optimizers": lambda state: state,
    "numbers": lambda state: {"value": state["value"]},
}
FIRST_ANSWER = {
    "timeline": ".tile b", "collectives": ".tile b", "sharding": ".tile b", "optimizers": ".tile b",
    "numbers": "td .bits",
}


def texts(page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_saved_page_records_the_first_picture(page, lab, name):
    page.goto(lab.url)
    defaults = page.evaluate(f"async () => (await import('lab/panel_{name}')).defaults")
    wanted = DEFAULTS[name](defaults)
    assert any(call == name and request == wanted for call, request in recorded_requests())
    assert name in PANELS


def test_the_cost_of_a_backward_moves_the_bubble(panel):
    page = panel("timeline?compare=", FIRST_ANSWER["timeline"])
    before = texts(page, ".tile b")
    for _ in range(10):
        page.get_by_label("Backward, weight half").press("ArrowLeft")
    page.wait_for_function("before => document.querySelector('.tile b').textContent !== before", arg=before[0])
    page.wait_for_function("() => document.querySelector('.tile b').textContent === '29.1 T'")
    assert "backward_weight=0.5" in page.url


def test_two_schedules_stand_above_each_other_and_one_that_cannot_be_says_why(panel):
    page = panel("timeline?compare=dualpipe&pp=3", ".refusal")
    assert texts(page, ".answers h2")[0].startswith("1f1b")
    assert "dualpipe" in page.locator(".refusal").inner_text()
    page.get_by_label("Compare with").select_option("gpipe")
    page.wait_for_function("() => !document.querySelector('.refusal')")
    page.wait_for_function("() => document.querySelectorAll('.answers h2')[1].textContent.startsWith('gpipe')")


def test_a_micro_batch_is_followed_by_keyboard_and_pointer(panel):
    page = panel("timeline?compare=", FIRST_ANSWER["timeline"])
    lanes = page.locator("canvas").first
    lanes.focus()
    for key in ("ArrowRight", "ArrowDown"):
        lanes.press(key)
    path = page.locator(".path").first
    assert "Micro-batch 0, forward, stage 1 on rank 1" in path.inner_text()
    assert "Forward over ranks 0 → 1 → 2 → 3, backward over 3 → 2 → 1 → 0" in path.inner_text()
    lanes.hover(position={"x": 70, "y": 6})
    page.wait_for_function("() => document.querySelector('.path').textContent.includes('stage 0 on rank 0')")


def test_a_pasted_schedule_is_played_beside_a_named_one(panel):
    page = panel("timeline?compare=1f1b&pp=8", FIRST_ANSWER["timeline"])
    page.get_by_label("Or your own").fill("0F0,0F1,0B0\n1F0,1B0,1F1,1B1")
    page.wait_for_selector(".refusal")
    page.get_by_label("Or your own").fill("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    page.wait_for_function("() => document.querySelector('h2').textContent.startsWith('pasted')")
    one = ["9.2 T", "34.8 %", "53.3 %", "2"]  # it is 1F1B
    both = "[...document.querySelectorAll('.tile b')].map((each) => each.textContent).join()"
    page.wait_for_function(f"all => {both} === all", arg=",".join(one + one))
    assert page.locator(".refusal").count() == 0 and page.get_by_label("Pipeline ranks").is_disabled()
    assert "csv=0F0" in page.url


def test_a_step_is_played_paused_and_stepped(panel):
    page = panel("timeline", FIRST_ANSWER["timeline"])
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("() => parseFloat(document.querySelector('.clock').textContent) > 1")
    page.get_by_role("button", name="Pause").click()
    stopped = texts(page, ".clock")
    page.wait_for_timeout(120)
    assert texts(page, ".clock") == stopped
    page.get_by_role("button", name="Step ▸").click()
    assert float(texts(page, ".clock")[0].split()[0]) > float(stopped[0].split()[0])


def test_rounds_move_blocks_between_ranks(panel):
    page = panel("collectives", FIRST_ANSWER["collectives"])
    full = "() => document.querySelectorAll('.matrix rect[fill-opacity=\"1\"]').length"
    assert page.evaluate(full) == 0
    assert page.locator(".chunk").count() == 8
    for _ in range(14):
        page.get_by_role("button", name="Step ▸").click()
    assert page.evaluate(full) == 64 and page.locator(".chunk").count() == 0
    assert "All 14 rounds are done" in page.locator(".panel").inner_text()


def test_another_size_has_another_fastest_algorithm(panel):
    page = panel("collectives?topology=full", FIRST_ANSWER["collectives"])
    page.get_by_label("Size S").press("Home")
    page.wait_for_function("() => document.querySelector('.tile b').textContent === 'recursive-doubling'")
    page.get_by_label("Collective").select_option("broadcast")
    page.wait_for_function("() => document.querySelector('.tile b').textContent === 'tree'")


def test_an_expression_has_routes_and_one_is_chosen_and_run(panel):
    page = panel("sharding?mesh=x%3D2", FIRST_ANSWER["sharding"])
    assert page.locator(".device").count() == 2
    cheapest = texts(page, ".tile b")[0]
    page.get_by_role("button", name="Route 3", exact=True).click()
    assert texts(page, ".tile b")[0] != cheapest
    page.wait_for_url(lambda url: "route=2" in url)  # written a little later
    page.get_by_role("button", name="Run this route").click()
    page.wait_for_selector(".result.good", timeout=120_000)
    assert page.locator(".result").inner_text().startswith("Equal to the plain result. Run on 2 processes")


def test_a_wrong_expression_is_refused_with_its_place(panel):
    page = panel("sharding", FIRST_ANSWER["sharding"])
    page.get_by_label("Expression").fill("A[I, Jz] * B[J, K] -> C[I, K]")
    page.wait_for_selector(".refusal")
    assert "the mesh has no axis 'z'" in page.locator(".refusal").inner_text()


def test_sliders_move_the_paths_of_the_rules(panel):
    page = panel("optimizers", FIRST_ANSWER["optimizers"])
    before = texts(page, "td")
    page.get_by_label("Learning rate").press("ArrowRight")
    page.wait_for_function("before => document.querySelectorAll('td')[1].textContent !== before", arg=before[1])
    page.get_by_label("Surface", exact=True).select_option("local minima")
    page.wait_for_function("() => document.querySelector('h2').textContent.startsWith('local minima')")
    page.get_by_label("muon").check()
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 4")


def test_bits_follow_the_typed_number_and_the_scale_moves_the_gradients(panel):
    page = panel("numbers", FIRST_ANSWER["numbers"])
    assert {"65504", "57344", "448"} <= set(texts(page, "td")), "the largest of fp16 and of 8 bits, in full"
    page.get_by_label("Number").fill("65520")
    page.wait_for_function("() => [...document.querySelectorAll('td')].some(cell => cell.textContent === 'infinity')")
    row = page.locator("tr", has_text="fp16").first
    assert row.locator(".bits").get_attribute("aria-label") == "sign 0, exponent 11111, fraction 0000000000"
    page.wait_for_selector(".tile b", timeout=60_000)
    page.get_by_label("Scale of the loss").press("End")
    page.wait_for_selector(".tile.bad")
    page.get_by_label("Number").fill("one")
    page.wait_for_selector(".refusal")


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_a_panel_fits_its_screen(page, lab, name):
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{lab.url}#{name}")
    page.wait_for_selector(FIRST_ANSWER[name])
    check_widths(page)
