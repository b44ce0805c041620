"""A number that is not finite is caught before the step, and the rank and module where it began are named."""

import math
import re

import pytest
import torch
import torch.distributed as dist

from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.spec.config import build_config
from shoal.training.check import check
from shoal.training.nonfinite_locator import locate_nonfinite
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite
from tests.training.step.test_engine import Uneven, numbers_config
from tests.trainings.runs import checkpoints, curve, shoal, stored

LAYOUTS = {
    "one device": {"micro_batch": 4},
    "dp 2 x tp 2, ZeRO-1": {"dp": 2, "zero": 1, "tp": 2, "micro_batch": 2},
    "dp 4, ZeRO-3": {"dp": 4, "zero": 3, "micro_batch": 1},
    "pp 2 x dp 2, ZeRO-2": {"pp": 2, "dp": 2, "zero": 2, "micro_batch": 2},
    "pp 2 x tp 2, sequence parallel, recomputed": {
        "pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full", "micro_batch": 2},
}
STAGES = {"pp 2 x dp 2, ZeRO-2": 2, "pp 2 x tp 2, sequence parallel, recomputed": 2}


class _PoisonGradient(torch.autograd.Function):
    """Identity, whose gradient is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, math.nan)


def poison(engine: Engine, how: str, module: str) -> None:
    """Plant a NaN into what a module computes, forward or backward."""
    inner = engine.stages[0].module.get_submodule(module)
    forward = inner.forward
    if how == "forward":
        inner.forward = lambda *args: forward(*args) * math.nan
    else:
        inner.forward = lambda *args: _PoisonGradient.apply(forward(*args))


def poisoned_step(values, rank: int, how: str, module: str) -> tuple[str, str, bool, str]:
    """A good step, then one with a NaN planted on one rank: the error, the message, whether the state stayed, where."""
    config = build_config(values)
    engine = Engine(config, check(config), Mesh(config.parallel, dist.get_rank()), Uneven(config))
    engine.step(0)
    if how == "weight":
        module, shards = next(reversed(engine.parameters.weights().items()))
        if dist.get_rank() == rank:
            shards[0].tensor.view(-1)[0] = math.nan
        engine.parameters.gather()
    elif dist.get_rank() == rank:
        poison(engine, how, module)
    pieces = [piece.tensor for pieces in engine.state().values() for piece in pieces]
    before = [tensor.clone() for tensor in pieces]
    with pytest.raises(NonFinite) as caught:
        engine.step(1)
    message = locate_nonfinite(engine, 1, caught.value)
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, pieces, strict=True))
    return str(caught.value), message, same, module


def last_stage(layout: str, rank: int) -> str:
    """A module of the layer on this rank."""
    stages = STAGES.get(layout, 1)
    return "layers.1" if rank >= 2 and stages == 2 else "layers.0"


@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rank_and_the_module_where_it_began_are_named(layout, how, pool):
    config = numbers_config(LAYOUTS[layout], optimizer={"clip_norm": 1.0})
    ranks = config.parallel.world_size
    rank = ranks - 1 if how == "forward" else min(1, ranks - 1)
    module = f"{last_stage(layout, rank)}.mlp.down"
    found = pool.run(poisoned_step, ranks, plain(config), rank, how, module)
    assert len({message for _, message, _, _ in found}) == 1  # all ranks agree
    error, message, _, _ = found[0]
    assert all(same for _, _, same, _ in found)
    assert error.startswith("step 1: loss ")
    place = Mesh(config.parallel, rank).describe()
    blamed = re.search(rf"First on (.*), ({how}: .*?)(?:;.*)?\. The weights are unchanged and saved\.$", message)
    where, what = blamed.groups()
    if how == "forward":
        assert (where, what) == (place, f"forward: the output of {module}")
    else:  # `down` itself gets a good gradient; what it hands on is not
        assert place in where and f"{last_stage(layout, rank)}.mlp" in what
        assert where == place or "sequence parallel" in layout  # which gathers it on both ranks before any module


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_that_is_not_finite_is_named(layout, pool):
    config = numbers_config(LAYOUTS[layout])
    rank = config.parallel.world_size - 1
    found = pool.run(poisoned_step, rank + 1, plain(config), rank, "weight", "")
    name = found[rank][3]
    assert f"First on {Mesh(config.parallel, rank).describe()}, the weights of {name}" in found[0][1]
    assert all(same for _, _, same, _ in found)


def test_a_run_that_diverges_ends_loudly_once_and_keeps_its_last_good_state(base_config, tmp_path):
    folder = tmp_path / "run"
    diverge = ("--optimizer.learning_rate", "1e30", "--optimizer.clip_norm", "0", "--optimizer.warmup_steps", "0")
    two = ("--parallel.dp", "1", "--parallel.zero", "0", "--parallel.tp", "2", "--failover.restarts", "0")
    code, output = shoal("train", base_config, "--run-folder", folder, *two, *diverge)
    assert code == 1
    (line,) = [line for line in output.splitlines() if "The weights are unchanged and saved." in line]
    step = curve(folder)[-1][0]
    assert f"step {step}: loss" in line and re.search(r"First on rank \d .*(forward|backward): the ", line)
    assert "Traceback" not in output
    assert max(checkpoints(folder)) == step
    assert all(torch.isfinite(values).all() for values in stored(checkpoints(folder)[step]).values())
