"""What a replica is foretold to keep is what its tensors take."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.launch.checks.memory import RankMemory, count_rank_memory
from shoal.spec.config import RunConfig
from shoal.spec.sync_methods import COMPRESSED, LOCAL, UNSYNCHRONISED
from shoal.training.async_dp.engines import AsyncEngine, CompressedEngine, LocalEngine
from shoal.training.async_dp.methods.quantised import Quantised
from tests.training.async_dp.test_methods import ADAM, config_of, engine_of


def tensors_of(*owners: object) -> Iterator[torch.Tensor]:
    """In their attributes, and in lists of them."""
    for owner in owners:
        for value in vars(owner).values():
            yield from (t for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor))


def has(config: RunConfig) -> tuple[float, RankMemory]:
    """Bytes of this rank's tensors, with its equal part of those that all share; and what was foretold of them."""
    engine = engine_of(config, 0.0)
    parameters, optimizer = engine.parameters, engine.optimizer
    owners = [*parameters.buckets, *parameters.gradients]
    rules, common = [optimizer], 0.0
    if isinstance(engine, AsyncEngine):
        owners.append(engine.method)
        rules = list(getattr(engine.method, "rules", {0: optimizer}).values())
        common = engine.window._used - engine.board.nbytes
    elif isinstance(engine, CompressedEngine):
        owners += [engine.method, *([engine.method.coded] if isinstance(engine.method, Quantised) else [])]
    elif isinstance(engine, LocalEngine):
        owners += [engine.method, *([engine.method.coded] if engine.method.coded else [])]
    elif config.parallel.zero:
        common = sum(bucket.full.nbytes for bucket in parameters.buckets)
    states = [p.tensor for rule in rules for kind in rule.states().values() for ps in kind.values() for p in ps]
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*tensors_of(*owners), *states)}
    shared = [engine.window._data] if isinstance(engine, AsyncEngine) else []
    if config.parallel.zero:
        shared = [bucket.full for bucket in parameters.buckets]
    for tensor in shared:
        own.pop(tensor.untyped_storage().data_ptr(), None)
    said, = count_rank_memory(config, engine.shape, torch.device("cpu"), one_host=True)
    return sum(own.values()) + common / engine.mesh.size("dp"), said


def test_what_a_method_keeps_is_foretold(pool):
    names = [(name, "bf16") for name in (*COMPRESSED, *LOCAL, "diloco, int8", *UNSYNCHRONISED, "all-reduce")]
    for name, precision in (*names, ("hogwild", "fp32"), ("all-reduce", "fp32")):  # without copies to compute with
        sync, relaxed = name.split(",")[0], {"outer_int8": True} if name == "diloco, int8" else {}
        more = {"model": {"hidden": 64, "ffn": 160}, "train": {"precision": precision}}
        config = config_of(sync, ADAM, relaxed, more, dp=2, zero=int(sync == "all-reduce"))
        for found, said in pool.run(has, 2, config):
            foretold = said.total - said.activations
            assert foretold - 1024 < found < 1.05 * foretold, (name, found, said)


def compiled(config: RunConfig) -> bool:
    """Whether the rule that updates the weights is."""
    return all(rule._compiled is not None for rule in engine_of(config, 0.0).method.rules.values())


def test_a_server_compiles_its_rule_where_an_engine_does(pool):
    config = config_of("ps-async", ADAM | {"name": "sage"}, {}, {"train": {"compile": True}})
    assert pool.run(compiled, 1, config) == [True]
