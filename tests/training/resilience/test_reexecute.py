"""A step that is computed twice finds the rank that computes wrong, now and then or always."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.spec.config import build_config
from shoal.training.check import check
from shoal.training.nonfinite_locator import ValueWatch
from shoal.training.resilience.reexecute import find_faulty_ranks, reexecute, trace
from shoal.training.resilience.replicas import SilentFailure
from shoal.training.step.engine import Engine
from tests.training.step.test_engine import Uneven, numbers_config

LAYOUTS = {
    "one device": {"micro_batch": 4},
    "dp 3, ZeRO-1": {"dp": 3, "zero": 1, "micro_batch": 2},
    "dp 4, ZeRO-3": {"dp": 4, "zero": 3, "micro_batch": 1},
    "pp 2 x dp 2, ZeRO-2": {"pp": 2, "dp": 2, "zero": 2, "micro_batch": 2},
    "dp 2 x tp 2": {"dp": 2, "tp": 2, "micro_batch": 2},
}


@pytest.mark.parametrize(("device", "strict"), [("cpu", False), ("cuda", True)])
def test_what_is_computed_twice_is_computed_reproducibly(monkeypatch, device, strict):
    """On CUDA attention's backward adds in any order, unless it is told not to: that would look like corruption."""
    seen = []
    monkeypatch.setattr(
        ValueWatch, "run", lambda self, engine, step: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    mesh = SimpleNamespace(device=torch.device(device))
    trace(SimpleNamespace(mesh=mesh, program=SimpleNamespace(depth=1), get_batches=None, make_batches=None), 1)
    assert seen == [strict] and not torch.are_deterministic_algorithms_enabled()


class _Flip(torch.autograd.Function):
    """Identity, that flips a bit of the largest number, forward or backward."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return flipped(x) if how == "forward" else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return flipped(gradient) if ctx.how == "backward" else gradient, None


def flipped(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous().clone()
    at = int(x.abs().argmax())
    x.view(-1)[at : at + 1].view(torch.uint8)[4] ^= 1  # of 64: by a millionth of it
    return x


def wrong(values, rank: int, how: str, calls: tuple[int, ...] | None, where: str) -> str | None:
    """A rank computes wrong in some calls of a module (None: in all); what the check says."""
    config = build_config(values)
    engine = Engine(config, check(config), Mesh(config.parallel, dist.get_rank()), Uneven(config))
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    engine.step(0)
    pieces = [piece.tensor for pieces in engine.state().values() for piece in pieces]
    before = [tensor.clone() for tensor in pieces]
    reexecute(engine, 1, group, where)  # nothing is wrong yet
    assert all(torch.equal(a, b) for a, b in zip(before, pieces, strict=True))
    if dist.get_rank() == rank:
        stage = engine.stages[0].module
        inner = stage.layers[next(iter(stage.layers))].mlp.down
        forward, called = inner.forward, iter(range(10**6))
        inner.forward = lambda *args: (
            _Flip.apply(forward(*args), how) if calls is None or next(called) in calls else forward(*args)
        )
    try:
        reexecute(engine, 1, group, where)
    except SilentFailure as error:
        return f"{error.ranks}: {error}"
    return None


@pytest.mark.parametrize(("layout", "how"), [*zip(LAYOUTS, ("forward", "backward") * 3, strict=False)])
def test_what_comes_and_goes_is_found_on_the_same_rank(layout, how, pool):
    config = numbers_config(LAYOUTS[layout], train={"global_batch": 12 if "dp 3" in layout else 8})
    ranks = config.parallel.world_size
    rank = ranks - 1
    said = pool.run(wrong, ranks, plain(config), rank, how, (0,), "same")
    assert len(set(said)) == 1 and said[0], said
    layer = 1 if config.parallel.pp == 2 else 0
    place = Mesh(config.parallel, rank).describe()
    assert said[0].startswith(f"[{rank}]: step 1, computed twice, gave two results: {place}, ")
    assert f"{how}: the " in said[0] and f"layers.{layer}.mlp" in said[0]


def test_what_is_always_wrong_is_found_on_another_replica_alone(pool):
    config = numbers_config(LAYOUTS["dp 3, ZeRO-1"], train={"global_batch": 12})
    assert pool.run(wrong, 3, plain(config), 1, "forward", None, "same") == [None] * 3
    said = pool.run(wrong, 3, plain(config), 1, "forward", None, "replica")
    assert said[0].startswith("[1]: step 1, computed twice, gave two results: rank 1 (dp_shard 1), forward: ")


def test_of_two_replicas_either_may_be_wrong(pool):
    config = numbers_config(LAYOUTS["dp 2 x tp 2"])
    said = pool.run(wrong, 4, plain(config), 3, "backward", None, "replica")
    assert said[0].startswith("[1, 3]: ") and " or rank 3" in said[0]


def test_the_earliest_difference_counts():
    good, late, early = [[(1, 0, 1), "a", 1], [(1, 0, 2), "b", 2]], [[(1, 0, 1), "a", 1], [(1, 0, 2), "b", 9]], None
    early = [[(1, 0, 1), "a", 8], [(1, 0, 2), "b", 9]]
    assert find_faulty_ranks([[good, good, 0, "rank 0"], [good, good, 1, "rank 1"]]) is None
    verdict = find_faulty_ranks([[good, late, 0, "rank 0"], [good, early, 1, "rank 1"]])
    assert verdict == {"where": "rank 1, a", "ranks": [1]}
