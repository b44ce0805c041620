"""Parameters without a gradient, and the order of the reductions: no rank waits for another bucket than the rest."""

from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from shoal.engine.models.transformer import Transformer, initialise
from shoal.engine.parallel.zero.zero_engine import ShardedParameters
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from shoal.training.step.engine import Engine
from tests.engine.parallel.counting import engine_of, watched
from tests.testing.verify.runs import small_run

SKIPPED, STEPS, RATE = 1, 3, 0.1


def run_of(parallel: dict, *, microbatches: int = 2) -> RunConfig:
    """Plain SGD in float64, so that a weight that differs is a gradient that did."""
    config = small_run(
        {"micro_batch": 1, "bucket_mb": 0.001, **parallel}, {"layers": 4}, precision="fp64",
        global_batch=microbatches * parallel["dp"],
    )
    optimizer = config.optimizer.model_copy(update={
        "name": "sgd", "learning_rate": RATE, "weight_decay": 0.0, "clip_norm": 0.0, "warmup_steps": 0,
        "schedule": "constant",
    })
    return config.model_copy(update={"optimizer": optimizer})


def leave_out(model: Transformer, layer: int, tokens: list[int]) -> None:
    """Have a sequence that starts with one of some tokens pass by a layer: as an expert that nobody chooses."""
    module, first = model.layers[str(layer)], {}
    model.register_forward_pre_hook(lambda _, args: first.update(token=int(args[0][0, 0])))

    def forward(self: nn.Module, x: Tensor, *rest):
        return x * 1.0 if first["token"] in tokens else type(self).forward(self, x, *rest)

    module.forward = MethodType(forward, module)


def freeze(model: Transformer, frozen: bool) -> None:
    """The embedding and a matrix."""
    for parameter in (model.embed.token.weight, model.layers["2"].mlp.down.weight):
        parameter.requires_grad_(not frozen)


def prepared(engine: Engine, *, frozen: bool, tokens: list[int]) -> dict[str, nn.Parameter]:
    (stage,) = engine.stages
    leave_out(stage.module, SKIPPED, tokens)
    freeze(stage.module, frozen)
    return dict(stage.module.named_parameters())


def weights(config: RunConfig, frozen: bool, tokens: list[int]) -> tuple[dict[str, Tensor], list[list[int]], set[int]]:
    """What some steps make of this rank's pieces; the orders of the reductions; which first tokens it has seen."""
    engine = engine_of(config)
    prepared(engine, frozen=frozen, tokens=tokens)
    seen: set[int] = set()
    engine.stages[0].module.register_forward_pre_hook(lambda _, args: seen.add(int(args[0][0, 0])))
    for step in range(STEPS):
        engine.step(step)
    pieces = {
        f"{name}{piece.box.slices}": (name, piece.box.slices, piece.tensor.clone())
        for name, held in engine.parameters.weights().items() for piece in held
    }
    return pieces, [stage.parameters.order for stage in engine.stages], seen


def expected(config: RunConfig, frozen: bool, tokens: list[int]) -> dict[str, Tensor]:
    """The same on one device, by torch alone."""
    engine = engine_of(config.model_copy(update={"parallel": type(config.parallel)()}))
    model = Transformer(engine.shape).double()
    initialise(model, config.train.seed)
    leave_out(model, SKIPPED, tokens)
    freeze(model, frozen)
    n = config.train.global_batch
    for step in range(STEPS):
        batches = [engine.samples.batch([step * n + i]) for i in range(n)]
        total = sum(batch.unmasked() for batch in batches)
        model.zero_grad(set_to_none=True)
        for batch in batches:
            (model(batch.tokens, batch.targets, batch.documents) / total).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


CASES = [
    ({"dp": 2}, True), ({"dp": 2, "overlap": False}, False), ({"dp": 3, "zero": 1}, True),
    ({"dp": 2, "zero": 2}, False), ({"dp": 4, "zero": 2, "zero_shard": 2}, True), ({"dp": 2, "zero": 3}, False),
    ({"dp": 3, "zero": 3, "prefetch": 0}, True), ({"dp": 2, "zero": 3, "reshard_after_forward": False}, False),
]


@pytest.mark.parametrize(("parallel", "frozen"), CASES, ids=str)
def test_what_gets_no_gradient_changes_nothing_else(pool: Pool, parallel: dict, frozen: bool) -> None:
    """A layer is passed by for half of the sequences: by all ranks, by some, by none, as it comes."""
    config, tokens = run_of(parallel), list(range(0, 300, 2))
    (whole,) = pool.run(expected, 1, config, frozen, tokens)
    found = pool.run(weights, parallel["dp"], config, frozen, tokens)
    assert any({token % 2 for token in seen} == {0, 1} for _, _, seen in found)
    for pieces, orders, _ in found:
        assert orders == found[0][1]
        for name, where, tensor in pieces.values():
            torch.testing.assert_close(tensor, whole[name][where], rtol=1e-9, atol=1e-12)


def overlapped(config: RunConfig) -> tuple[list[int], list[int], list[str]]:
    """The order of the reductions; that in which buckets were complete; when they were reduced."""
    engine = engine_of(config)
    (parameters,) = engine.parameters.stages
    complete: list[int] = []
    reduce_complete = ShardedParameters._reduce_complete

    def watching(self: ShardedParameters) -> None:
        complete.extend(b for b in self._completed if b not in complete)
        reduce_complete(self)

    ShardedParameters._reduce_complete = watching
    try:
        engine.step(0)
    finally:
        ShardedParameters._reduce_complete = reduce_complete
    events: list[str] = []
    weight = dict(engine.stages[0].module.named_parameters())["embed.token.weight"]
    weight.register_post_accumulate_grad_hook(lambda _: events.append("backward ends"))
    with watched(events.append):
        engine.step(1)
    return parameters.order, complete, events


def test_the_order_is_that_of_backward(pool: Pool) -> None:
    """And so reductions overlap with backward."""
    for order, complete, events in pool.run(overlapped, 2, run_of({"dp": 2}, microbatches=1)):
        assert order == complete == [5, 4, 3, 2, 1, 0]
        assert events[: events.index("backward ends")].count("start_all_reduce") >= 5


def in_turn(config: RunConfig) -> list[str]:
    engine = engine_of(config)
    engine.step(0)
    events: list[str] = []
    weight = dict(engine.stages[0].module.named_parameters())["embed.token.weight"]
    weight.register_post_accumulate_grad_hook(lambda _: events.append("backward ends"))
    with watched(events.append):
        engine.step(1)
    return events


def test_without_overlap_everything_is_reduced_after_backward(pool: Pool) -> None:
    for events in pool.run(in_turn, 2, run_of({"dp": 2, "overlap": False}, microbatches=1)):
        ends = events.index("backward ends")
        assert "start_all_reduce" not in events[1:ends]  # the first is the count of tokens
        assert events[ends:].count("start_all_reduce") == 6 + 1  # and the norm
