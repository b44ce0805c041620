"""Shoal's own constants beside published measurements, where these are: what is wanted of them."""

import re
from functools import cache
from pathlib import Path

import pytest

from shoal.labs.validate.held_out import hold_out
from shoal.labs.validate.rows import read_folder
from shoal.labs.validate.score import Scored, score, totals
from shoal.planning.search.kinds import ACROSS, TIE
from shoal.spec.catalog.calibration import calibration

ROOT = Path(__file__).parents[3]
FOLDER = ROOT.parent / "shared" / "measured"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"published measurements are not in {FOLDER}")


@cache
def scored() -> Scored:
    return score(read_folder(FOLDER)[0], calibration())


def test_estimates_are_as_near_as_they_should_be() -> None:
    few, many, every, _ = totals(scored()).values()
    assert (few.time.rows, many.time.rows, every.memory.rows) > (2000, 100, 1000)
    assert few.time.median <= 0.05 and few.time.ninetieth <= 0.15
    assert many.time.median <= 0.08 and many.time.ninetieth <= 0.20
    assert every.memory.median <= 0.04
    _, precision, recall = every.out_of_memory
    assert precision >= 0.95 and recall >= 0.95
    for part in (few.time, many.time, every.memory):
        assert part.inside >= 0.75, "of the 80 % interval, of which the width is of models left out"
    graded = scored().where(lambda p: p.quality == "A")
    good, families = graded.best
    assert good / families > 0.8, "of families whose predicted best is as good as their best"
    assert graded.correlation >= 0.93, "within a family, in the median"
    assert graded.ratio_errors()[0] == pytest.approx(TIE, abs=0.01)
    assert graded.ratio_errors(across=True)[1] == pytest.approx(ACROSS, abs=0.01)


def test_intervals_hold_what_they_say_of_what_a_fit_has_not_seen() -> None:
    for held_out in hold_out(scored().points, calibration()):
        for row in (0, 1):
            covered, which = held_out.coverage(row), (held_out.split, row)
            assert 0.75 <= covered.errors.inside <= 0.85 and 0.75 <= covered.inside_groups <= 0.85, which


def test_what_is_scored_is_what_an_estimate_says() -> None:
    points = scored().points[::97]
    alone = score(points)
    assert alone.seconds == pytest.approx(scored().seconds[::97])
    assert alone.bytes == pytest.approx(scored().bytes[::97]) and alone.part == pytest.approx(scored().part[::97])


def test_pages_state_the_accuracy_that_the_command_prints() -> None:
    """The first table of docs/validate.md, and the README, whose figures are of rows of all qualities."""
    few, many, _, every = totals(scored()).values()
    page, readme = ((ROOT / name).read_text() for name in ("docs/validate.md", "README.md"))
    for name, group in (("A, at most 128", few), ("A, more than 128", many), ("of all qualities", every)):
        cells = [cell.strip() for cell in re.search(rf"^\|[^|]*{name}[^|]*\|(.*)\|$", page, re.M)[1].split("|")]
        for (rows, error, bias), part in zip((cells[:3], cells[3:]), (group.time, group.memory), strict=True):
            assert (rows, error) == (f"{part.rows:,}", f"{100 * part.median:.1f}, {100 * part.ninetieth:.1f}"), name
            assert float(bias) == pytest.approx(100 * part.bias, abs=0.051), name
    stated = [float(each) for each in re.findall(r"(\d+\.\d) %", readme.partition("## Accuracy")[2])[:4]]
    found = [100 * each for part in (every.time, every.memory) for each in (part.median, part.ninetieth)]
    assert stated == pytest.approx(found, abs=0.051)
