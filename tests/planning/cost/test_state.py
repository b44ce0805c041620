"""What formulas say stays on a rank is what the engine holds, to the byte."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.models.transformer import Transformer
from shoal.engine.optim.build import RULES
from shoal.engine.optim.build import build as build_rule
from shoal.engine.optim.shards import Shards
from shoal.engine.precision.policy import POLICIES
from shoal.launch.worker_pool import Pool
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.parameters import StagePart, rank_parts
from shoal.spec.catalog import model_shape
from shoal.spec.config import OptimizerConfig, RunConfig
from shoal.spec.layout import Layout
from shoal.testing.verify.case import prepare
from shoal.training.dry_run.tracker import Tracker
from shoal.training.step.engine import Engine
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import runs, small_run


def held(config: RunConfig) -> tuple[dict[str, int], dict[str, int]]:
    """What the engine of this rank reports, and what the formulas say."""
    engine: Engine = engine_of(config)
    mesh, layout = engine.mesh, config.parallel
    parts = rank_parts(engine.shape, engine.program, mesh.index("pp"))
    said = state_bytes(
        engine.shape, layout, engine.policy, config.optimizer.name, parts,
        tp_index=mesh.index("tp"), shard_index=mesh.index("shard"),
        expert_index=(mesh.index("edp_shard"), mesh.index("ep"), mesh.index("etp")),
    )
    bytes_of = engine.parameters.bytes()
    found = {name: bytes_of[name] for name in ("parameters", "gradients")} | {"optimizer": engine.optimizer.bytes()}
    return found, {name: getattr(said, name) for name in found}


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs(), st.sampled_from(sorted(RULES)), st.sampled_from(sorted(POLICIES)))
def test_any_rank_of_any_layout_holds_what_the_formulas_say(
    pool: Pool, config: RunConfig, optimizer: str, precision: str
) -> None:
    precision = "fp32" if (optimizer, precision) == ("sophia-h", "bf16") else precision  # which it refuses
    config = config.model_copy(
        update={
            "optimizer": OptimizerConfig(name=optimizer),
            "train": config.train.model_copy(update={"precision": precision}),
            "parallel": config.parallel.model_copy(update={"offload": "none"}),  # which the formulas do not describe
        }
    )
    try:
        prepare(config, own_precision=True, accumulate=False)
    except UsageError:
        assume(False)  # what does not go together
    for found, said in pool.run(held, config.parallel.world_size, config):
        assert said == found


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("split", [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4, "tp": 2, "etp": 1}])
def test_experts(pool: Pool, split: dict[str, int], zero: int) -> None:
    """Their own ranks shard them, with a router and a shared expert beside."""
    experts = {"count": 4, "per_token": 2, "ffn": 20, "shared": 1, "first": 1}
    for optimizer in ("adamw", "adafactor"):
        config = small_run({"dp": 4, "zero": zero, **split}, {"experts": experts}, precision="bf16")
        config = config.model_copy(update={"optimizer": OptimizerConfig(name=optimizer)})
        for found, said in pool.run(held, 4 * split.get("tp", 1), config):
            assert said == found


@pytest.mark.parametrize(("parallel", "optimizer", "family", "heads"), [
    ({"dp": 2, "zero": 3}, "adafactor", "tiny", 1), ({"pp": 2}, "adamw", "tiny-gpt", 2),
    ({"dp": 2, "zero": 1, "sequence_parallel": True}, "adam8bit", "tiny", 4), ({}, "adafactor", "tiny-gpt", 2),
])
def test_a_grid(pool: Pool, parallel: dict, optimizer: str, family: str, heads: int) -> None:
    """A key/value head for each two ranks, and one for all; rows of optimizer states that are cut along both axes."""
    model = {"name": family, "hidden": 64, "ffn": 320, "kv_heads": heads}
    config = small_run({"tp": 4, "tp_x": 2, **parallel}, model, precision="bf16")
    config = config.model_copy(update={"optimizer": OptimizerConfig(name=optimizer)})
    for found, said in pool.run(held, config.parallel.world_size, config):
        assert said == found


@pytest.mark.parametrize("optimizer", sorted(RULES))
@pytest.mark.parametrize("zero", [0, 3])
def test_every_optimizer(pool: Pool, optimizer: str, zero: int) -> None:
    """Wide enough that adam8bit quantises, and that its blocks are cut by shards and by tp."""
    model = {"hidden": 60, "ffn": 300, "heads": 6, "kv_heads": 3, "head_dim": 12}
    precision = "fp32" if optimizer == "sophia-h" else "bf16"  # which it refuses
    config = small_run({"dp": 2 if zero else 1, "zero": zero, "tp": 3}, model, precision=precision)
    config = config.model_copy(update={"optimizer": OptimizerConfig(name=optimizer)})
    for found, said in pool.run(held, config.parallel.world_size, config):
        assert said == found


@pytest.mark.parametrize("at_once", [5_000, 30_000, 10**9])
def test_what_muon_has_besides_in_an_update(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that is not far: of the whole model where it is small, of one matrix where nothing else may be whole."""
    monkeypatch.setattr("shoal.engine.optim.muon_distribution.AT_ONCE", at_once)
    monkeypatch.setattr("shoal.planning.cost.memory.optimizer_state.AT_ONCE", at_once)
    shape = small_run({}, {"hidden": 64, "ffn": 300, "layers": 1}).model.shape(vocab=259, sequence_length=8)
    said = state_bytes(shape, Layout(), POLICIES["fp32"], "muon", [StagePart(range(shape.layers))])
    weights = [(name, w.detach(), torch.zeros_like(w)) for name, w in Transformer(shape).named_parameters()]
    rule = build_rule(OptimizerConfig(name="muon"), Shards.from_parameters(weights, lambda name, w: 0.1))
    with Tracker() as tracker:
        rule.step(0.1)
        held = tracker.alive
        tracker.rewind()
        rule.step(0.1)
        besides = tracker.rewind() - held
    assert besides <= said.updating <= 1.2 * besides


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_is_the_papers_formula_but_for_gradients_in_fp32(zero: int) -> None:
    """2 + 4 + 4 + 8 = 18 bytes in bf16, and the shares fall as in Rajbhandari et al. 2020, figure 1.

    Stage 3 keeps no bf16 shard beside the fp32 one.
    """
    shape, n = model_shape("llama-3-8b"), 64
    whole = StagePart(range(shape.layers))
    said = state_bytes(shape, Layout(dp=n, zero=zero), POLICIES["bf16"], "adamw", [whole])
    kinds = [12, 4, 0 if zero == 3 else 2]  # sharded one after the other
    paper = shape.parameters() * (sum(kinds[zero:]) + sum(kinds[:zero]) / n)
    assert said.elements == shape.parameters()
    assert said.parameters + said.gradients + said.optimizer == pytest.approx(paper, rel=1e-3)
