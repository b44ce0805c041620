"""A fit finds the constants that made the measurements, and its intervals hold what they say."""

import tomllib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shoal.base.errors import UsageError
from shoal.base.section import validate
from shoal.cli.main import main
from shoal.labs.validate.fit import estimate_points, find_at_bounds, fit_constants
from shoal.labs.validate.held_out import HeldOut, accuracy_text, assign_groups, hold_out, leave_out
from shoal.labs.validate.rows import Point, read_row, stack
from shoal.labs.validate.score import score, totals
from shoal.spec.catalog.accuracy import Accuracy, find_accuracy
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


@cache
def read_points() -> list[Point]:
    return points_of(rows())


@cache
def fitted() -> Calibration:
    return fit_constants(read_points(), calibration())


def test_a_fit_finds_what_made_the_measurements() -> None:
    points = read_points()
    assert score(points, calibration()).time.median > 0.2
    assert score(points, calibration()).memory.median > 0.04
    after = score(points, fitted())
    assert after.time.median < 0.03
    assert after.memory.median < 0.03


def test_a_fit_begins_at_what_is_expected_and_stays_inside_bounds() -> None:
    points = read_points()
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
    points = [*read_points(), *(read_row(r, "another") for r in other_name)]
    groups = assign_groups(points, "model")
    for model in MODELS:
        assert len({f for f, p in zip(groups, points, strict=True) if p.model.startswith(model)}) == 1
    assert len(set(groups)) == len(MODELS)
    assert len(set(assign_groups(points, "software"))) == 1


def test_what_is_left_out_is_not_seen() -> None:
    """Nothing that is measured of a model changes what is said of it; the estimate is that of a fit without it."""
    points, known = read_points(), fitted()
    groups = assign_groups(points, "model")
    one = groups == groups[0]
    errors = leave_out(points, known, groups)
    rest = fit_constants([p for p, o in zip(points, one, strict=True) if not o], calibration())
    mine = [p for p, o in zip(points, one, strict=True) if o and p.seconds]
    refitted = np.log(estimate_points(stack(mine), mine, rest)[0] / [p.seconds for p in mine])
    stepped = errors[0][one]
    apart = np.abs(stepped[~np.isnan(stepped)] - refitted)
    assert np.median(apart) < 0.015 and apart.max() < 0.05, "one Newton step is nearly a fit"
    assert np.nanmedian(np.abs(errors[0])) < 0.06, "models that were not seen are estimated nearly as well"


def test_a_width_holds_four_fifths_of_what_it_is_made_of_and_is_of_a_class_with_enough_groups() -> None:
    points = read_points()
    found = HeldOut(points, calibration(), "model")
    found.groups = np.arange(len(points)) % 5
    found.errors[:] = np.random.default_rng(0).normal(size=found.errors.shape)
    software, _, special = found.keys[0]
    own = (software, "", special)
    inside = np.abs(found.errors[0][found.select(0, own)]) <= found.width(0, own)
    assert inside.mean() == pytest.approx(found.levels[0], abs=0.02)
    assert len(found.select(0, own, without=0)) == pytest.approx(0.8 * len(found.select(0, own)), abs=5)
    found.groups %= 2
    assert np.isnan(found.width(0, own)), "two groups say too little of a third"
    assert found.width(0, ("", "", None)) > 0


def test_intervals_of_software_hold_four_fifths_of_one_left_out() -> None:
    """With few of them a quantile of the others is too narrow: half of one's errors may be larger than all others'."""
    points = read_points()
    found = HeldOut(points, calibration(), "software")
    found.groups = np.arange(len(points)) % 5
    found.errors[:] = (1 + found.groups) * np.random.default_rng(0).normal(size=found.errors.shape)
    found.levels = [0.8, 0.8]
    assert found.coverage(0).inside_groups < 0.8
    found.levels = [found._calibrate(row) for row in (0, 1)]
    assert found.levels[0] > 0.8 and 0.8 <= found.coverage(0).inside_groups < 0.85


def test_coverage_is_of_widths_that_have_not_seen_the_group() -> None:
    """One of five groups has errors ten times as large: its own width would hold them, that of the others does not."""
    points = read_points()
    found = HeldOut(points, calibration(), "model")
    found.groups = np.arange(len(points)) % 5
    found.errors[:] = np.where(found.groups == 0, 1.0, 0.1) * np.linspace(0.9, 1.1, len(points))
    covered = found.coverage(0)
    assert covered.groups == 5 and covered.errors.rows == len(points)
    assert covered.inside_groups == pytest.approx(0.8, abs=0.02), "four groups of five are inside"


def test_the_accuracy_of_a_run_depends_on_what_was_measured() -> None:
    seen, other, never = (
        find_accuracy("time", software, "small", kind, special=False)
        for software, kind in (("nanotron", "h100-sxm, efa"), ("nanotron", "b200-sxm, infiniband"), ("shoal", ""))
    )
    assert [entry.left_out for entry in (seen, other, never)] == ["model", "cluster", "software"]
    assert seen.width < other.width < never.width and "whose clusters the fit had not seen" in other.describe()


def test_accuracy_is_written_as_it_is_read() -> None:
    points = read_points()
    tables = tomllib.loads(accuracy_text(hold_out(points, calibration())))
    for entry in (*tables["time"], *tables["memory"]):
        assert validate(Accuracy, entry, source="made").width >= 0
    assert {entry["left_out"] for entry in tables["time"]} == {"model", "cluster", "software"}


def test_a_fit_is_written_read_and_scored(tmp_path, capsys) -> None:
    write(tmp_path, rows())
    constants, page = tmp_path / "fitted.toml", tmp_path / "page.html"
    assert main(["validate", str(tmp_path), "--fit", str(constants), "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "time, model left out" in said and "did not fit" in said
    ran = sum(each["status"] == "ok" for each in rows())
    assert f"Of {ran:,} runs that ran, 0 need more memory" in said
    accuracy = tomllib.loads((tmp_path / "fitted-accuracy.toml").read_text())
    assert accuracy["clusters"]["time"]["megatron-core"] and accuracy["memory"]
    assert page.read_text().count("<use ") >= len(read_points())
    again = read_calibration(constants)
    assert again["product"][HOPPER] == pytest.approx(0.5 * calibration()["product"][HOPPER], rel=0.2)
    assert main(["validate", str(tmp_path), "--constants", str(constants)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("quality A and M"))
    assert float(line.split()[6]) < 5, f"median error of times in percent: {line}"


def test_the_score_counts_what_did_not_fit() -> None:
    made = rows()
    scored = score(read_points(), other())
    count, precision, recall = scored.out_of_memory
    assert count == sum(r["status"] == "oom" for r in made) > 0
    assert precision == recall == 1
    good, families = scored.best
    assert families == 6 and good >= 5
    assert scored.correlation > 0.9
    backwards = replace(scored, seconds=1 / scored.seconds)
    assert backwards.correlation < -0.9
    true = replace(backwards, seconds=backwards.measured_seconds)
    assert replace(true, seconds=2 * true.seconds).ratio_errors() == pytest.approx((0, 0)), "of ratios"
    assert replace(true, seconds=true.seconds**2).ratio_errors()[1] > 0.1
    assert np.isnan(true.ratio_errors(across=True)).all(), "no layout has tp across nodes"
    twice = points_of([r | {"gpu": gpu} for r in made for gpu in ("H100-SXM-80GB", "H800-80GB")])
    assert score(twice, other()).best[1] == 12, "families are of one accelerator"
    twice = points_of([r | {"precision": kind} for r in made for kind in ("bf16", "fp8")])
    assert score(twice, other()).best[1] == 12, "and of one number format"
    assert totals(scored)["quality A and M, all"].time.rows == sum(bool(r["step_time_s"]) for r in made)


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
