"""A fit finds the constants that made the measurements, and its intervals hold what they say."""

from functools import cache

import numpy as np
import pytest

from shoal.catalog.calibration import GENERATIONS, Calibration, calibration, read_calibration
from shoal.cli import main
from shoal.errors import UsageError
from shoal.validate.fit import Problem, held_out, spreads
from shoal.validate.score import score, totals
from tests.validate.published import measured, points_of, sweep, write

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
            "update": 2 * own["update"],
        }
    )


@cache
def rows() -> list[dict[str, str]]:
    return measured(sweep(), other(), noise=0.03)


def test_a_fit_finds_what_made_the_measurements() -> None:
    points = points_of(rows())
    before, after = (
        score(points, c).time.median for c in (calibration(), Problem(points, "time", calibration()).fit(6))
    )
    assert before > 0.2
    assert after < 0.03
    memory = Problem(points, "memory", calibration()).fit(6)
    assert score(points, memory).memory.median < 0.03
    assert score(points, calibration()).memory.median > 0.05


def test_an_interval_holds_four_fifths_of_what_a_fit_has_not_seen() -> None:
    points = points_of(rows())
    seconds, size, _ = held_out(points, calibration())
    constants = spreads(points, calibration(), seconds, size)
    unseen = np.abs(np.log(seconds / np.array([p.seconds or np.nan for p in points])))
    known = ~np.isnan(unseen)
    spread = score(points, constants).time_spread[known]
    assert 0.7 < np.mean(unseen[known] <= spread) < 0.9
    assert np.median(unseen[known]) < 0.06, "models that were not seen are estimated nearly as well"


def test_a_fit_is_written_read_and_scored(tmp_path, capsys) -> None:
    write(tmp_path, rows())
    constants, page = tmp_path / "fitted.toml", tmp_path / "page.html"
    assert main(["validate", str(tmp_path), "--fit", str(constants), "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "Models that a fit had not seen" in said and "did not fit" in said
    assert page.read_text().count("<circle") >= len(points_of(rows()))
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
        ([".", "--out", "page.pdf"], "must end in .html"),
        ([".", "--fit", "constants"], "must end in .toml"),
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
