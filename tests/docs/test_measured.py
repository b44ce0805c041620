"""Estimates that a page shows beside what one H200 measured are what the cost model computes now."""

import re
from types import SimpleNamespace

import pytest

from shoal.labs.bench.gpu.engine_run import RunPoint
from shoal.labs.bench.gpu.speed import layer_point, list_recipes, model_point
from tests.docs.pages import ROOT

GB = 1e9
SECTION = (ROOT / "docs" / "cost.md").read_text().partition("### One H200")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if " ms | " in line]
SETTING = SimpleNamespace(rehearsal=False, accelerator=None)


def find_point(run: str) -> RunPoint:
    """Return the run that a row names."""
    name, *rest = run.replace("4,096", "4096").replace("8,192", "8192").split(", ")
    sequence, batch = (int(re.search(rf"\b{letter} (\d+)", run.replace(",", ""))[1]) for letter in "sb")
    if "OLMoE" in name:
        return RunPoint({"name": "olmoe-1b-7b", "layers": 4, "vocab": 50_304}, sequence, batch)
    if "layers" not in name:
        return model_point(SETTING, name, sequence, batch)
    recipe = ", ".join(word for word in rest if not word.startswith(("s ", "b ")))
    return layer_point(SETTING, int(name.split()[0]), sequence, batch, **list_recipes()[recipe or "bf16"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_estimates_beside_one_h200(row: list[str]) -> None:
    found = find_point(row[0]).estimate(SETTING)
    reserved = found.fullest.reserved - found.calibration.numbers["context"] * GB
    computed = [
        f"{1e3 * found.step_seconds:,.0f} ms", f"{found.fullest.allocated / GB:.1f} GB", f"{reserved / GB:.1f} GB"
    ]
    assert row[2::2] == computed


def test_estimates_of_what_is_not_priced_well() -> None:
    text = " ".join(SECTION.split())
    emulated, small = re.search(r"where (\d+) ms are estimated, and .* where (\d+) ms are estimated", text).groups()
    for stated, point in (
        (emulated, layer_point(SETTING, 4, 4096, 2, **list_recipes()["mxfp8"])),
        (small, model_point(SETTING, "gpt3-125m", 2048, 8)),
    ):
        assert float(stated) == round(1e3 * point.estimate(SETTING).step_seconds)
