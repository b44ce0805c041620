"""Chains of modules that cannot be stages are refused, and what stages save is resumed on other layouts."""

from contextlib import nullcontext
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from shoal.base.errors import UsageError
from shoal.engine.own.chain import find_chain
from shoal.engine.own.definition import OwnModel
from shoal.engine.own.samples import OwnDataset
from shoal.engine.precision.policy import POLICIES
from shoal.launch import train as train_module
from shoal.pipeline.from_layout import build_layout_program
from shoal.pipeline.partition import split_work
from shoal.training.check import check
from shoal.training.samples import try_samples
from tests.testing.own import plain, zoo
from tests.testing.own.test_equality import config_of


class Chain(nn.Module):
    """Linear layers; a text says how they are called."""

    def __init__(self, how: str = ""):
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        layers = self.layers
        match self.how:
            case "skip":
                return layers[2](layers[1](y := layers[0](x) * 2)) + y
            case "backwards":
                return layers[0](layers[1](layers[2](x)))
            case "some":
                return layers[1](layers[0](x))
        return layers[2](layers[1](layers[0](x)))


def chain(how: str = "", *names: str) -> OwnModel:
    names = names or ("layers",)
    return OwnModel(lambda: Chain(how), lambda m, b: plain.rebuilt(m, [b]), torch.ones(8, 4), pipeline=names)


def trace(own: OwnModel) -> object:
    return find_chain(own, POLICIES["fp32"], 0, OwnDataset(own, "train", 0).batch(range(2)))


@pytest.mark.parametrize(("own", "says"), [
    (chain("backwards"), "'layers.2' of its pipeline does not run as number 3"),
    (chain("some"), "'layers.2' of its pipeline does not run in the forward"),
    (chain("", "layer"), "its pipeline has 'layer', which its model has not"),
    (chain("", "layers", "layers.1"), "its pipeline has 'layers.1' twice"),
    (OwnModel(lambda: nn.Linear(4, 4), plain.rebuilt, torch.ones(8, 4), pipeline="auto"), "has no ModuleList or S"),
])  # fmt: skip
def test_modules_that_are_no_chain_are_refused(own, says):
    with pytest.raises(UsageError, match=says):
        trace(own)


def test_a_chain_knows_what_its_modules_use():
    found = trace(plain.tower)
    assert found.names == tuple(f"parts.{i}" for i in range(5))
    assert [[x.shape for x in each] for each in found.crossings] == [[(2, 6)], [(2, 8)], [(2, 8)], [(2, 5)], [(2, 7)]]
    assert found.parts["stem.0.weight"] == {-1, 4} and found.parts["parts.3.0.bias"] == {3}
    assert found.metrics == ("root",) and found.place("head.1.weight") == 4
    assert found.find_shared([range(2), range(2, 4), range(4, 5)]) == ({"stem.0.weight"}, (0, 2))


def test_stages_are_balanced_by_the_work_of_their_modules():
    """The last module carries the loss and the head."""
    sizes = (4, 4, 4, 4, 32, 4)
    own = OwnModel(
        lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))),
        lambda m, b: plain.rebuilt(m, [b]), torch.ones(8, 4), pipeline="auto",
    )  # fmt: skip
    found = trace(own)
    assert found.names == ("0", "1", "2", "3", "4")
    assert found.flops == tuple(2 * 2 * a * b for a, b in pairwise(sizes))
    layout = config_of("tower", {"pp": 2}).parallel
    assert found.assign(build_layout_program(layout, 4)) == [range(4), range(4, 5)]
    layout = layout.model_copy(update={"stage_layers": (1, 4)})
    assert found.assign(build_layout_program(layout, 4)) == [range(1), range(1, 5)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_no_other_split_has_less_work_in_its_slowest_stage(work, data):
    stages = data.draw(st.integers(1, len(work)))
    cuts = [(0, *cut, len(work)) for cut in combinations(range(1, len(work)), stages - 1)]
    best = min(max(sum(work[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    found = split_work(work, stages)
    assert max(sum(work[i] for i in each) for each in found) == best
    assert [i for each in found for i in each] == [*range(len(work))] and all(found) and len(found) == stages


@pytest.mark.parametrize(("layout", "says"), [
    ({"pp": 2, "schedule": "dualpipe"}, "parallel.schedule = dualpipe with model.module: it slices"),
    ({"pp": 8}, "5 layers cannot fill 8 stages"),
])  # fmt: skip
def test_layouts_that_a_chain_cannot_have_are_refused(layout, says):
    with pytest.raises(UsageError, match=says):
        check(config_of("tower", layout))


skips = chain("skip")


def test_a_chain_is_tried_before_ranks_start():
    """A tensor that no module returns cannot be sent. Without it, the one that cannot be cut is one stage."""
    config = config_of("tower", {"pp": 3})
    named = config.model.model_copy(update={"module": f"{__file__}:skips"})
    with pytest.raises(UsageError, match=r"3 modules, and the layout 3 stages. Before 'layers.1' there is none"):
        try_samples(config.model_copy(update={"model": named}))


def test_an_encoder_and_a_decoder_send_what_later_modules_use():
    """The bias of positions of each, which its first module computes, and the encoder's output."""
    found = trace(zoo.t5)
    assert found.names == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")
    assert not found.blocked
    assert [[crossing.places for crossing in each] for each in found.crossings[1:]] == [
        [(), (("encoder.block.0", 1),)],
        [(), (("encoder", 0),)],
        [(), (("encoder", 0),), (("decoder.block.0", 1),), (("decoder.block.0", 2),)],
    ]
    assert [crossing.trained for crossing in found.crossings[3]] == [True, True, True, False]
    assert found.parts["shared.weight"] == {-1, 1, 3}


def run_of(**layout: int) -> shoal.Run:
    return shoal.Run(
        plain.Tower, plain.measured, plain.Drawn, pipeline=("parts",), global_batch=8,
        optimizer={"name": "momentum", "learning_rate": 0.01},  # Adam takes the sign of gradients that are rounding
        layout=shoal.Layout(micro_batch=2, **layout),
        train={"device": "cpu", "validate_every": 2, "validation_sequences": 4},
        metrics={"log_every": 1, "tensorboard": False}, checkpoint={"every": 2},
    )  # fmt: skip


def test_a_pipeline_resumes_without_one(rank_server, monkeypatch, tmp_path):
    monkeypatch.setattr(train_module, "start_rank_server", lambda config, device: nullcontext(rank_server))
    alone = run_of().train(4, folder=tmp_path / "alone")
    half = run_of(pp=2).train(2, folder=tmp_path / "run")
    ended = run_of(dp=2).train(4, folder=tmp_path / "run", resume=tmp_path / "run")
    assert [half.code, ended.code] == [0, 0]
    for mine, other in zip(ended.metrics, alone.metrics, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=1e-4)
        assert mine.metrics == pytest.approx(other.metrics, rel=1e-4)
    validated = [[each.validation_loss for each in run.metrics if each.validation_loss] for run in (ended, alone)]
    assert len(validated[0]) == 2 and validated[0] == pytest.approx(validated[1], rel=1e-4)
    for name, value in ended.weights().items():
        torch.testing.assert_close(value, alone.weights()[name], rtol=1e-3, atol=1e-4, msg=name)
