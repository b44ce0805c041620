"""Published layouts of large models beside the plan's: none that ran is called impossible."""

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.labs.validate.published_layouts import estimate_published, select_layouts
from shoal.labs.validate.rows import read_folder
from tests.labs.validate.published import points_of, row, write
from tests.labs.validate.test_world import FOLDER

BIG = {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, "global_batch": 128, "step_time_s": "20"}


def test_one_layout_of_each_model_is_chosen_and_two_of_a_source() -> None:
    made = [row("large", (4, 8, 2), n, **(BIG | {"step_time_s": t})) for n, t in ((1, 20), (2, 19))]
    made += [row("large", (4, 8, 2), 1, **(BIG | {"layers": n})) for n in (60, 90, 100)]
    made += [row("small", (2, 8, 1), 1, step_time_s="1")]
    chosen = select_layouts(points_of(made))
    assert [point.run.shape.layers for point in chosen] == [100, 90]
    assert [point.run.layout.micro_batch for point in select_layouts(points_of(made[:2]))] == [2], "the faster"


def test_recomputation_that_was_not_published_is_the_least_that_fits() -> None:
    stated, silent = points_of([row("large", (1, 8, 4), 8, **BIG, recompute=r) for r in ("none", "")])
    assert not estimate_published(stated).fits
    found = estimate_published(silent)
    assert found.fits and found.run.layout.recompute != "none"


def test_the_table_has_the_published_and_the_planned_layout(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path, [row("large", (1, 8, 4), 1, **BIG)])
    assert main(["validate", str(tmp_path), "--layouts"]) == 0
    said = capsys.readouterr().out
    assert "tp 8 + sequence parallel x pp 4 (1f1b), micro-batch 1" in said and "20 s" in said
    assert "of these 1 layouts, which all ran, are called impossible" in said


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"published measurements are not in {FOLDER}")
def test_no_published_layout_that_ran_is_called_impossible() -> None:
    chosen = select_layouts(read_folder(FOLDER)[0])
    assert len(chosen) == 12
    assert all(estimate_published(point).may_fit for point in chosen)
