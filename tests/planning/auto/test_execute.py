"""Any plan of any module, the cheapest as well as random ones, computes on real ranks what one device computes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from shoal.base.errors import UsageError
from shoal.engine.models.transformer import initialise
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.labs.autoshard.execute import Difference, compare, find_worst
from shoal.planning.auto.baselines import restrict_to_baselines
from shoal.planning.auto.capture.forward import export_forward
from shoal.planning.auto.capture.trace import capture_graph, differentiate
from shoal.planning.auto.intra.ilp import solve
from shoal.planning.auto.plan import build_plan
from tests.planning.auto.modules import (
    MLP,
    LoRA,
    Odd,
    beside_one_device,
    builder,
    random_plans,
    shard,
    transformer,
)

LINE, GRID = NamedMesh("x", (4,)), NamedMesh("xy", (2, 2))


def example(name):
    """A module and its inputs, filled with numbers."""
    torch.manual_seed(0)
    if name in ("llama", "gpt"):
        module = transformer(name)
        initialise(module, 0)
        tokens = torch.randint(0, 32, (4, 8))
        return module, (tokens, tokens.roll(1, 1))
    modules = {"mlp": MLP(12, 20, bias=True), "odd": Odd(), "lora": LoRA(12, 20)}
    module = modules[name].double()
    shape = {"mlp": (8, 12), "odd": (10, 6), "lora": (8, 12)}[name]
    return module, (torch.randn(shape, dtype=torch.float64),)


@pytest.mark.parametrize("name, mesh", [
    ("llama", LINE), ("gpt", LINE), ("mlp", GRID), ("odd", NamedMesh("xy", (3, 2))), ("lora", LINE),
], ids=str)  # fmt: skip
def test_plans_compute_what_one_device_computes(pool, name, mesh):
    module, inputs = example(name)
    forward = export_forward(module, inputs)
    graph = differentiate(forward)
    trained = {f"update {parameter}" for parameter, p in module.named_parameters() if p.requires_grad}
    rng = np.random.default_rng(len(name) + mesh.ranks)
    kinds = set()
    for plan in random_plans(builder(graph, "4xA100", mesh), rng, 1 if name in ("llama", "gpt") else 2):
        kinds.update(move.kind for resharding in plan.reshardings for move in resharding.moves)
        run = beside_one_device(plan, module, inputs, forward)
        expected = run[2]
        assert {op for op in expected if op.startswith("update ")} == trained
        results = pool.run(compare, mesh.ranks, *run)
        assert all(len(errors) == len(expected) + len(trained) for errors in results)
        assert find_worst(results)[0] < 1e-10
    if name not in ("odd", "lora"):
        assert {"all-reduce", "all-gather"} <= kinds


def test_a_wrong_move_is_seen(pool):
    module, inputs = example("mlp")
    (plan,) = random_plans(builder(capture_graph(module, inputs), "4xA100", LINE), np.random.default_rng(0))
    reduced = next(key for key, path in plan.moves.items() if [t.kind for t in path] == ["all-reduce"])
    broken = replace(plan, moves=plan.moves | {reduced: ()})
    assert find_worst(pool.run(compare, 4, *beside_one_device(broken, module, inputs)))[0] > 1e-6


def test_what_is_no_number_is_seen(pool):
    """A NaN in a block of one rank, behind differences that are none."""
    module, inputs = example("mlp")
    graph = capture_graph(module, inputs)
    plan = shard(builder(graph, "4xA100", LINE))
    stages, given, expected = beside_one_device(plan, module, inputs)
    given["input x"] = given["input x"].index_fill(0, torch.tensor([7]), torch.nan)
    results = pool.run(compare, 4, stages, given, expected)
    assert any(np.isfinite(list(errors.values())).any() for errors in results)
    found = Difference(4, *find_worst(results), "outputs")
    assert not found.exact and "not equal to one device: output " in found.verdict
    one = [{"first": 1e-14, "second": float("nan"), "third": 1e-15}]
    found = Difference(1, *find_worst(one), "outputs")
    assert not found.exact and "second differs" in found.verdict
    assert Difference(1, 1e-14, "first", "outputs").exact


def test_what_is_frozen_has_no_gradient_and_no_state():
    module, inputs = example("lora")
    build = builder(capture_graph(module, inputs), "4xA100", LINE)
    problem = build.problem()
    plan = build_plan(build, problem, solve(problem))
    stateless = {name for name, (*_, state) in plan.weight_shardings().items() if state is None}
    assert stateless == {"frozen.weight", "frozen.bias"}
    frozen, trained = 12 * 20 + 20, 2 * (12 + 20)
    whole = 2 * frozen + (2 + 4 + 12) * trained  # bytes in bf16, with gradients and AdamW's states of what is trained
    assert whole / 4 <= plan.memory <= whole
    sharded, _ = restrict_to_baselines(build, problem)["FSDP (ZeRO-3)"]
    fsdp = build_plan(build, sharded, solve(sharded))
    kept, _, state = fsdp.weight_shardings()["frozen.weight"]
    assert kept.used and state is None
    moved = [(t.kind, fsdp.graph.ops[move.name].numel) for move in fsdp.reshardings for t in move.moves]
    assert ("all-gather", 12 * 20) in moved, "frozen weights are gathered too"


class Lists(nn.Module):
    """Inputs in a dict, rare tokens that count more, the same output twice and behind a dropout of nothing, a constant,
    and an output of ten dims."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(8, 8, padding_idx=0, scale_grad_by_freq=True), nn.Linear(8, 8)

    def forward(self, given):
        y = self.mix(self.embed(given["tokens"][0]) * given["scale"])
        return {"y": y, "again": [y, nn.functional.dropout(y, 0.0), torch.arange(4)],
                "dims": y.tanh().view(4, 2, 1, 2, 1, 2, 1, 2, 2, 1)}  # fmt: skip


def test_odd_inputs_and_outputs_are_planned_and_run(pool):
    torch.manual_seed(0)
    inputs = ({"tokens": [torch.randint(0, 4, (4, 4))], "scale": torch.randn(8, dtype=torch.float64)},)
    module = Lists().double()
    graph = capture_graph(module, inputs)
    (plan,) = random_plans(builder(graph, "4xA100", GRID), np.random.default_rng(0))
    run = beside_one_device(plan, module, inputs)
    assert find_worst(pool.run(compare, 4, *run))[0] < 1e-10


@pytest.mark.parametrize("shape, words", [
    ((0, 4), r"input input has the shape \[0, 4\]: it has no elements to split"),
    ((4, 4, *[1] * 25), "has 27 dims, and shardings have letters for 26"),
])  # fmt: skip
def test_shapes_without_a_sharding_are_refused(shape, words):
    with pytest.raises(UsageError, match=words):
        capture_graph(nn.Sequential(nn.Flatten(1), nn.Linear(4, 8)), (torch.empty(shape),))


def test_what_has_nothing_to_train_is_refused():
    with pytest.raises(UsageError, match=r"^mine: nothing in it is trained"):
        export_forward(MLP(4, 8).requires_grad_(False), (torch.randn(2, 4),), "mine")
