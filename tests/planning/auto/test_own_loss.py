"""Splits of the operators of a model of one's own are trained to what one device computes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.own.definition import load_own_model
from shoal.engine.sharding.loss import PlannedLoss
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.planning.auto import own_loss, search
from shoal.planning.auto.intra.ilp import Solution, solve
from shoal.planning.auto.own_loss import plan_loss, with_plan
from shoal.spec.catalog.clusters import cluster
from shoal.testing.verify.own_model import compare_own_model
from shoal.training.check import check
from shoal.training.samples import open_samples
from shoal.training.step.own_engine import OwnEngine
from tests.testing.own import plain
from tests.testing.own.test_equality import config_of


def choose_randomly(seed: int):
    rng = np.random.default_rng(seed)

    def solved(problem, *_):
        moved = [replace(d, costs=d.costs + rng.random(len(d.costs)) * 1e-3) for d in problem.decisions]
        chosen = solve(replace(problem, decisions=moved)).chosen
        return Solution(chosen, problem.cost(chosen))

    return solved


@pytest.mark.parametrize(("name", "layout", "sections"), [
    ("tied", {"tp": 2, "dp": 2, "zero": 1}, {}),
    ("tied", {"tp": 4}, {"optimizer": {"name": "muon"}}),
    ("dense", {"tp": 2, "dp": 2, "zero": 3}, {"optimizer": {"name": "adagrad"}}),
    ("dense", {"tp": 4}, {"optimizer": {"name": "adafactor"}}),
])  # fmt: skip
def test_any_split_of_operators_trains_as_one_device(name, layout, sections, pool, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "solve", choose_randomly(layout["tp"]))
    if layout["tp"] == 4:
        monkeypatch.setattr(own_loss, "NamedMesh", lambda *_: NamedMesh("xy", (2, 2)))
    config = config_of(name, layout, **sections)
    exact = config.train.model_copy(update={"precision": "fp64"})  # of the comparison
    config = with_plan(config.model_copy(update={"train": exact}), tmp_path)
    plan = load_own_model(config.model.module).tensor_parallel.plan
    split = {weight: str(kept) for weight, (kept, *_) in plan.weight_shardings().items() if kept.used}
    assert split and {move.kind for each in plan.reshardings for move in each.moves} > {"all-reduce"}
    verdict = compare_own_model(pool, config, steps=2)
    assert not verdict.findings, (verdict.findings[0].text, split)


def start(configs: list) -> str:
    config = configs[dist.get_rank()]
    try:
        OwnEngine(config, check(config), Mesh(config.parallel, dist.get_rank()), open_samples(config, "train"))
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_with_other_splits_are_refused(pool, monkeypatch, tmp_path):
    configs = []
    for seed in range(2):
        (tmp_path / f"{seed}").mkdir()
        monkeypatch.setattr(search, "solve", choose_randomly(seed))
        configs.append(with_plan(config_of("dense", {"tp": 2}), tmp_path / f"{seed}"))
    assert all("found other splits on other ranks" in said for said in pool.run(start, 2, configs))


def test_what_a_split_does_not_fit_is_refused(tmp_path):
    config = with_plan(config_of("dense", {"tp": 2}), tmp_path)
    own = load_own_model(config.model.module)
    module, loss = own.build(0), own.tensor_parallel
    loss.split(module, 0)
    planned = PlannedLoss(loss, module, Mesh(config.parallel, 0))
    with pytest.raises(UsageError, match=r"its batch is \[3, 3, 16, 16\] of float32, .* planned for \[2, 3, 16, 16\]"):
        planned.compute([torch.zeros(3, 3, 16, 16), torch.zeros(3, dtype=torch.long)])
    for changed, says in (
        ({"micro_batch": 4}, r"micro_batch 4 in fp32: the operators were split for tp 2 with micro_batch 2 in fp32"),
        ({"sequence_parallel": True}, r"pp, ep, recompute or sequence_parallel with tensor_parallel = 'auto'"),
    ):
        with pytest.raises(UsageError, match=says):
            check(config.model_copy(update={"parallel": config.parallel.model_copy(update=changed)}))
    with pytest.raises(UsageError, match=r"tensor_parallel = 'auto': no split .* has been planned"):
        check(config_of("dense", {"tp": 2}))


def noisy(model: torch.nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return plain.rebuilt(model, [batch[0] + torch.rand_like(batch[0])])


@pytest.mark.parametrize(("own", "says"), [
    (plain.unet, "UNet: its forward pass changes module.down.1.running_mean"),
    (replace(plain.dense, loss=noisy), "each device would draw its own random numbers"),
])  # fmt: skip
def test_a_loss_without_a_split_is_refused_before_ranks_start(own, says):
    with pytest.raises(UsageError, match=f"(?s){says}"):
        plan_loss(own, config_of("dense", {"tp": 2}), cluster("8xH100"))
