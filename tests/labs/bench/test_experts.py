"""The race computes the same in both lanes; the experiment's numbers are what its runs say."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.cli.bench.experts import ExpertsOptions, run
from shoal.labs.bench.experts import measure
from shoal.labs.bench.learning import switch
from shoal.labs.bench.learning.switch import SwitchRun, config_of, draw, steps_to_dense, write_csv


@pytest.mark.parametrize("count", [2, 5])
def test_a_loop_over_experts_computes_the_same(count: int) -> None:
    found = measure(count, "fp32", torch.device("cpu"), per_token=2, tokens=24, hidden=8, ffn=6, repeats=1)
    assert found.difference < 1e-5
    assert min(found.seconds.values()) > 0


def test_both_models_have_the_same_flops_but_for_the_router() -> None:
    dense, sparse = (
        config_of(kind, 0, steps=10, experts=8).model.shape(vocab=257, sequence_length=64) for kind in switch.KINDS
    )
    layers = len(sparse.experts.layers(sparse.layers))
    assert sparse.flops_per_token(64) - dense.flops_per_token(64) == 6 * layers * 8 * sparse.hidden
    assert sparse.parameters() > 1.5 * dense.parameters()


@pytest.mark.parametrize("shape", [(1, 32, 32), (2, 30, 32)])
def test_a_shape_without_layers_for_experts_is_refused(shape: tuple[int, int, int]) -> None:
    options = ExpertsOptions(learning=True, shape=shape)
    with pytest.raises(UsageError, match="--shape"):
        run(options, Console())


def runs() -> list[SwitchRun]:
    return [
        SwitchRun("dense", 0, (10, 20, 30), (4.0, 3.0, 2.0), 0.0, 100, 7),
        SwitchRun("switch", 0, (10, 20, 30), (3.0, 1.0, 0.5), 0.1, 300, 7),
        SwitchRun("dense", 1, (10, 20, 30), (4.0, 3.0, 2.0), 0.0, 100, 7),
        SwitchRun("switch", 1, (10, 20, 30), (4.0, 3.5, 3.0), 0.1, 300, 7),
    ]


def test_steps_are_read_between_two_validations() -> None:
    assert steps_to_dense(runs()) == [(0, 2.0, 15.0), (1, 2.0, float("inf"))]


def test_the_plot_has_both_models_and_the_table_every_validation(tmp_path: Path) -> None:
    picture = draw(runs(), "Switch against dense")
    assert picture.count("<polyline") + picture.count("<path") >= 6
    assert ">dense<" in picture
    assert ">switch<" in picture
    write_csv(runs(), tmp_path / "switch.csv")
    lines = (tmp_path / "switch.csv").read_text().splitlines()
    assert lines[:2] == ["model,seed,step,validation_loss", "dense,0,10,4.0000"]
    assert len(lines) == 13
