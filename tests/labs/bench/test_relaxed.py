"""What the experiment makes of its runs; the runs themselves are tests/training/async_dp."""

import io
import xml.etree.ElementTree as ET
from dataclasses import replace
from math import inf, nan

import pytest
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.labs.bench.learning.experiment import TrainedRun, compare, draw, list_losses
from shoal.labs.bench.learning.relaxed import (
    FAMILIES,
    METHODS,
    OVER_LINKS,
    REFERENCE,
    RelaxedBenchmark,
)
from shoal.training.check import check


def trained(name: str, seed: int, times: tuple[float, ...], losses: tuple[float, ...], end: float) -> TrainedRun:
    return TrainedRun(name, seed, list(zip(times, losses, strict=True)), [(times[-1], end)], {"seconds": times[-1]})


RUNS = [
    trained(REFERENCE, 0, (1.0, 2.0, 4.0), (5.0, 4.0, 3.0), 3.0),
    trained(REFERENCE, 1, (1.0, 2.0, 4.0), (5.0, 4.0, 3.0), 3.2),
    trained("hogwild", 0, (0.5, 1.0, 2.0), (5.0, 4.2, 3.2), 3.1),
    trained("hogwild", 1, (0.5, 1.0, 2.0), (5.0, 4.2, 3.2), 3.5),
]


def draw_losses(title: str, runs: list[TrainedRun]) -> str:
    return draw(title, runs, FAMILIES, REFERENCE, lambda run: run.losses, x="seconds in steps", y="loss")


def test_a_method_is_compared_with_the_synchronous_run_over_the_same_seeds():
    base, hogwild = compare(RUNS, REFERENCE)
    assert (base.name, base.difference) == (REFERENCE, 0.0)
    assert hogwild.loss == pytest.approx(3.3) and hogwild.difference == pytest.approx(0.2)
    assert base.mean("seconds") == pytest.approx(2 * hogwild.mean("seconds"))
    assert hogwild.spread == pytest.approx(0.2828, abs=1e-4)


def test_the_plot_and_the_records_hold_every_run():
    root = ET.fromstring(draw_losses("a < b", RUNS))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", REFERENCE, "hogwild", "seconds in steps"} <= set(words) and "diloco" not in words
    styles = [path.get("style", "") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    widths = [width for width in ("0.7", "1.8") for style in styles if f"stroke-width: {width}" in style]
    assert widths == ["0.7"] * 4 + ["1.8"] * 4  # two seeds of each method; the mean, here and in the legend
    rows = list_losses(RUNS, x="seconds")
    assert len(rows) == 12 and rows[-1] == {
        "name": "hogwild", "seed": 1, "seconds": "2", "training_loss": 3.2, "validation_loss": 3.5}


@pytest.mark.parametrize("losses", [(5.0,), (5.0, 5.0), (5.0, nan), (nan, nan), (4.0, inf)])
def test_runs_of_few_or_endless_losses_are_drawn(losses):
    times = tuple(map(float, range(1, len(losses) + 1)))
    text = draw_losses("few", [trained(method, 0, times, losses, 3.0) for method in (REFERENCE, "hogwild")])
    ET.fromstring(text)
    assert "nan" not in text and "inf" not in text


@pytest.mark.parametrize(("end", "met"), [(2.9, True), (3.1, False), (nan, False), (inf, False)])
def test_a_loss_that_is_not_a_number_is_beyond_any_margin(end, met, monkeypatch):
    runs = [
        replace(run, validations=[(2.0, end)]) if run.name == "hogwild" and run.seed == 0 else run for run in RUNS
    ]
    monkeypatch.setattr(RelaxedBenchmark, "train", lambda *_: runs)
    console = Console(file=io.StringIO(), width=120)
    assert RelaxedBenchmark(only="hogwild").run(console, str) is met
    assert ("beyond their margin: hogwild" in console.file.getvalue()) != met


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_experiment_can_run(method):
    check(RelaxedBenchmark(steps=100).configure(method, 0))
    if method in OVER_LINKS:
        check(RelaxedBenchmark(steps=100, straggler=1.0, link_gbs=0.1).configure(method, 0))


@pytest.mark.parametrize(("options", "expected"), [
    ({"only": "dilocow"}, "did you mean 'diloco'"), ({"ranks": 1}, "--ranks of 2 or more"),
    ({"out": "/no/such/folder"}, "/no/such/folder: No such file or directory. Name a folder in one that exists"),
    ({"only": "sgp", "link_gbs": 0.1}, "its replicas share memory and use no network"),
])
def test_what_cannot_be_measured_is_refused(options, expected):
    with pytest.raises(UsageError, match=expected):
        RelaxedBenchmark.model_validate(options).run(Console(quiet=True), str)
