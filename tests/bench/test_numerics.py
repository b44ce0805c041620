"""The experiment of the number formats: its arithmetic, its plot, and one run of it."""

import math
import xml.etree.ElementTree as ET
from typing import get_args

import pytest

from shoal.bench import numerics
from shoal.bench.numerics import FAILS, FAMILIES, LOST, REFERENCE, RUNS, Curve, config_of, draw, rows, write_csv, wrong
from shoal.config import Precision
from shoal.train.check import check


def curve(name, seed, losses, validation=None):
    return Curve(name, seed, tuple(losses), losses[-1] if validation is None else validation, 0)


BASE = [5.0 - 0.01 * i for i in range(100)]
CURVES = [
    *(curve(REFERENCE, seed, [x + seed for x in BASE]) for seed in range(2)),
    *(curve("bf16", seed, [x + seed + 0.02 for x in BASE]) for seed in range(2)),
    *(curve(LOST, seed, [5.0 + seed] * 100) for seed in range(2)),
]


def test_rows_compare_the_same_seeds():
    found = {row.name: row for row in rows(CURVES)}
    assert found[REFERENCE].difference == found[REFERENCE].apart == 0
    assert found["bf16"].difference == pytest.approx(0.02) and found["bf16"].apart == pytest.approx(0.02)
    assert found[LOST].difference == pytest.approx(0.99)
    assert found[LOST].apart == pytest.approx(5.0 - (sum(BASE[-10:]) / 10))
    assert wrong(list(found.values()), 0.1) == []
    assert wrong(list(found.values()), 0.01) == ["bf16"]
    assert wrong(list(found.values()), 1.0) == [LOST], "what should fail is inside the band"


def test_a_run_that_ended_is_beyond_any_band():
    found = rows([*CURVES, curve("fp8", 0, BASE[:7], math.nan)])
    assert found[-1].apart == math.inf and not found[-1].within(1e9)


def test_every_run_is_drawn_and_can_be_made(tmp_path):
    assert {name for names in FAMILIES.values() for name in names} == set(RUNS) - {REFERENCE}
    for name in RUNS:
        check(config_of(name, 0, 10))
    used = {config_of(name, 0, 10).train.precision for name in RUNS}
    assert {"bf16", "fp16", "fp8", "mxfp8", "bf16-weights", "bf16-all"} <= used <= set(get_args(Precision))
    assert set(FAILS) <= set(RUNS)
    svg = ET.fromstring(draw(CURVES, "title"))
    text = [element.text for element in svg.iter() if element.text]
    assert "16 bits" in text and "float16 without a loss scale" in text and "bf16" in text
    write_csv(CURVES, tmp_path / "numerics.csv")
    assert len((tmp_path / "numerics.csv").read_text().splitlines()) == 1 + 6 * 100


def test_a_short_run():
    """All of a run, in this process."""
    values = config_of(LOST, 0, 8)
    small = values.model_copy(update={"train": values.train.model_copy(update={"validation_sequences": 8})})
    numerics.prepare(small.data)
    losses, validation, skipped = numerics._train(numerics.plain(small))
    assert len(losses) == 8 and skipped == 0 and math.isfinite(validation)
