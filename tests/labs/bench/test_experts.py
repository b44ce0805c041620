"""Grouped experts against a loop; and Switch against dense models."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.labs.bench import experts
from shoal.labs.bench.experts import ExpertsBenchmark, steps_to_dense
from shoal.labs.bench.learning import experiment
from shoal.labs.bench.learning.experiment import TrainedRun


@pytest.mark.parametrize("count", [2, 5])
def test_a_loop_over_experts_computes_the_same(count: int) -> None:
    benchmark = ExpertsBenchmark(tokens=24, hidden=8, width=6 * count, repeats=1)
    found = benchmark.measure(count)
    assert found["difference"] < 1e-5
    assert found["loop ms"] > 0 and found["grouped ms"] > 0


@pytest.mark.parametrize(("grouped", "met"), [([2.0, 1.0, 1.5], True), ([2.1, 1.0, 1.6], False)])
def test_the_median_of_the_turns_ratios_meets_the_target(
    grouped: list[float], met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(calls: dict[str, Callable[[], None]], *_: object, **__: object) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {"grouped": grouped, "loop": [2.0, 2.0, 1.5]}

    monkeypatch.setattr(experts, "time_in_turns", measured)
    found = ExpertsBenchmark(tokens=24, hidden=8, width=48).measure(8)
    assert found["target"] == 1.0 and found["met"] is met


def test_both_models_have_the_same_flops_but_for_the_router() -> None:
    dense, sparse = (
        ExpertsBenchmark(steps=10, experts=(8,)).configure(kind, 0).model.shape(vocab=257, sequence_length=64)
        for kind in ("dense", "switch")
    )
    layers = len(sparse.experts.layers(sparse.layers))
    assert sparse.flops_per_token(64) - dense.flops_per_token(64) == 6 * layers * 8 * sparse.hidden
    assert sparse.parameters() > 1.5 * dense.parameters()


@pytest.mark.parametrize("shape", [(1, 32, 32), (2, 30, 32)])
def test_a_shape_without_layers_for_experts_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="--shape"):
        ExpertsBenchmark(learning=True, shape=shape).run(Console(), str)


def trained(name: str, seed: int, *losses: float) -> TrainedRun:
    facts = {"parameters": 1000, "flops_per_token": 6000, "dropped": 0.0}
    return TrainedRun(name, seed, [], list(zip((10, 20, 30), losses, strict=True)), facts)


RUNS = [
    trained("dense", 0, 4.0, 3.0, 2.0),
    trained("switch", 0, 3.0, 1.0, 0.5),
    trained("dense", 1, 4.0, 3.0, 2.0),
    trained("switch", 1, 4.0, 3.5, 3.0),
]


def test_steps_are_read_between_two_validations() -> None:
    assert steps_to_dense(RUNS) == [(0, 2.0, 15.0), (1, 2.0, float("inf"))]


def test_the_plot_has_both_models_and_the_table_every_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "train_all", lambda *_, **__: RUNS)
    benchmark = ExpertsBenchmark(learning=True, out=tmp_path, steps=30)
    assert not benchmark.run(Console(quiet=True), str), "slower with seed 1"
    picture = (tmp_path / "switch.svg").read_text()
    assert picture.count("<polyline") + picture.count("<path") >= 6
    assert ">dense<" in picture
    assert ">switch<" in picture
    with (tmp_path / "switch.csv").open() as file:
        first, *others = csv.DictReader(file)
    assert first == {"name": "dense", "seed": "0", "step": "10", "training_loss": "", "validation_loss": "4.0"}
    assert len(others) == 11
