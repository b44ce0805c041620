"""A fit finds the constants that made the measurements, and its intervals hold what they say."""

from functools import cache

import numpy as np
import pytest

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.labs.validate.fit import (
    SPLITS,
    assign_groups,
    estimate_points,
    find_at_bounds,
    fit_constants,
    leave_out,
    measure_accuracy,
)
from shoal.labs.validate.rows import read_row, stack
from shoal.labs.validate.score import score, totals
from shoal.spec.catalog.calibration import GENERATIONS, Calibration, calibration, read_calibration
from tests.labs.validate.published import MODELS, measured, points_of, sweep, write

HOPPER = GENERATIONS.index("hopper")


def other() -> Calibration:
    """Shoal's constants, some of them changed."""
    own = calibration()
    product = own["product"].copy()
    product[HOPPER] *= 0.5
    return own.with_values(
        {
            "product": product,
            "kept_hidden": 3 * own["kept_hidden"],
            "fragmentation": 5 * own["fragmentation"],
            "hide_data": 0.5 * own["hide_data"],
        }
    )


@cache
def rows() -> list[dict[str, str]]:
    return measured(sweep(), other(), noise=0.03)


def test_a_fit_finds_what_made_the_measurements() -> None:
    points = points_of(rows())
    assert score(points, calibration()).time.median > 0.2
    assert score(points, calibration()).memory.median > 0.04
    after = score(points, fit_constants(points, calibration()))
    assert after.time.median < 0.03
    assert after.memory.median < 0.03


def test_a_fit_begins_at_what_is_expected_and_stays_inside_bounds() -> None:
    points = points_of(rows())
    one, two = (fit_constants(points, start, iterations=2) for start in (calibration(), other()))
    for name, of in one.constants.items():
        if of.fitted:
            assert np.array_equal(one[name], two[name]), f"{name} depends on what others found"
            assert (one[name] >= (of.least or 0) * 0.999).all() and (one[name] <= (of.most or np.inf) * 1.001).all()
    low = calibration().constants["product"].model_copy(update={"most": 0.3})
    bound = Calibration(calibration().constants | {"product": low})
    held = fit_constants(points, bound, iterations=2)
    assert held["product"][HOPPER] == pytest.approx(0.3)
    assert "product, hopper is at its upper bound, 0.3" in find_at_bounds(held, points)


def test_a_model_is_one_whatever_its_file_and_its_name() -> None:
    other_name = [dict(r, model=f"{r['model']} again", seq="1024", n_gpus=r["n_gpus"]) for r in rows()]
    points = [*points_of(rows()), *(read_row(r, "another") for r in other_name)]
    groups = assign_groups(points, "model")
    for model in MODELS:
        assert len({f for f, p in zip(groups, points, strict=True) if p.model.startswith(model)}) == 1
    assert len(set(groups)) == len(MODELS)
    assert len(set(assign_groups(points, "software"))) == 1


def test_what_is_left_out_is_not_seen() -> None:
    """Nothing that is measured of a model changes what is said of it; the estimate is that of a fit without it."""
    points, known = points_of(rows()), fit_constants(points_of(rows()), calibration())
    groups = assign_groups(points, "model")
    one = groups == groups[0]
    errors = leave_out(points, known, groups)
    rest = fit_constants([p for p, o in zip(points, one, strict=True) if not o], calibration())
    mine = [p for p, o in zip(points, one, strict=True) if o and p.seconds]
    refitted = np.log(estimate_points(stack(mine), mine, rest)[0] / [p.seconds for p in mine])
    stepped = errors[0][one]
    apart = np.abs(stepped[~np.isnan(stepped)] - refitted)
    assert np.median(apart) < 0.01 and apart.max() < 0.05, "one Newton step is nearly a fit"
    assert np.nanmedian(np.abs(errors[0])) < 0.06, "models that were not seen are estimated nearly as well"


def test_a_table_of_accuracy_holds_four_fifths() -> None:
    points, known = points_of(rows()), fit_constants(points_of(rows()), calibration())
    errors = {split: leave_out(points, known, assign_groups(points, split)) for split in SPLITS}
    of_own, *_, unseen = measure_accuracy(points, errors)["time"]
    assert (of_own["software"], unseen["software"]) == ("megatron-core", "")
    inside = np.abs(errors["model"][0]) <= of_own["width"]
    assert 0.7 < inside[~np.isnan(errors["model"][0])].mean() < 0.9
    assert of_own["median"] < of_own["ninetieth"] < 0.2


def test_a_fit_is_written_read_and_scored(tmp_path, capsys) -> None:
    write(tmp_path, rows())
    constants, page = tmp_path / "fitted.toml", tmp_path / "page.html"
    assert main(["validate", str(tmp_path), "--fit", str(constants), "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "Models that the fit has not seen" in said and "did not fit" in said
    assert page.read_text().count("<use ") >= len(points_of(rows()))
    again = read_calibration(constants)
    assert again["product"][HOPPER] == pytest.approx(0.5 * calibration()["product"][HOPPER], rel=0.2)
    assert main(["validate", str(tmp_path), "--constants", str(constants)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("quality A and M"))
    assert float(line.split()[6]) < 5, f"median error of times in percent: {line}"


def test_the_score_counts_what_did_not_fit() -> None:
    made = rows()
    points = points_of(made)
    count, precision, recall = score(points, other()).out_of_memory
    assert count == sum(r["status"] == "oom" for r in made) > 0
    assert precision == recall == 1
    good, families = score(points, other()).best
    assert families == 6 and good >= 5
    twice = points_of([r | {"gpu": gpu} for r in made for gpu in ("H100-SXM-80GB", "H800-80GB")])
    assert score(twice, other()).best[1] == 12, "families are of one accelerator"
    twice = points_of([r | {"precision": kind} for r in made for kind in ("bf16", "fp8")])
    assert score(twice, other()).best[1] == 12, "and of one number format"
    assert totals(score(points, other()))["quality A and M, all"].time.rows == sum(bool(r["step_time_s"]) for r in made)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "no such folder"),
        (["."], "no row of any CSV file"),
        ([".", "--out", "page.pdf"], "ending in .html"),
        ([".", "--fit", "constants"], "ending in .toml"),
        ([".", "--constants", "missing.toml"], "no such file"),
    ],
)
def test_what_cannot_be_is_refused(args: list[str], message: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["validate", *args]) == 2
    assert message in capsys.readouterr().err


def test_constants_must_be_shoals(tmp_path) -> None:
    (tmp_path / "few.toml").write_text('[hbm]\nmeaning = "x"\nexpected = 1\nvalue = 1\n')
    with pytest.raises(UsageError, match="these differ"):
        read_calibration(tmp_path / "few.toml")
