"""Relaxed data parallelism of one's own modules: exact where a method's settings make it so; replicas agree."""

import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.spec.config import RunConfig
from shoal.training.async_dp.engines import engine_class
from shoal.training.check import check
from shoal.training.samples import open_samples
from tests.testing.own.test_equality import config_of

State = dict[str, torch.Tensor]


def relaxed(name: str, sync: str, fields: dict, **layout: int) -> RunConfig:
    optimizer = {"name": "sgd", "clip_norm": 0, "learning_rate": 0.01, "weight_decay": 0}
    sections = {"relaxed": fields, "optimizer": optimizer,
                "train": {"global_batch": 8, "precision": "fp64", "validate_every": 0}, "checkpoint": {"every": 0},
                "metrics": {"log_every": 2}}  # fmt: skip
    return config_of(name, {"dp": 2, "sync": sync} | layout, **sections)


def train(config: RunConfig) -> tuple[State, State, float]:
    """Return this rank's weights and buffers after two steps, what it saves of them, and the validation loss."""
    engine = engine_class(config)(
        config, check(config), Mesh(config.parallel, dist.get_rank()), open_samples(config, "train"))
    for step in range(2):
        engine.step(step)
    kept = {name: pieces for name, pieces in engine.state().items() if name.startswith("model.")}
    mine = {name: piece.tensor.clone() for name, pieces in kept.items() for piece in pieces}
    saved = {name: piece.tensor.clone() for name, pieces in kept.items() for piece in pieces if piece.primary}
    return mine, saved, engine.evaluate(open_samples(config, "validation"))


@pytest.mark.parametrize(("name", "sync", "fields"), [
    ("unet", "local-sgd", {"local_steps": 1}),  # the mean of weights is an update by the mean of gradients
    ("lstm", "topk", {"density": 1.0}),  # terms differ between replicas
    ("unet", "diloco", {"local_steps": 2}),
])  # fmt: skip
def test_replicas_agree_and_are_exact_where_the_method_is(name, sync, fields, pool):
    first, second = pool.run(train, 2, relaxed(name, sync, fields))
    wanted, *_ = pool.run(train, 2, relaxed(name, "all-reduce", {}))
    assert first[1].keys() == wanted[1].keys() and not second[1]  # the first replica saves all
    for key, value in first[0].items():
        torch.testing.assert_close(value, second[0][key], rtol=0, atol=0, msg=key)
        if sync != "diloco":
            torch.testing.assert_close(value, wanted[0][key], rtol=1e-9, atol=1e-12, msg=key)
    assert first[2] == second[2] == pytest.approx(wanted[2], rel=1e-1 if sync == "diloco" else 1e-9)


@pytest.mark.parametrize(("name", "sync", "layout", "says"), [
    ("lstm", "hogwild", {}, "parallel.sync = 'hogwild' with model.module, whose buffers are means over all replicas"),
    ("routed", "topk", {"ep": 2}, "parallel.sync = 'topk' with parallel.ep and model.module"),
])  # fmt: skip
def test_what_replicas_cannot_do_is_refused(name, sync, layout, says):
    with pytest.raises(UsageError, match=says):
        check(relaxed(name, sync, {}, **layout))
