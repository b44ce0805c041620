"""Each method against the synchronous run that it relaxes, on real engines; and what each promises by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.engine.checkpoint import Checkpointer, list_checkpoints, load
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_gather, all_reduce
from shoal.engine.collectives.shm import transport
from shoal.engine.data.batches import Batch, SyntheticDataset
from shoal.engine.models.loss import IGNORE
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig, build_config
from shoal.spec.sync_methods import COMPRESSED
from shoal.training.async_dp.engines import AsyncEngine, CompressedEngine, LocalEngine
from shoal.training.async_dp.methods.compress import Compressed
from shoal.training.async_dp.methods.quantised import Quantised
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite

STEPS = 5
SGD = {"name": "sgd", "clip_norm": 0.0, "learning_rate": 0.1, "warmup_steps": 2}
ADAM = {"name": "adamw", "clip_norm": 0.5, "learning_rate": 0.01, "warmup_steps": 2}
ENGINES = {"all-reduce": Engine, "powersgd": CompressedEngine, "topk": CompressedEngine, "onebit": CompressedEngine,
           "int8": CompressedEngine, "local-sgd": LocalEngine, "diloco": LocalEngine}


def config_of(
    sync: str, optimizer: dict[str, Any], relaxed: dict[str, Any], more: dict[str, Any] | None = None, **layout: int
) -> RunConfig:
    values = {
        "model": {"name": "tiny", "layers": layout.get("pp", 1), "hidden": 16, "heads": 2, "ffn": 32},
        "parallel": {"micro_batch": 1, "sync": sync, **layout},
        "data": {"source": "synthetic", "sequence_length": 16},
        "train": {"steps": STEPS, "global_batch": 4, "precision": "fp64", "validation_sequences": 4},
        "optimizer": optimizer,
        "relaxed": relaxed,
    }
    for section, changes in (more or {}).items():
        values[section] |= changes
    return build_config(values)


def engine_of(config: RunConfig, masked: float, kind_of_data: type[SyntheticDataset] = SyntheticDataset) -> Engine:
    shape: ModelShape = config.model.shape(vocab=64, sequence_length=16)
    mesh = Mesh(config.parallel, dist.get_rank())
    kind = ENGINES.get(config.parallel.sync, AsyncEngine)
    return kind(config, shape, mesh, kind_of_data(64, 16, 0, masked))


def train(
    config: RunConfig, masked: float, kind_of_data: type[SyntheticDataset] = SyntheticDataset
) -> list[torch.Tensor]:
    """This rank's weights after `STEPS` steps."""
    engine = engine_of(config, masked, kind_of_data)
    if isinstance(engine, AsyncEngine):
        engine.method.start(0)
        dist.barrier()
    for step in range(STEPS):
        engine.step(step)
    if isinstance(engine, AsyncEngine):
        dist.barrier()
        engine.method.settle(engine.mesh.group("dp"))
    return [bucket.master.clone() for bucket in engine.parameters.buckets]


WHOLE = {"rank": 64, "density": 1.0, "local_steps": 1, "staleness": 0, "group": 64, "global_every": 0,
         "outer_learning_rate": 1.0, "outer_momentum": 0.0, "block": 1}
SAME = {  # sync: (replicas, optimizer, share of masked targets, tp): uneven where the method weighs by tokens
    "powersgd": (2, ADAM, 0.3, 1),
    "powersgd, tp": (2, ADAM, 0.3, 2),
    "topk": (3, ADAM, 0.3, 1),
    "onebit": (3, ADAM, 0.3, 1),
    "int8": (3, ADAM, 0.3, 1),
    "local-sgd": (2, SGD, 0.0, 1),
    "diloco": (2, SGD, 0.0, 1),
    "diloco, int8": (4, SGD, 0.0, 1),
    "sgp": (2, SGD, 0.0, 1),
    "wagma": (4, SGD, 0.0, 1),
    "ps-bsp": (3, ADAM, 0.3, 1),
    "ps-ssp": (2, ADAM, 0.3, 1),
    "ps-async": (1, ADAM, 0.3, 1),
    "hogwild": (1, ADAM, 0.3, 1),
}


BATCH = {"train": {"global_batch": 24}}  # of 1, 2, 3 or 4 replicas, each in two micro-batches
MICRO_BATCH = {1: 12, 2: 6, 3: 4, 4: 3}


@pytest.fixture(scope="module")
def exact(pool) -> Callable[..., list[list[torch.Tensor]]]:
    """The synchronous run, each made once: every rank's weights by replicas, rule, share of masked targets and tp."""
    made = {}

    def weights(replicas: int, optimizer: dict[str, Any], masked: float, tp: int) -> list[list[torch.Tensor]]:
        key = replicas, optimizer["name"], masked, tp
        if key not in made:
            config = config_of(
                "all-reduce", optimizer, {}, BATCH, dp=replicas, tp=tp, micro_batch=MICRO_BATCH[replicas]
            )
            made[key] = pool.run(train, replicas * tp, config, masked)
        return made[key]

    return weights


def apart(name: str, relaxed: dict[str, Any], pool, exact) -> float:
    """How far the weights of a method are from the synchronous run's, at most, as a part of them."""
    replicas, optimizer, masked, tp = SAME[name]
    sync = name.split(",")[0]
    if name.endswith("int8"):
        relaxed = relaxed | {"outer_int8": sync == "diloco"}
    config = config_of(sync, optimizer, relaxed, BATCH, dp=replicas, tp=tp, micro_batch=MICRO_BATCH[replicas])
    mine = pool.run(train, replicas * tp, config, masked)
    return max(
        float((a - b).norm() / b.norm())
        for one, right in zip(mine, exact(*SAME[name]), strict=True)
        for a, b in zip(one, right, strict=True)
    )


@pytest.mark.parametrize("name", SAME)
def test_without_its_relaxation_each_method_is_the_synchronous_run(name, pool, exact):
    assert apart(name, WHOLE, pool, exact) < 1e-9


def test_a_bulk_synchronous_server_has_the_same_bits_each_time(pool):
    """Four replicas come in any order."""
    one, other = (pool.run(train, 4, config_of("ps-bsp", ADAM, WHOLE, BATCH, dp=4), 0.3) for _ in range(2))
    assert all(torch.equal(a, b) for mine, right in zip(one, other, strict=True)
               for a, b in zip(mine, right, strict=True))


class Lopsided(SyntheticDataset):
    """Every second sample, all of the second of two replicas, has no targets."""

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = super().batch(indices)
        batch.targets[[index % 2 == 1 for index in indices]] = IGNORE
        return batch


@pytest.mark.parametrize("sync", ["ps-bsp", "topk"])
def test_a_replica_without_targets_weighs_nothing(sync, pool):
    one, other = (
        pool.run(train, 2, config_of(how, SGD, WHOLE if how == sync else {}, dp=2), 0.0, Lopsided)
        for how in ("all-reduce", sync)
    )
    for right, mine in zip(one, other, strict=True):
        for a, b in zip(right, mine, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


RELAXED = {
    "powersgd": {"rank": 2}, "topk": {"density": 0.5}, "onebit": {"block": 8}, "int8": {"block": 2},
    "local-sgd": {"local_steps": 5}, "diloco": {"outer_learning_rate": 0.9}, "diloco, int8": {"block": 2},
    "wagma": {"group": 2},
}


@pytest.mark.parametrize("name", RELAXED)
def test_and_with_it_is_not(name, pool, exact):
    assert apart(name, WHOLE | RELAXED[name], pool, exact) > 1e-6


class FewSamples(SyntheticDataset):
    """The same four, over and over, so that the loss falls as they are learnt."""

    def batch(self, indices: Sequence[int]) -> Batch:
        return super().batch([index % 4 for index in indices])


def in_bf16(config: RunConfig) -> tuple[list[float], bool]:
    """The losses of a run, and whether in the end it computes with the weights that its optimizer has."""
    engine = engine_of(config, 0.0, FewSamples)
    if isinstance(engine, AsyncEngine):
        engine.method.start(0)
        dist.barrier()
    losses = [engine.step(step).loss for step in range(config.train.steps)]
    return losses, all(
        bucket.full.dtype == torch.bfloat16 and torch.equal(bucket.full, bucket.master.to(torch.bfloat16))
        for bucket in engine.parameters.buckets
    )


@pytest.mark.parametrize("sync", ["powersgd", "onebit", "diloco", "ps-ssp", "sgp", "wagma", "hogwild"])
def test_what_computes_in_bf16_learns(sync, pool):
    ranks = 1 if sync == "hogwild" else 2  # another could write after this rank's last step
    few = {"train": {"precision": "bf16", "steps": 12}}
    relaxed = {"local_steps": 3, "staleness": 0, "density": 0.2}
    for losses, same in pool.run(in_bf16, ranks, config_of(sync, ADAM, relaxed, few, dp=ranks)):
        assert same
        assert losses[-1] < 0.9 * losses[0]


# ---- with a pipeline inside a replica --------------------------------------------------------------------------------


def with_little_room(config: RunConfig) -> None:
    """Steps in which a stage sends more than fits between two ranks at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "PAIR_CAPACITY", 1024)
        engine = engine_of(config, 0.0)
        for step in range(2):
            engine.step(step)


@pytest.mark.parametrize("sync", ["all-reduce", "powersgd", "diloco"])
def test_stages_that_send_more_than_is_taken_wait_for_nobody_in_a_circle(sync, pool):
    pool.run(with_little_room, 4, config_of(sync, ADAM, {}, dp=2, pp=2), timeout=8.0)


# ---- compression -----------------------------------------------------------------------------------------------------


def served(exchange: Compressed) -> list[torch.Tensor | float]:
    """What all servers together have left out of each parameter's sum."""
    if not isinstance(exchange, Quantised):
        return [0.0] * len(exchange.tensors)
    coded = exchange.coded
    every = all_gather(coded.error, coded.group)
    assert not every[~coded.used].any()
    return [place.view_as(t).clone() for place, t in zip(coded.places(every), exchange.tensors, strict=True)]


def feedback(config: RunConfig) -> list[float]:
    """Rounds of random gradients; returns what is left unsent of each, as a part of what was to be sent."""
    engine = engine_of(config, 0.0)
    flat, exchange, group = engine.flat, engine.method, engine.mesh.group("dp")
    random = torch.Generator().manual_seed(dist.get_rank())
    left = []
    for _ in range(4):
        for part in flat.parts:
            part.view(flat.gradients).normal_(generator=random)
        wanted = [g + e for g, e in zip(flat.gradients, exchange.errors, strict=True)]
        late = served(exchange)
        exchange.sum()
        for part, before, after in zip(flat.parts, late, served(exchange), strict=True):
            sent = all_reduce(part.view(wanted) - part.view(exchange.errors), group)
            assert torch.allclose(sent, part.view(flat.gradients) + after - before, rtol=0, atol=1e-12)
        for total in flat.gradients:
            first = total.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, total)  # the same bits everywhere
        unsent, all_of_it = (torch.cat(flats).square().sum() for flats in (exchange.errors, wanted))
        left.append(float(unsent / all_of_it))
    return left


@pytest.mark.parametrize("sync", ["powersgd", "topk", "onebit", "int8"])
def test_what_is_sent_and_what_is_kept_add_up_and_each_code_contracts(sync, pool):
    config = config_of(sync, SGD, {"rank": 2, "density": 0.1}, dp=3)
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 3})})
    for left in pool.run(feedback, 3, config):
        assert all(0 < part < 1 for part in left)
        assert sync != "int8" or max(left) < 1e-4


def sent_bytes(config: RunConfig) -> tuple[float, list[int]]:
    """What this rank sends in one exchange, and the sizes of the parameters."""
    engine = engine_of(config, 0.0)
    before = engine.mesh.sent().total()
    engine.method.sum()
    return engine.mesh.sent().total() - before, [tensor.numel() for tensor in engine.method.tensors]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("sync", "least"), [("powersgd", 3), ("topk", 50), ("onebit", 30), ("int8", 6)])
def test_less_is_sent(sync, least, ranks, pool):
    more = {"train": {"global_batch": ranks}, "model": {"layers": 2}}
    config = config_of(sync, SGD, {"rank": 1, "density": 0.01}, more, dp=ranks)
    for sent, sizes in pool.run(sent_bytes, ranks, config):
        plain = 2 * (ranks - 1) / ranks * 8 * sum(sizes)  # of an all-reduce in float64
        assert plain / sent > (least if sync != "topk" else 2 * least / ranks)  # a gather
        if sync in ("onebit", "int8"):  # the same part of the plain one for any number of ranks
            row = {"onebit": 256 // 8 + 2 * 8, "int8": 256 + 8}[sync]
            share = -(-sum(-(-n // 256) for n in sizes) // ranks)
            assert sent == 2 * (ranks - 1) * share * row


def spoilt(config: RunConfig) -> tuple[bool, bool, bool]:
    """A step in which a gradient of rank 1 is not a number: whether it is refused, and all states are as before."""
    engine = engine_of(config, 0.0)
    engine.step(0)
    before = {name: [piece.tensor.clone() for piece in pieces] for name, pieces in engine.state().items()}
    complete = engine.parameters.sum_ends

    def spoil() -> None:
        complete()
        if dist.get_rank() == 1:
            engine.flat.gradients[0][3] = float("nan")

    engine.parameters.sum_ends = spoil
    with pytest.raises(NonFinite) as error:
        engine.step(1)
    after = engine.state()
    return error.value.untouched, all(
        torch.equal(piece.tensor, old)
        for name, pieces in after.items() for piece, old in zip(pieces, before[name], strict=True)
    ), any("error" in name for name in after)


@pytest.mark.parametrize("sync", COMPRESSED)
def test_a_gradient_that_is_no_number_spoils_no_error(sync, pool):
    config = config_of(sync, ADAM, {"rank": 2, "density": 0.1}, dp=2)
    assert pool.run(spoilt, 2, config) == [(True, True, True)] * 2


def kept(config: RunConfig, folder: Path) -> list[str]:
    """Save the state of some steps and load it into a new engine: which of the names it has came back otherwise."""
    engine = engine_of(config, 0.0)
    for step in range(2):
        engine.step(step)
    saver = Checkpointer(folder, group=dist.group.WORLD, keep=1, asynchronous=False)
    saver.save(2, engine.state(), {}, block=True)
    saver.close()
    (_, path), = list_checkpoints(folder)
    other = engine_of(config, 0.0)
    load(path, other.state(), group=dist.group.WORLD)
    other.restored(2)
    right = engine.state()
    return [
        name for name, pieces in other.state().items()
        if not all(torch.equal(a.tensor, b.tensor) for a, b in zip(pieces, right[name], strict=True))
    ]


@pytest.mark.parametrize(
    "layout", [{"pp": 2}, {"pp": 2, "schedule": "zb-v"}, {"pp": 2, "schedule": "dualpipe"}, {"tp": 2, "dp": 2}], ids=str
)
def test_powersgd_saves_each_factor_once_also_of_a_tied_embedding(layout, pool, tmp_path):
    config = config_of("powersgd", ADAM, {"rank": 2}, {"model": {"name": "tiny-gpt", "layers": 4}}, **layout)
    assert config.model.shape(vocab=64, sequence_length=16).tied
    for wrong in pool.run(kept, config.parallel.world_size, config, tmp_path):
        assert not wrong


# ---- staleness -------------------------------------------------------------------------------------------------------


def ahead(config: RunConfig, slow: float) -> tuple[int, float, int]:
    """With a slow rank 0: how far this rank was ahead of the slowest, at most; and the staleness of its updates."""
    engine = engine_of(config, 0.3)
    engine.method.start(0)
    dist.barrier()
    most, update = 0, engine.method.update

    def late(step: int, *args: Any) -> None:
        if step == 0:
            dist.barrier()  # all have read the weights; otherwise the fast may end before the slow one begins
        time.sleep(slow if dist.get_rank() == 0 else 0)
        update(step, *args)

    engine.method.update = late
    for step in range(STEPS):
        engine.step(step)
        engine.method.before(step + 1)
        most = max(most, step + 1 - engine.method.slowest())
    dist.barrier()
    return most, engine.method.staleness.total, engine.method.staleness.most


@pytest.mark.parametrize("bound", [1, 2])
def test_no_worker_is_ahead_by_more_than_the_bound(bound, pool):
    found = pool.run(ahead, 3, config_of("ps-ssp", SGD, {"staleness": bound}, dp=3, micro_batch=1).model_copy(
        update={"train": config_of("ps-ssp", SGD, {}).train.model_copy(update={"global_batch": 3})}), 0.05)
    assert max(most for most, _, _ in found) == bound  # reached, and not exceeded
    # Of the others, between a pull and its push: at most those of the steps in the window, and their own.
    assert max(stale for _, _, stale in found) <= 2 * (2 * bound + 1)


def test_without_a_bound_the_fast_run_ahead_and_staleness_is_seen(pool):
    found = pool.run(ahead, 2, config_of("ps-async", SGD, {}, dp=2), 0.2)
    assert found[1][0] >= 3
    assert found[0][1] + found[1][1] > 0


def divided(config: RunConfig) -> float:
    """How far one push moves the weights after three others came in between."""
    engine = engine_of(config, 0.0)
    engine.method.start(0)
    engine.step(0)
    before = torch.cat(engine.method.weights).clone()
    engine.method.before(1)
    for gradients in engine.flat.gradients:
        gradients.fill_(1.0)
    method = engine.method
    for k in method.rules:
        method.window.set(method._versions + k, method._version(k) + 3)
    method.update(1, 0.1, 1)
    part = engine.flat.parts[0]
    return float((before - torch.cat(method.weights))[part.start])


def test_the_learning_rate_is_divided_by_the_staleness(pool):
    moves = {}
    for aware in (True, False):
        config = config_of("ps-async", SGD | {"weight_decay": 0.0}, {"staleness_aware": aware}, dp=1)
        (moves[aware],) = pool.run(divided, 1, config)
    assert moves[False] == pytest.approx(0.1) and moves[True] == pytest.approx(0.1 / 3)
