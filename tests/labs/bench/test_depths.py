"""The mixture-of-depths experiment: its configs, its sampled loss, its plot and its file."""

import csv
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shoal.engine.data.batches import SyntheticDataset
from shoal.engine.models.transformer import Transformer, initialise
from shoal.labs.bench.learning import experiment
from shoal.labs.bench.learning.experiment import LENGTH, TrainedRun, sampled_loss
from shoal.labs.bench.learning.mixture_of_depths import (
    DENSE,
    EQUAL,
    KINDS,
    LESS,
    SHORTER,
    DepthsBenchmark,
    training_flops,
)


@pytest.mark.parametrize("capacity", [0.125, 0.25])
def test_equal_flops_are_as_many_layers_as_they_pay_for(capacity: float) -> None:
    benchmark = DepthsBenchmark(steps=10, capacity=capacity)
    shapes = {
        kind: benchmark.configure(kind, 0).model.shape(vocab=257, sequence_length=LENGTH) for kind in KINDS
    }
    flops = {kind: shape.flops_per_token(LENGTH) for kind, shape in shapes.items()}
    assert shapes[LESS].layers == shapes[DENSE].layers < shapes[EQUAL].layers
    assert flops[LESS] < flops[EQUAL] <= flops[DENSE]
    steps = DepthsBenchmark(steps=1000, capacity=capacity).configure(SHORTER, 0).train.steps
    assert steps * flops[SHORTER] == pytest.approx(1000 * flops[LESS], rel=1e-3)
    deeper = shapes[EQUAL].model_copy(update={"layers": shapes[EQUAL].layers + 1})
    assert deeper.flops_per_token(LENGTH) > flops[DENSE]


def test_a_dense_model_loses_nothing_token_by_token() -> None:
    """And one whose layers take some tokens has another loss by predicted routes."""
    samples = SyntheticDataset(257, LENGTH, 0)
    batch = samples.batch([0, 1])
    losses = {}
    for kind in (DENSE, LESS):
        model = Transformer(DepthsBenchmark(steps=1).configure(kind, 0).model.shape(vocab=257, sequence_length=LENGTH))
        initialise(model, 0)
        for layer in model.layers.values():
            if layer.depth is not None:
                layer.depth.router.data.normal_(0, 50, generator=torch.Generator().manual_seed(0))
        together = float(model(batch.tokens, batch.targets).detach()) / batch.unmasked()
        losses[kind] = (sampled_loss(model, samples, 2), together)
    assert losses[DENSE][0] == pytest.approx(losses[DENSE][1], rel=1e-5)
    assert losses[LESS][0] != pytest.approx(losses[LESS][1], rel=1e-5)


def test_the_plot_is_over_flops_and_the_table_has_every_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"layers": 4, "parameters": 10**4, "flops_per_token": 10**6}
    runs = [
        TrainedRun(kind, seed, [], [(10, 3.0), (20, 2.0 + seed / 10)], facts) for seed in range(2) for kind in KINDS
    ]
    assert training_flops(runs[0])[-1] == (20 * 16 * 64 * 10**6 / 1e12, 2.0)
    monkeypatch.setattr(experiment, "train_all", lambda *_, **__: runs)
    out = io.StringIO()
    assert DepthsBenchmark(out=tmp_path, seeds=2).run(Console(file=out, width=140), str)
    assert all(kind in out.getvalue() for kind in KINDS) and "2.050" in out.getvalue()
    picture = (tmp_path / "depths.svg").read_text()
    assert all(f">{kind}, 4 layers<" in picture for kind in KINDS)
    with (tmp_path / "depths.csv").open() as file:
        first, *others = csv.DictReader(file)
    assert first == {
        "name": "dense", "layers": "4", "flops_per_token": "1000000", "seed": "0", "step": "10", "training_loss": "",
        "validation_loss": "3.0",
    }
    assert len(others) == 15
