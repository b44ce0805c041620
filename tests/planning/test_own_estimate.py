"""Estimates of a model of one's own are what its engine holds, and what its operators compute."""

import pytest
import torch.distributed as dist
from torch import nn

import shoal
from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.planning.own_estimate import count_own_model, estimate_own_model
from shoal.planning.own_search import plan_own_model
from shoal.spec.config import RunConfig
from shoal.training.check import check
from shoal.training.samples import open_samples
from shoal.training.step.own_engine import OwnEngine
from tests.testing.own import plain
from tests.testing.own.test_equality import config_of


def held(config: RunConfig) -> tuple[dict[str, int], int]:
    mesh = Mesh(config.parallel, dist.get_rank())
    engine = OwnEngine(config, check(config), mesh, open_samples(config, "train"))
    engine.step(0)
    return engine.parameters.bytes(), engine.optimizer.bytes()


@pytest.mark.parametrize(("name", "layout", "precision"), [
    ("wide_llama", {"dp": 2, "tp": 2, "zero": 1}, "bf16"),
    ("nadam", {"dp": 2}, "fp32"),
    ("llama", {"dp": 2, "zero": 3}, "fp32"),
])  # fmt: skip
def test_states_are_those_of_the_engine(name, layout, precision, pool):
    config = config_of(name, layout, train={"global_batch": 8, "precision": precision})
    memory = estimate_own_model(config).memory
    bytes_, optimizer = pool.run(held, config.parallel.world_size, config)[0]
    found = bytes_["parameters"], bytes_["gradients"], optimizer
    assert found == pytest.approx([memory[kind] for kind in ("weights", "gradients", "optimizer")], rel=0.02)  # padding


def test_flops_and_saved_tensors_of_a_linear_layer_are_counted():
    own = shoal.OwnModel(lambda: nn.Linear(4, 8), lambda m, b: (m(b[0].flatten(1)[:, :4]).sum(), 1), plain.Images)
    config = config_of("unet", {})
    counts = count_own_model(own, config)
    assert (counts.parameters, counts.flops, counts.real) == (40, 2 * 2 * (2 * 4 * 8), False)  # and of the weights
    assert count_own_model(plain.odd, config).real  # it reads a value
    assert count_own_model(plain.lstm, config_of("lstm", {})).flops > 6 * 8000 * 2 * plain.LENGTH


def large_run(side: int, **arguments: object) -> shoal.Run:
    return shoal.Run(
        model=lambda: nn.Linear(side, side), loss=lambda m, b: (m(b[0].sum((1, 2, 3)).expand(side)).sum(), 1),
        data=plain.Images, **arguments,
    )  # fmt: skip


def test_the_fastest_layout_that_fits_is_planned():
    found = [each.config.parallel for each in plan_own_model(config_of("wide_llama", {}), "4xH100")]
    assert {layout.tp for layout in found} == {1, 2}  # tp 4 does not divide its heads
    assert all(layout.world_size == 4 for layout in found)
    assert (found[0].dp, found[0].zero) == (4, 0)  # nothing else is needed
    planned = large_run(100_000, layout="auto", cluster="8xH100", global_batch=8).config.parallel
    assert (planned.dp, planned.zero) == (8, 2)  # 40 GB of weights, and as much of gradients
    with pytest.raises(UsageError, match=r"no layout on 8 x h100-sxm fits; the nearest, dp 8 .ZeRO-2.*220 GB"):
        large_run(200_000, layout="auto", cluster="8xH100", global_batch=8)
    with pytest.raises(UsageError, match=r"layout 'auto' needs cluster"):
        large_run(4, layout="auto")


def test_a_model_that_is_too_large_is_said_without_being_built():
    run = large_run(200_000, global_batch=9)
    found = run.estimate()
    assert not found.fits and any("does not fit" in line for line in found.lines())
    with pytest.raises(UsageError, match=r"dp 9 .* needs 9 accelerators, and 8 x h100"):
        run.estimate(shoal.Layout(dp=9))
    with pytest.raises(UsageError, match=r"train.global_batch = 9 is no multiple of dp 2 x micro_batch 1"):
        run.estimate(shoal.Layout(dp=2))
    with pytest.raises(UsageError, match=r"count parallel.dp and tp"):
        run.estimate(shoal.Layout(pp=2))
